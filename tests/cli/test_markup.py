"""No piece of data is read as markup or steers the terminal (threat 46): every field that is rendered, one by one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, RenderableType
from torpor.cli.commands.ls import render_sessions
from torpor.cli.commands.maintenance_report import render_actions
from torpor.cli.commands.show import render_detail
from torpor.cli.commands.verify import render_damage
from torpor.cli.serve.doctor import render_doctor
from torpor.cli.view.damage import SessionDamage, VersionState
from torpor.cli.view.output import plain, render_problem
from torpor.memvid.answers import Action, Finding, MaintenanceReport

HOSTILE = [
    "[#f00]",
    "[/]",
    "[link=http://x]y[/link]",
    "[bold]b[/bold]",
    ":warning:",
    "a\\[/]",
    "end\\",
    "\x1b[2J",
    "\u202eabc",
    "\udcff",
]
BUNDLE = "ab" * 32


def against_each(test: Callable[[str, str], None]) -> Callable[[str], None]:
    """The test of a field with each hostile text, as one test."""

    def tried(field: str) -> None:
        for hostile in HOSTILE:
            test(field, hostile)

    return tried


def info(**changes: Any) -> dict[str, Any]:
    return {
        "session": "torpor://default/notes",
        "namespace": "default",
        "name": "notes",
        "state": "awake",
        "model": "demo",
        "token_count": 3,
        "version": 1,
        "bundle_id": BUNDLE,
        "resident_bytes": 4,
        "stored_bytes": 5,
        "dirty": True,
        "durability": "none",
        "unreadable": True,
        "stripped": True,
        "unread_tokens": 2,
        "lossy": {"bits": 8, "tokens": 3},
        "look": {"version": 1, "token_count": 3, "newest_version": 2, "newest_tokens": 9},
        "labels": ["one"],
        "slept_ns": 1,
        "sampling": {"temperature": 0.5},
        **changes,
    }


def detail(**changes: Any) -> dict[str, Any]:
    version = {
        "version": 1,
        "bundle_id": BUNDLE,
        "parent": BUNDLE,
        "token_count": 3,
        "bundle_bytes": 4,
        "logical_bytes": 5,
        "created_ns": 6,
        "tags": ["t"],
        "pinned": True,
        "stripped": True,
    }
    return {
        "info": info(),
        "versions": [{**version, **changes.pop("version", {})}],
        "tail_text": "the end",
        "layers": ["kv"],
        "lineage": [BUNDLE],
        "identity": {"weights": "ab"},
        "environment": {"mlx": "1"},
        **changes,
    }


def drawn(renderable: RenderableType) -> str:
    """What a terminal would be sent, without its styles; links would show."""
    file = io.StringIO()
    Console(file=file, width=400, force_terminal=True, color_system=None, emoji=False).print(renderable)
    return file.getvalue()


def shown(hostile: str) -> str:
    """The same text as it may appear."""
    return hostile.replace("\x1b", "␛").replace("\u202e", "\ufffd").replace("\udcff", "\ufffd")


@pytest.mark.parametrize("field", ["namespace", "name", "state", "model", "bundle_id", "labels"])
@against_each
def test_no_field_of_ls_is_markup(field: str, hostile: str) -> None:
    value: Any = [hostile] if field == "labels" else hostile
    assert shown(hostile)[:12] in drawn(render_sessions([info(**{field: value})]))


@pytest.mark.parametrize("field", ["session", "state", "model", "bundle_id", "labels", "sampling"])
@against_each
def test_no_field_of_a_shown_session_is_markup(field: str, hostile: str) -> None:
    value: Any = {"labels": [hostile], "sampling": {hostile: 1.0}}.get(field, hostile)
    assert shown(hostile) in drawn(render_detail(detail(info=info(**{field: value})), 120))


@pytest.mark.parametrize("field", ["tail_text", "layers", "lineage", "identity", "environment"])
@against_each
def test_no_section_of_show_is_markup(field: str, hostile: str) -> None:
    lists: dict[str, Any] = {"layers": [hostile], "lineage": [hostile]}
    maps: dict[str, Any] = {"identity": {hostile: hostile}, "environment": {hostile: hostile}}
    value = {**lists, **maps}.get(field, hostile)
    assert shown(hostile) in drawn(render_detail(detail(**{field: value}), 120))


@pytest.mark.parametrize("field", ["bundle_id", "parent", "tags"])
@against_each
def test_no_field_of_a_version_is_markup(field: str, hostile: str) -> None:
    value: Any = [hostile] if field == "tags" else hostile
    assert shown(hostile)[:12] in drawn(render_detail(detail(version={field: value}), 120))


@pytest.mark.parametrize("field", ["path", "code", "message"])
@against_each
def test_no_field_of_a_finding_is_markup(field: str, hostile: str) -> None:
    facts = {"path": "p", "code": "c", "message": "m"} | {field: hostile}
    assert shown(hostile) in drawn(render_problem(Finding(**facts)))


@pytest.mark.parametrize("field", ["session", "put_back", "goes_on"])
@against_each
def test_no_field_of_a_damaged_session_is_markup(field: str, hostile: str) -> None:
    states = (VersionState(1, 9, False, 3, "sound"),)
    facts: dict[str, Any] = {"session": "s", "versions": states, "put_back": ("p",), "goes_on": "g"}
    facts[field] = (hostile,) if field == "put_back" else hostile
    assert shown(hostile) in drawn("\n".join(render_damage(SessionDamage(**facts))))


@pytest.mark.parametrize("field", ["kind", "path", "session", "reason"])
@against_each
def test_no_field_of_an_action_is_markup(field: str, hostile: str) -> None:
    facts: dict[str, Any] = {"kind": "remove", "path": "p", "session": "s", "version": 1, "reason": "r"}
    action = Action(size_bytes=1, **{**facts, field: hostile})
    made = MaintenanceReport("repack", True, (action,))
    expected = shown(hostile).rpartition("/")[2] if field == "path" else shown(hostile)
    assert expected in drawn(render_actions(made))


@pytest.mark.parametrize(
    "field",
    [
        *("socket", "problem", "model", "store", "log", "platform", "library", "reason"),
        *("config", "config_problem", "config_waits"),
    ],
)
@against_each
def test_no_field_of_doctor_is_markup(field: str, hostile: str) -> None:
    machine: dict[str, Any] = {"platform": "p", "blas": {"library": "l", "reason": "r"}}
    daemon: dict[str, Any] = {
        "answers": field != "problem",
        "socket": "s",
        "problem": hostile if field == "problem" else None,
        "pid": 1,
        "uptime_s": 1.0,
        "sessions_awake": 0,
        "sessions_asleep": 0,
        "memory": {"budget_bytes": 2, "weights_bytes": 1, "sessions_bytes": 0, "reserved_bytes": 0},
        "queue": {"waiting": 1, "background": 0, "limit": 2},
        "models": [{"name": hostile if field == "model" else "m"}],
        "config": None,
        "disk": None,
    }
    if field.startswith("config"):
        problem = hostile if field == "config_problem" else None
        daemon["config"] = {"path": hostile, "reloads": 0, "problem": problem, "waits_for_restart": ["keep_free"]}
        daemon["config"]["waits_for_disuse"] = [hostile] if field == "config_waits" else []
    files: dict[str, Any] = {
        "path": "f",
        "locked_by": None,
        "readable": True,
        "problem": None,
        "sessions": 0,
        "journalled": 0,
    }
    if field == "socket":
        daemon["socket"] = hostile
    elif field == "store":
        files["path"] = hostile
    elif field == "platform":
        machine["platform"] = hostile
    elif field in ("library", "reason"):
        machine["blas"][field] = hostile
    log = hostile if field == "log" else "log"
    assert shown(hostile) in drawn(render_doctor(machine, daemon, files, log))
    if field in ("socket", "problem", "store"):
        lost = {**daemon, "answers": False}
        assert shown(hostile) in drawn(render_doctor(machine, lost, {**files, "locked_by": 7}, log))


def test_plain_data_stays_on_its_line() -> None:
    assert plain("a\nb\tc\rd") == "a␊b␉c␍d"
