"""`torpor fold`: a smaller session that goes on from a summary of another."""

from __future__ import annotations

from typing import Annotated

from ...memvid.units import format_count, format_plural
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.generation_options import PriorityOption
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, NewNameArgument, OwnLabelOption, SessionArgument, SocketOption, option
from ..view.formatting import format_seconds
from ..view.output import Output, plain

SummaryOption = Annotated[str | None, option("--summary TEXT", "The summary, in your words.")]
SummarizeOption = Annotated[
    int | None,
    option(
        "--summarize N",
        "Have the model write the summary, in at most so many tokens; its context must have room for them.",
        min=1,
    ),
]
TailOption = Annotated[
    int,
    option("--tail TOKENS", "How many of the last tokens go along as they are, from a turn on. Default: 0.", min=0),
]


def fold(
    session: SessionArgument,
    name: NewNameArgument,
    summary: SummaryOption = None,
    summarize: SummarizeOption = None,
    tail: TailOption = 0,
    priority: PriorityOption = "normal",
    label: OwnLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The old session is put to sleep with all that it has; the new one names it as its origin. The summary is yours
    (--summary), or the model writes it (--summarize).

    [bold]Examples[/]

    [cyan]torpor fold helper helper-2 --summary "We chose SQLite." --tail 800[/]
    [cyan]torpor fold helper helper-2 --summarize 200[/]
    """
    output = Output(as_json=as_json)
    if (summary is None) == (summarize is None):
        raise InvalidUsage("Give either --summary TEXT or --summarize N.", option="--summary")
    with connect(socket) as client, progress_of(output, "prefill") as on_event:
        result = client.fold(
            session,
            name,
            summary=summary,
            summarize=summarize,
            tail=tail,
            labels=label,
            priority=priority,
            on_event=on_event,
        )
        ignore_interrupts()
    if output.told("fold", result):
        return
    origin = result.folded_from
    output.line(
        f"{plain(result.session)}  folded from {plain(origin.session)} at version {origin.version}:"
        f" {format_count(origin.tokens)} tokens became {format_count(result.token_count)}, the last"
        f" {format_plural(result.tail_tokens, 'token')} as they were, in {format_seconds(result.seconds)}"
    )
    if summarize is not None:
        output.line(f"    {plain(result.summary)}")
