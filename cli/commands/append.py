"""`torpor append`: have a session read a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ...daemon.api.reading import AppendResult
from ...errors import TorporError
from ...memvid.units import format_count, format_plural
from ...memvid.uri import parse_reference
from ..errors import Interrupted
from ..reach.daemon_link import connect, progress_of, tokens_after, with_session
from ..reach.generation_options import PriorityOption
from ..reach.inputs import load_text, require_no_file
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, ModelOption, NewLabelOption, SessionArgument, SocketOption, argument, option
from ..view.formatting import format_rate, format_seconds
from ..view.output import Output, plain
from ..view.wake_remarks import remark_on_branch, remark_on_wake_in_passing

MIN_RATED_TOKENS = 32

FileOption = Annotated[Path | None, option("--file -f PATH", "Read this file; - is stdin.")]


def append(
    session: SessionArgument,
    text: Annotated[str | None, argument("TEXT", "What to read; - is stdin.")] = None,
    file: FileOption = None,
    priority: PriorityOption = "normal",
    model: ModelOption = None,
    label: NewLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The session is made if there is none of that name. Reading is the slow part of a conversation; after
    [cyan]torpor sleep[/] it never has to be done again.

    [bold]Examples[/]

    [cyan]torpor append notes --file report.md[/]
    [cyan]git diff | torpor append review --label nightly --priority background[/]
    """
    output = Output(as_json=as_json)
    require_no_file(text)
    content = load_text(text, file, what="text")
    with connect(socket) as client, progress_of(output, "prefill") as show:

        def act(new: Mapping[str, Any]) -> AppendResult:
            try:
                return client.append(session, text=content, priority=priority, on_event=show, **new)
            except KeyboardInterrupt:
                raise Interrupted(_left_at(client.socket_path, session)) from None

        result = with_session(output, client, session, model, act, labels=label)
        ignore_interrupts()
    if not output.told("append", result):
        _say(output, result)


def _left_at(socket: Path, session: str) -> str:
    """Where a stopped append left its session, for people."""
    try:
        count = tokens_after(socket, session)
    except TorporError:
        return f"Stopped. A text is read whole or not at all; `torpor show {session}` tells where the session stands."
    if count is None:
        return "Stopped. Nothing was read."
    return (
        f"Stopped. A text is read whole or not at all; {parse_reference(session)} has {format_plural(count, 'token')},"
        " and can go on."
    )


def _say(output: Output, result: AppendResult) -> None:
    remark_on_wake_in_passing(output, result.woken)
    remark_on_branch(output, result.session, result.branched)
    cached = format_plural(result.cached_tokens, "token")
    known = f"; {cached} taken over from a session that begins alike" if result.cached_tokens else ""
    output.line(
        f"{plain(result.session)}  read {format_plural(result.tokens_added, 'token')}"
        f" in {format_seconds(result.seconds)}{_rate_of(result)}, now {format_count(result.token_count)}{known}"
    )


def _rate_of(result: AppendResult) -> str:
    """In brackets, the rate at which the model read: a wait for others, a wake, and tokens that were taken over have no
    part. Empty where it read so few that the rate is that of one call."""
    if result.prefilled_tokens < MIN_RATED_TOKENS or not result.reading_seconds:
        return ""
    return f" ({format_rate(result.prefilled_tokens, result.reading_seconds)})"
