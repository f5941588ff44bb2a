"""`rm`: by a daemon, and in the files of a store that none serves; what it tells of names and marks."""

from __future__ import annotations

import re

import pytest
from torpor.daemon.api.process import RemoteUse
from torpor.memvid.store import Store
from torpor.memvid.units import format_bytes
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread


def versions(made: MadeStore) -> list[int]:
    return [version["version"] for version in made("show", "agent", "--json").document["versions"]]


@pytest.mark.parametrize("by_name", [True, False])
def test_rm_deletes_in_the_store_that_is_named_and_asks_no_daemon_then(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    torpor("append", "agent", "one")
    monkeypatch.setenv("TORPOR_STORE", str(made_store.path))
    delete = made_store if by_name else torpor
    assert delete("rm", "agent@1", "agent@9", "--yes").status == 3
    assert versions(made_store) == [2]
    (result,) = delete("rm", "agent", "--yes", "--json").document["results"]
    assert (result["session"], result["versions_deleted"]) == ("torpor://default/agent", 1)
    assert [info["name"] for info in made_store("ls", "--json").document["sessions"]] == ["other"]
    assert "agent" in daemon.service.sessions
    assert made_store("verify", "--deep").status == 0


def test_steps_back_into_another_session_change_nothing(made_store: MadeStore) -> None:
    with Store.open(made_store.path, writable=True) as store:
        base = making.sleep(store, 300, uri=SessionUri("default", "base"))
        making.sleep(store, 600, uri=SessionUri("default", "child"), before=base)
    for words in (("rm", "--yes"), ("tag", "keep"), ("pin",), ("unpin",), ("strip",)):
        refused = made_store(words[0], "child~1", *words[1:])
        assert refused.status == 2, words
        assert "child~1 is torpor://default/base@1; name it so." in " ".join(refused.err.split())
    assert made_store("cat", "child~1", "--tokens").status == 0
    assert made_store("rm", "base@1", "--yes").status == 0


@pytest.mark.parametrize("beside_a_daemon", [False, True])
def test_rm_tells_before_and_after_which_tags_and_pins_go(
    torpor: Torpor,
    made_store: MadeStore,
    daemon: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    beside_a_daemon: bool,
) -> None:
    for mark in (("tag", "agent@1", "first"), ("tag", "agent@1", "best"), ("pin", "agent@2"), ("pin", "agent@1")):
        assert made_store(*mark).status == 0
    torpor("append", "agent", "one")
    for _ in range(2):
        torpor("sleep", "agent")
    torpor("append", "fresh", "one")
    daemon.service.store = str(made_store.path)
    delete = torpor if beside_a_daemon else made_store
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question))
    assert delete("rm", "agent@first", "agent").status == 1
    both = "with the tags best, first and"
    assert asked == [f"Delete agent@first ({both} 1 pin), agent ({both} 2 pins) for good?"]
    assert delete("rm", "other").status == 1
    assert re.fullmatch(
        r"Delete other for good\? [0-9.]+ KiB is its alone, and freed; 0 B is shared, and stays\.", asked[1]
    )
    assert delete("rm", "agent", "other").status == 1
    with Store.open(made_store.path, writable=False) as store:
        alone = sum(each.alone_bytes for each in store.usage().sessions if each.session.endswith(("/agent", "/other")))
    assert asked[2].endswith(f"? {format_bytes(alone)} is theirs alone, and freed; 0 B is shared, and stays.")
    assert delete("rm", "agent@2", "--yes").out.rstrip().endswith("freed; with it went 1 pin")
    assert delete("rm", "other", "--yes").out.rstrip().endswith("freed") or beside_a_daemon


@pytest.mark.parametrize("beside_a_daemon", [False, True])
def test_rm_says_that_a_name_is_unknown_before_it_asks(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, beside_a_daemon: bool
) -> None:
    torpor("append", "fresh", "one")
    daemon.service.store = str(made_store.path)
    delete = torpor if beside_a_daemon else made_store
    refused = delete("rm", "nope", "agent", "--json")
    assert (refused.status, refused.error["error"]["code"]) == (4, "session_not_found")
    assert delete("rm", "agent").status == 2
    if beside_a_daemon:
        assert delete("rm", "fresh").status == 2, "it is awake alone"
    assert versions(made_store) == [1, 2]


@pytest.mark.parametrize("words", [("rm", "agent"), ("rm", "agent@1"), ("forget", "agent"), ("clear", "--label", "x")])
@pytest.mark.parametrize("has_remote", [True, False])
def test_the_question_says_that_the_remote_loses_it_too(
    torpor: Torpor,
    made_store: MadeStore,
    daemon: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    *,
    has_remote: bool,
) -> None:
    daemon.service.store = str(made_store.path)
    daemon.service.also("status", remote=RemoteUse("file:///r", 0, 0, 0.0) if has_remote else None)
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question))
    assert torpor(*words).status == 1
    (question,) = asked
    assert question.endswith(" Copies in file:///r go, too; `torpor strip` frees this disk alone.") is has_remote
    if not has_remote:
        assert "strip" not in question
