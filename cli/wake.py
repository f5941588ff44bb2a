"""`torpor wake`: put a session's state back, without reading anything again."""

from __future__ import annotations

from typing import Annotated

import typer

from .daemon_link import connect, progress_of
from .formatting import format_bytes, format_count, format_seconds
from .options import JsonOption, SessionArgument, SocketOption
from .output import Output

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
        result = client.wake(session, version=version, on_event=on_event)
    if as_json:
        output.document("wake", result.model_dump(mode="json"))
    elif result.already_awake:
        output.line(f"{result.session}  was awake already, {format_count(result.token_count)} tokens")
    else:
        output.line(
            f"{result.session}  awake at version {result.version}: {format_count(result.token_count)} tokens,"
            f" {result.tokens_prefilled} of them prefilled, {format_bytes(result.bytes_read)} read"
            f" in {format_seconds(result.seconds)}"
        )
