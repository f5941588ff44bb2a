"""`torpor fork`: a new session that begins as another one stands."""

from __future__ import annotations

from typing import Annotated

from ...memvid.units import format_bytes, format_plural
from ..reach.daemon_link import connect, progress_of
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, NewNameArgument, OwnLabelOption, SocketOption, VersionArgument, option
from ..view.formatting import format_seconds
from ..view.output import Output, plain

AtOption = Annotated[
    int | None,
    option(
        "--at TOKEN",
        "Begin with only its first TOKEN tokens. The fork reports the tokens that it computes for that.",
        min=1,
    ),
]


def fork(
    version: VersionArgument,
    name: NewNameArgument,
    at: AtOption = None,
    label: OwnLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """From there each goes its own way. The fork sleeps and is durable. It shares all its blocks with the other
    session, so a hundred forks of one long context take the space of one. An awake session is saved first, and stays
    awake.

    [bold]Examples[/]

    [cyan]torpor fork notes try-1[/]
    [cyan]torpor fork notes@before-refactor try-2 --label experiment[/]
    [cyan]torpor fork notes earlier --at 1500[/]
    [cyan]torpor fork notes~1:1500 earlier-yet[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client, progress_of(output, "sleep") as on_event:
        result = client.fork(version, name, at_token=at, labels=label, on_event=on_event)
        ignore_interrupts()
    if output.told("fork", result):
        return
    origin = result.forked_from
    output.line(
        f"{plain(result.session)}  forked from {plain(origin.session)} at version {origin.version} with"
        f" {format_plural(origin.tokens, 'token')}: {format_plural(result.blocks_reused, 'block')} in common,"
        f" {format_bytes(result.bytes_written)} written, {format_plural(result.tokens_prefilled, 'token')} computed"
        f" in {format_seconds(result.seconds)}"
    )
