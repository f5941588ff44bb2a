"""The commands that look after a store: what they ask of a daemon, and how what came of it is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.store import ImportRequest
from torpor.errors import TorporError
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        (("repack",), {"operation": "repack"}),
        (("repack", "notes", "--cold-after-days", "0.5"), {"session": "notes", "cold_after_days": 0.5}),
        (("strip", "notes"), {"session": "notes"}),
        (("strip", "notes@1"), {"session": "notes@1"}),
        (("prune", "--keep-last", "3"), {"operation": "prune", "keep_last": 3}),
        (("prune", "notes", "--keep-days", "7"), {"session": "notes", "keep_days": 7.0}),
        (("quantise", "notes"), {"session": "notes", "bits": 8}),
        (("quantise", "notes", "--bits", "4"), {"session": "notes", "bits": 4}),
        (("repair",), {"operation": "repair"}),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_running_daemon_carries_out_what_is_asked(
    torpor: Torpor, slept: ServerThread, arguments: tuple[str, ...], order: dict[str, Any], dry_run: bool
) -> None:
    ran = torpor(*arguments, *(["--dry-run"] if dry_run else []))
    assert ran.status == 0
    assert "2.00 KiB" in ran.out
    [given] = asked(slept, "maintain")
    assert given == {"operation": arguments[0]} | order | ({"dry_run": True} if dry_run else {})
    assert ("nothing done yet" in ran.out) is dry_run


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("repack",), "repack"),
        (("strip", "notes"), "strip"),
        (("prune", "--keep-last", "3"), "prune"),
        (("quantise", "notes"), "quantise"),
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


def test_a_report_in_json_is_the_whole_answer(torpor: Torpor, slept: ServerThread) -> None:
    document = torpor("repack", "--dry-run", "--json").document
    assert (document["command"], document["operation"], document["dry_run"]) == ("repack", "repack", True)
    assert (document["ok"], document["bytes_freed"], document["actions_left_out"]) == (True, 2048, 3)
    assert document["actions"][0]["path"].endswith(".mvp")
    assert document["problems"] == []


def test_what_stays_wrong_is_told_and_is_the_exit_status(torpor: Torpor, slept: ServerThread) -> None:
    slept.service.problems = (Finding("/store/x", "corrupt_block", "It is lost."),)
    ran = torpor("repair")
    assert ran.status == 6
    assert "corrupt_block  /store/x\n  It is lost." in ran.out
    assert "partly done" in ran.out
    assert torpor("repair", "--json").status == 6
    assert torpor("repair", "--dry-run").status == 0, "a plan has done its work by being told"


def test_forget_needs_yes_where_nobody_can_be_asked_but_a_plan_does_not(torpor: Torpor, slept: ServerThread) -> None:
    assert torpor("forget", "notes").status == 2
    assert torpor("forget", "notes", "--json").status == 2
    assert asked(slept, "maintain") == []
    assert torpor("forget", "notes", "--dry-run").status == 0
    assert "notes" in slept.service.sessions
    assert torpor("forget", "notes", "--yes").status == 0
    assert slept.service.sessions == {}
    again = torpor("forget", "notes", "--yes")
    assert (again.status, again.out) == (4, "")


def test_a_repair_from_a_folder_asks_for_the_daemon_to_be_stopped_first(
    torpor: Torpor, slept: ServerThread, tmp_path: Path
) -> None:
    ran = torpor("repair", "--from", tmp_path)
    assert (ran.status, "`torpor stop`" in ran.err) == (2, True)
    assert asked(slept, "maintain") == []


def test_prune_without_a_rule_is_wrong_usage(torpor: Torpor, slept: ServerThread) -> None:
    ran = torpor("prune", "notes")
    assert ran.status == 2
    assert "--keep-last" in ran.err
    assert asked(slept, "maintain") == []


@pytest.mark.parametrize(
    ("arguments", "hint"), [((), "SESSION"), (("notes", "--bits", "5"), "--bits"), (("--after", "1"), "--after")]
)
def test_quantise_needs_to_know_whom_and_in_how_many_bits(
    torpor: Torpor, slept: ServerThread, arguments: tuple[str, ...], hint: str
) -> None:
    ran = torpor("quantise", *arguments)
    assert ran.status == 2
    assert hint in ran.err
    assert asked(slept, "maintain") == []


def test_versions_are_tagged_and_pinned(torpor: Torpor, slept: ServerThread) -> None:
    assert torpor("tag", "notes@1", "before").out == "torpor://default/notes  version 1: tagged before\n"
    assert torpor("pin", "notes@1").out == "torpor://default/notes  version 1: tagged before, pinned\n"
    assert torpor("pin", "notes", "--json").document["version"] == 2
    assert torpor("untag", "notes", "before", "--json").document["tags"] == []
    assert torpor("unpin", "notes@1").out == "torpor://default/notes  version 1: no marks\n"
    assert torpor("untag", "notes@1", "before").status == 2


def test_a_name_that_is_no_store_is_not_made_one(torpor: Torpor, short_path: Path) -> None:
    for place in (short_path / "none", short_path / "empty"):
        (short_path / "empty").mkdir(exist_ok=True)
        for arguments in (
            ("repack",),
            ("repair",),
            ("prune", "--keep-last", "1"),
            ("pin", "x"),
            ("forget", "x", "--yes"),
        ):
            assert torpor(*arguments, "--store", place).status == 10, arguments
    assert not (short_path / "none").exists()
    assert list((short_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (("notes", "--version", "2"), {"session": "notes", "version": 2}),
        (("notes@2",), {"session": "notes@2"}),
        (("notes", "--version", "before"), {"session": "notes@before"}),
        (("notes", "--version", "12345678"), {"session": "notes@12345678"}),
    ],
)
def test_a_version_is_woken_by_every_name_it_has(
    torpor: Torpor, slept: ServerThread, arguments: tuple[str, ...], sent: dict[str, Any]
) -> None:
    torpor("wake", *arguments)
    assert asked(slept, "wake") == [sent]


def test_a_version_that_is_named_twice_is_wrong_usage(torpor: Torpor, slept: ServerThread) -> None:
    assert torpor("wake", "notes@1", "--version", "1").status == 2
    assert asked(slept, "wake") == []


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


def test_what_a_daemon_does_not_take_is_taken_back(
    torpor: Torpor, daemon: ServerThread, made_store: MadeStore, short_path: Path
) -> None:
    daemon.service.store = str(made_store.path)
    daemon.service.fault = FakeRefusal("It is there already.")
    made_store("export", "agent", short_path / "agent.mvb")
    assert torpor("import", short_path / "agent.mvb").status == 2
    assert list((made_store.path / "incoming").iterdir()) == []


class FakeRefusal(TorporError):
    code = "session_exists"
