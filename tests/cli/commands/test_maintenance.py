"""The commands that look after a store: what they ask of a daemon, and how what came of it is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.store import ImportRequest
from torpor.memvid.answers import Finding
from torpor.tests.cli.cli_rig import MadeStore, Torpor, pretend_terminal, unstyled
from torpor.tests.socket_api.server_rig import ServerThread


def asked(daemon: ServerThread, method: str) -> list[dict[str, Any]]:
    """What a method was asked with, without what was left at its default."""
    return [
        {name: value for name, value in arguments.items() if value not in (None, False)}
        for name, arguments in daemon.service.calls
        if name == method
    ]


@pytest.fixture
def slept(torpor: Torpor, daemon: ServerThread) -> ServerThread:
    """A daemon with a session that slept twice."""
    torpor("append", "notes", "one two")
    torpor("sleep", "notes")
    torpor("sleep", "notes")
    daemon.service.calls.clear()
    return daemon


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("repack",), "repack"),
        (("strip", "notes"), "strip"),
        (("prune", "--keep-last", "3"), "prune"),
        (("quantize", "notes"), "quantize"),
        (("repair",), "repair"),
        (("forget", "notes", "--yes"), "forget"),
        (("clear", "--label", "nightly", "--yes"), "clear"),
    ],
)
def test_a_terminal_is_shown_that_long_work_is_under_way_and_for_how_long(
    torpor: Torpor, slept: ServerThread, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], what: str
) -> None:
    pretend_terminal(monkeypatch, 100)
    assert re.search(rf"{what} [━╸╺]+ +0:00:0\d", unstyled(torpor(*arguments).err))


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_terminal_is_shown_how_much_of_a_file_is_written_or_read(
    made_store: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    made_store("export", "agent", tmp_path / "a.mvb")
    pretend_terminal(monkeypatch, 100)
    target = ("agent", tmp_path / "b.mvb") if command == "export" else (tmp_path / "a.mvb", "--as", "copy")
    ran = made_store(command, *target)
    assert ran.status == 0
    assert re.search(rf"{command}ing ━+ +100% [\d.]+ (KiB|B|MiB) of", unstyled(ran.err))


def test_what_stays_wrong_is_told_and_is_the_exit_status(torpor: Torpor, slept: ServerThread) -> None:
    slept.service.also("maintain", problems=(Finding("/store/x", "corrupt_block", "It is lost."),))
    ran = torpor("repair")
    assert ran.status == 6
    assert "corrupt_block  /store/x\n  It is lost." in ran.out
    assert "partly done" in ran.out
    assert torpor("repair", "--json").status == 6
    assert torpor("repair", "--dry-run").status == 0, "a plan has done its work by being told"


# --- import through a daemon


def test_a_daemon_is_handed_a_checked_copy_and_told_its_id(
    torpor: Torpor, daemon: ServerThread, made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's path never reaches the daemon (threat 19)."""
    daemon.service.store = str(made_store.path)
    source, bundle_id = short_path / "my-notes", made_store.manifests[0].stem
    made_store("export", "agent@1", source)
    found: list[bytes] = []
    adopt = daemon.service.answers[ImportRequest]

    async def look(request: ImportRequest) -> Any:
        found.append((made_store.path / "incoming" / f"{request.bundle_id}.mvb").read_bytes())
        return await adopt(request)

    monkeypatch.setitem(daemon.service.answers, ImportRequest, look)
    ran = torpor("import", source, "--as", "copy", "--json")
    assert ran.document["bundle_id"] == bundle_id
    assert asked(daemon, "import_bundle") == [{"bundle_id": bundle_id, "session": "copy"}]
    assert found == [source.read_bytes()]
    assert "imported as version 1" in torpor("import", source).out
