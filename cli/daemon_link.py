"""How commands talk to the daemon: open a client, turn its events into a bar or into text, name what is missing.

The one module of this folder that knows the client's calling conventions. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..errors import TorporError
from ..socket_api.client import Client
from ..socket_api.errors import DaemonUnreachable
from ..socket_api.results import ProgressEvent, TokenEvent
from .output import OnProgress, Output

R = TypeVar("R")
OnEvent = Callable[[ProgressEvent | TokenEvent], None]

STAGE_NAMES = {"prefill": ("reading", "tokens"), "sleep": ("sleeping", "bytes"), "wake": ("waking", "bytes")}


def connect(socket: Path | None) -> Client:
    """Open a client on the given socket, or on the one where a daemon is by default.

    Raises:
        DaemonUnreachable: nobody answers there.
    """
    return Client(socket)


def find_daemon(socket: Path | None) -> Client | None:
    """Open a client if a daemon answers; None if none does."""
    try:
        return connect(socket)
    except DaemonUnreachable:
        return None


def with_session(output: Output, client: Client, session: str, model: str | None, act: Callable[[], R]) -> R:
    """Do something with a session; if there is none of that name, make it first and say so.

    A refusal for want of the session has changed nothing, so doing it again is safe.
    """
    try:
        return act()
    except TorporError as error:
        if error.code != "session_not_found":
            raise
    info = client.create(session, model=model)
    output.remark(f"[dim]new session[/] {info.session} [dim]on model[/] {info.model}")
    return act()


@contextmanager
def progress_of(output: Output, stage: str) -> Iterator[OnEvent]:
    """Show a stage's progress events as a bar on stderr."""
    what, unit = STAGE_NAMES[stage]
    with output.progress(what, unit=unit) as report:
        yield _progress_handler(report)


def _progress_handler(report: OnProgress) -> OnEvent:
    def on_event(event: ProgressEvent | TokenEvent) -> None:
        if isinstance(event, ProgressEvent):
            report(event.done, event.total)

    return on_event
