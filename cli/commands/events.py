"""`torpor events`: the events of the daemon as they happen, a line each."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

from ...daemon.api.events import NoticeEvent
from ...memvid.units import format_count, format_plural
from ..errors import InvalidUsage
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, NamespaceChoice, SocketOption, option, require_sessions
from ..view.output import Output, plain
from ..view.perfetto import Trace
from ..view.streams import require_reader

SessionOption = Annotated[
    str | None, option("--session SESSION", "Only what is about this session.", callback=require_sessions)
]
NameOption = Annotated[
    list[str] | None, option("--name EVENT", "Only events of this name, such as sleep_ended. Can be repeated.")
]
PerfettoOption = Annotated[
    Path | None, option("--perfetto FILE", "Write a trace for Perfetto to a new file, until Ctrl-C.")
]


def events(
    session: SessionOption = None,
    namespace: NamespaceChoice = None,
    name: NameOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
    perfetto: PerfettoOption = None,
) -> None:
    """A line each, with sizes and times and no word of any text. It goes on until Ctrl-C, or until the daemon has
    stopped. With --json, each line is one document. Events that come faster than they are read are dropped, oldest
    first; a line 'lost' says how many.

    With --perfetto they go into a file that https://ui.perfetto.dev opens, or Perfetto's trace processor: a track a
    session, with its requests, reads, writes, sleeps, wakes and waits, and an arrow through all that one request did.
    The file is whole behind each event.

    [bold]Examples[/]

    [cyan]torpor events[/]
    [cyan]torpor events --session notes --name sleep_ended --name wake_ended[/]
    [cyan]torpor events --json >> events.jsonl[/]
    [cyan]torpor events --perfetto morning.pftrace[/]
    """
    output = Output(as_json=as_json)
    within = None if session else namespace  # the session's full name has it
    if perfetto is not None:
        _trace(output, perfetto, session, within, name, socket)
        return
    try:
        with connect(socket) as client, client.events(name, session=session, namespace=within) as happening:
            if output.stderr.is_terminal:  # who waits is to know that nothing has happened yet
                output.remark("[dim]listening until Ctrl-C[/]")
            for event in happening:
                _write(output, event)
    except KeyboardInterrupt:
        return


def _trace(
    output: Output,
    path: Path,
    session: str | None,
    namespace: str | None,
    names: list[str] | None,
    socket: Path | None,
) -> None:
    """Write a trace of what happens. Raises InvalidUsage: events are chosen by name, or there is such a file."""
    if names:
        raise InvalidUsage("A trace takes all events: leave --name out. In Perfetto you choose among them.")
    written, lost = 0, 0
    with connect(socket) as client, client.events(session=session, namespace=namespace) as happening:
        try:
            file = open(path, "xb", buffering=0, opener=_as_its_owner)  # noqa: SIM115 - the with below has it
        except FileExistsError:
            raise InvalidUsage(f"{path} is there already. Name a new file.", path=str(path)) from None
        trace = Trace()
        output.remark(f"[dim]events go to[/] {plain(path)} [dim]until Ctrl-C[/]")
        with file, suppress(KeyboardInterrupt):
            for event in happening:
                file.write(trace.packets(event))
                written += 1
                lost += int(event.facts["count"] or 0) if event.name == "lost" else 0
    if output.as_json:
        output.document("events", {"path": str(path), "events": written, "lost": lost})
        return
    missing = f", and {format_count(lost)} lost" if lost else ""
    output.line(f"{plain(path)}  {format_plural(written, 'event')}{missing}; https://ui.perfetto.dev opens it")


def _as_its_owner(path: str, flags: int) -> int:
    """A file that no other user reads: it has names of sessions."""
    return os.open(path, flags, 0o600)


def _write(output: Output, event: NoticeEvent) -> None:
    if output.as_json:
        output.document("events", {name: value for name, value in vars(event).items() if name != "kind"})
    else:
        output.line(render_event(event))
        sys.stdout.flush()
    require_reader()


def render_event(event: NoticeEvent) -> str:
    """Markup of one event: when, what, about which session, and its facts."""
    when = datetime.fromtimestamp(event.time_ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
    facts = "  ".join(f"[dim]{plain(name)}[/] {plain(_shown(value))}" for name, value in event.facts.items())
    return f"[dim]{when}[/]  {plain(event.name):<16}  {plain(event.session or '–')}  {facts}".rstrip()


def _shown(value: str | int | float | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else value
