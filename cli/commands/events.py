"""`torpor events`: the events of the daemon as they happen, a line each."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from ...daemon.api.events import NoticeEvent
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, NamespaceChoice, SocketOption, option, require_sessions
from ..view.output import Output, plain
from ..view.streams import require_reader

SessionOption = Annotated[
    str | None, option("--session SESSION", "Only what is about this session.", callback=require_sessions)
]
NameOption = Annotated[
    list[str] | None, option("--name EVENT", "Only events of this name, such as sleep_ended. Can be repeated.")
]


def events(
    session: SessionOption = None,
    namespace: NamespaceChoice = None,
    name: NameOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """A line each, with sizes and times and no word of any text. It goes on until Ctrl-C, or until the daemon has
    stopped. With --json, each line is one document. Events that come faster than they are read are dropped, oldest
    first; a line 'lost' says how many.

    [bold]Examples[/]

    [cyan]torpor events[/]
    [cyan]torpor events --session notes --name sleep_ended --name wake_ended[/]
    [cyan]torpor events --json >> events.jsonl[/]
    """
    output = Output(as_json=as_json)
    within = None if session else namespace  # the session's full name has it
    try:
        with connect(socket) as client, client.events(name, session=session, namespace=within) as happening:
            for event in happening:
                _write(output, event)
    except KeyboardInterrupt:
        return


def _write(output: Output, event: NoticeEvent) -> None:
    if output.as_json:
        output.document("events", {name: value for name, value in asdict(event).items() if name != "kind"})
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
