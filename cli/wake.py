"""`torpor wake`: put a session's state back, without reading anything again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import TorporError
from .daemon_link import connect, progress_of
from .damage import add_suggestion
from .formatting import format_bytes, format_plural, format_seconds
from .options import JsonOption, SessionArgument, SocketOption
from .output import Output, plain

VersionOption = Annotated[
    int | None,
    typer.Option("--version", metavar="N", min=1, show_default=False, help="An earlier sleep instead of the last."),
]


def wake(
    session: SessionArgument,
    version: VersionOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wake a session: its state comes back from disk, proven to be the one that slept, and no token is read again.

    Any command that needs a sleeping session wakes it by itself; this one does it ahead of time, and tells what it
    cost. A wake that is refused says what differs, and changes nothing.

    [bold]Examples[/]

    [cyan]torpor wake notes[/]
    [cyan]torpor wake notes --version 2[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client, progress_of(output, "wake") as on_event:
        try:
            result = client.wake(session, version=version, on_event=on_event)
        except TorporError as error:
            add_suggestion(error, Path(client.status().store), session, version)
            raise
    if as_json:
        output.document("wake", result.model_dump(mode="json"))
    elif result.already_awake:
        output.line(f"{plain(result.session)}  was awake already, {format_plural(result.token_count, 'token')}")
    else:
        output.line(
            f"{plain(result.session)}  awake at version {result.version}: {format_plural(result.token_count, 'token')},"
            f" {result.tokens_prefilled} of them prefilled, {format_bytes(result.bytes_read)} read"
            f" in {format_seconds(result.seconds)}"
        )
