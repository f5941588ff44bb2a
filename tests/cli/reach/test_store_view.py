"""What commands find in a store's files, with no daemon and beside one."""

from __future__ import annotations

import pytest
from torpor.memvid.index.index import INDEX_FILE
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.mark.parametrize("beside_a_daemon", [False, True])
def test_a_version_that_a_tag_alone_tells_of_is_told_to_who_looks_and_to_who_wakes(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, beside_a_daemon: bool
) -> None:
    torpor("append", "agent", "one")
    torpor("sleep", "agent")
    daemon.service.sessions["agent"].now(bundle_id=made_store.manifests[0].stem, version=1)
    daemon.service.store = str(made_store.path)
    ask = torpor if beside_a_daemon else made_store
    assert made_store("tag", "agent@2", "best").status == 0
    made_store.manifests[1].unlink()
    for command in (("ls",), ("show", "agent@1")):
        told = ask(*command, "--json").document["problems"]
        assert [problem["path"] for problem in told if "the tag best" in problem["message"]] == []
    (made_store.path / INDEX_FILE).unlink()
    for command in (("ls",), ("show", "agent@1"), ("show", "agent")):
        (told,) = ask(*command, "--json").document["problems"]
        assert (told["code"], told["path"]) == ("bundle_missing", str(made_store.manifests[1]))
        assert "the tag best still names it" in told["message"]
        assert "the tag best still names it" in ask(*command).err
    assert ask("show", "other" if ask is made_store else "agent@1", "--json").status == 0
    if beside_a_daemon:
        assert "there may be a newer version: The manifest of a version" in torpor("wake", "agent", "--plan").err
        woken = torpor("wake", "agent", "--json").document
        assert [problem["path"] for problem in woken["unreadable"]] == [str(made_store.manifests[1])]
    else:
        assert made_store("show", "other", "--json").document["problems"] == []
