"""No piece of data is read as markup or steers the terminal (threat 46): every text that is rendered, one by one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console, Group, RenderableType
from torpor.cli.commands.ls import render_sessions
from torpor.cli.commands.maintenance_report import render_actions
from torpor.cli.commands.show import render_detail
from torpor.cli.commands.verify import render_damage
from torpor.cli.serve.doctor import render_doctor
from torpor.cli.view.damage import SessionDamage, VersionState
from torpor.cli.view.markup import escape, unmarked
from torpor.cli.view.output import plain, render_problem
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look, Provenance, SessionDetail, SessionInfo
from torpor.memvid.answers import Action, Finding, Lossy, MaintenanceReport, ShownVersion
from torpor.socket_api.client.plain import record_of

HOSTILE = [
    "[#f00]",
    "[/]",
    "[link=http:x]y[/link]",
    "[bold]b[/bold]",
    ":warning:",
    "a\\[/]",
    "end\\",
    "\x1b[2J",
    "\u202eabc",
    "\u061cabc",
    "\udcff",
]
BUNDLE = "ab" * 32
# Facts as the commands get them; each text is told in a word of its own, so that its place on the screen is known.
INFO: dict[str, Any] = {
    "session": "torpor://default/notes",
    "namespace": "space",
    "name": "notes",
    "state": "awake",
    "model": "demo",
    "token_count": 3,
    "version": 1,
    "bundle_id": BUNDLE,
    "resident_bytes": 4,
    "written_bytes": 5,
    "dirty": True,
    "durability": "none",
    "branches": 2,
    "unnamed": True,
    "unreadable": True,
    "stripped": True,
    "unread_tokens": 2,
    "labels": ["label"],
    "lossy": {"bits": 8, "tokens": 3},
    "slept_ns": 1,
    "machine": "desk",
    "sampling": {"temperature": 0.5},
    "look": {"version": 1, "token_count": 3, "newest_version": 2, "newest_tokens": 9},
}
VERSION: dict[str, Any] = {
    "session": "torpor://default/notes",
    "identity": "ab" * 32,
    "model": "demo",
    "labels": ["label"],
    "unread_tokens": 0,
    "lossy": None,
    "unnamed": False,
    "used_ns": None,
    "version": 1,
    "bundle_id": "cd" * 32,
    "parent": "ef" * 32,
    "token_count": 3,
    "bundle_bytes": 4,
    "logical_bytes": 5,
    "created_ns": 6,
    "tags": ["tagged"],
    "pinned": True,
    "stripped": True,
}
DETAIL: dict[str, Any] = {
    "info": INFO,
    "versions": [VERSION],
    "tail_text": "the end",
    "layers": ["layer"],
    "lineage": ["01" * 32],
    "identity": {"weights": "digest"},
    "provenance": {
        "forked_from": {"session": "torpor://default/other", "version": 1, "bundle_id": "02" * 32, "tokens": 3},
        "folded_from": None,
        "recomputed": {"version": 1, "start": 0, "tokens": 3, "same_logits": True, "damaged": True},
        "elsewhere_tokens": 3,
        "slept_by": {"device": "a device"},
        "differs": [{"field": "device", "stored": "a device", "live": "another"}],
    },
    "environment": {"library": "of a version"},
}
MEMORY = {"budget_bytes": 2, "weights_bytes": 1, "sessions_bytes": 0, "reserved_bytes": 0}
WAITING = {"path": "c.toml", "reloads": 0, "problem": None, "waits_for_restart": ["keep_free"]}
DAEMON: dict[str, Any] = {
    "answers": True,
    "socket": "the socket",
    "problem": None,
    "pid": 1,
    "store": "the store",
    "uptime_s": 1.0,
    "disk": None,
    "http": None,
    "remote": None,
    "sessions_awake": 0,
    "sessions_asleep": 0,
    "memory": MEMORY,
    "models": [{"name": "demo"}],
    "queue": {"waiting": 1, "background": 0, "limit": 2},
    "config": {**WAITING, "waits_for_disuse": ["qwen"]},
}
MACHINE: dict[str, Any] = {"platform": "a platform", "blas": {"library": "a library", "reason": "the reason"}}
FILES: dict[str, Any] = {
    "path": "the store",
    "locked_by": None,
    "readable": True,
    "problem": None,
    "sessions": 0,
    "journalled": 0,
}
LOST = {**DAEMON, "answers": False}


def doctor(**facts: Any) -> dict[str, Any]:
    return {"machine": MACHINE, "daemon": DAEMON, "files": FILES, "log": "a log", **facts}


def render_session(facts: dict[str, Any]) -> RenderableType:
    told = {name: value for name, value in facts["info"].items() if name in SessionInfo.__dataclass_fields__}
    parts = {"lossy": Lossy(**told["lossy"]), "look": Look(**told["look"]), "sampling": Sampling(**told["sampling"])}
    versions = tuple(ShownVersion(**each) for each in facts["versions"])
    provenance = record_of(Provenance, facts["provenance"])
    info = SessionInfo(**(told | parts))
    detail = SessionDetail(**{**facts, "info": info, "versions": versions, "provenance": provenance})
    return Group(*render_detail(detail, 120))


def render_action(facts: dict[str, Any]) -> RenderableType:
    return render_actions(MaintenanceReport("repack", True, (Action(size_bytes=1, **facts),)))


def render_session_damage(facts: dict[str, Any]) -> RenderableType:
    states = (VersionState(1, 9, False, 3, "sound"),)
    return "\n".join(render_damage(SessionDamage(versions=states, **{**facts, "put_back": tuple(facts["put_back"])})))


def render_report(facts: dict[str, Any]) -> RenderableType:
    return render_doctor(*facts.values())


SCREENS: list[tuple[str, Callable[[dict[str, Any]], RenderableType], dict[str, Any], set[str]]] = [
    ("ls", lambda info: render_sessions([info]), INFO, {"namespace", "name", "state", "model", "bundle_id", "labels"}),
    (
        "show",
        render_session,
        DETAIL,
        {"session", "state", "model", "bundle_id", "labels", "parent", "tags", "tail_text"}
        | {"layers", "lineage", "identity", "a name in identity", "environment", "a name in environment"},
    ),
    ("a finding", lambda facts: render_problem(Finding(**facts)), {"path": "p1", "code": "c1", "message": "m1"}, set()),
    (
        "damage",
        render_session_damage,
        {"session": "s1", "put_back": ["p1"], "goes_on": "g1"},
        {"session", "put_back", "goes_on"},
    ),
    (
        "an action",
        render_action,
        {"kind": "k1", "path": "p1", "session": "s1", "version": 1, "reason": "r1"},
        {"kind", "path", "session", "reason"},
    ),
    (
        "doctor",
        render_report,
        doctor(),
        {"socket", "platform", "library", "reason", "path", "name", "log", "waits_for_disuse"},
    ),
    ("doctor of a fault", render_report, doctor(daemon={**LOST, "problem": "p1"}), {"problem"}),
    ("doctor of none", render_report, doctor(daemon=LOST), {"socket"}),
    ("doctor of a lock", render_report, doctor(daemon=LOST, files={**FILES, "locked_by": 7}), {"socket", "path"}),
    (
        "doctor of a configuration",
        render_report,
        doctor(daemon={**DAEMON, "config": {**WAITING, "problem": "p1", "waits_for_disuse": []}}),
        {"problem"},
    ),
]
"""What draws facts, the facts, and which of them are drawn, at the least."""


def drawn(renderable: RenderableType) -> str:
    """What a terminal would be sent, without its styles; links would show."""
    file = io.StringIO()
    Console(file=file, width=600, force_terminal=True, color_system=None, emoji=False).print(renderable)
    return file.getvalue()


def shown(hostile: str) -> str:
    """The same text as it may appear."""
    return (
        hostile.replace("\x1b", "␛").replace("\u202e", "\ufffd").replace("\u061c", "\ufffd").replace("\udcff", "\ufffd")
    )


def places(facts: Any, name: str = "") -> Iterator[tuple[str, Callable[[Any, str], None]]]:
    """Each text in the facts by the field that has it, and what puts another one there."""
    for key, value in [*(facts.items() if isinstance(facts, dict) else enumerate(facts))]:
        field = key if isinstance(key, str) and name not in ("identity", "environment") else name
        if isinstance(value, str):
            yield field, lambda found, text, key=key: found.__setitem__(key, text)
        elif isinstance(value, dict | list):
            for inner, put in places(value, field):
                yield inner, lambda found, text, key=key, put=put: put(found[key], text)
        if name in ("identity", "environment"):
            yield f"a name in {name}", lambda found, text, key=key: found.__setitem__(text, found.pop(key))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("screen", "render", "facts", "least"), SCREENS, ids=[screen for screen, *_ in SCREENS])
def test_no_text_on_a_screen_is_markup(screen: str, render: Any, facts: dict[str, Any], least: set[str]) -> None:
    def with_text(put: Callable[[Any, str], None], text: str) -> str:
        changed = copy.deepcopy(facts)
        put(changed, text)
        return drawn(render(changed))

    found = set()
    for field, put in places(facts):
        if "zzzz" in with_text(put, "zzzz"):
            found.add(field)
            for hostile in HOSTILE:
                told = shown(hostile).rpartition("/")[2] if field == "path" else shown(hostile)
                assert told[:12] in with_text(put, hostile), (screen, field)
    assert found >= least, "what is drawn no more is not tried"


def test_plain_data_stays_on_its_line() -> None:
    assert plain("a\nb\tc\rd") == "a␊b␉c␍d"


TEXTS = [*HOSTILE, "", "[", "[]", "\\", "\\\\[a]", "a[b]c", "\\[x", "[1]", "[A]", "x [red]y[/] z", "[a[b]", "]["]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("behind", TEXTS)
def test_a_text_is_shown_as_it_is_whatever_stands_behind_it(text: str, behind: str) -> None:
    markup = f"[bold]{escape(text)}[/]{escape(text)} {escape(behind)}[dim]{escape(behind)}[/] x] y"
    console = Console(file=io.StringIO(), emoji=False)
    assert unmarked(markup) == console.render_str(markup).plain == f"{text}{text} {behind}{behind} x] y"


@pytest.mark.parametrize("text", TEXTS)
def test_markup_is_read_as_rich_reads_it(text: str) -> None:
    markup = f"[bold]a[/] [cyan]{escape(text)}[/] b\\[c {escape(text + text)}[dim yellow]d[/dim yellow]"
    console = Console(file=io.StringIO(), emoji=False)
    assert unmarked(markup) == console.render_str(markup).plain
