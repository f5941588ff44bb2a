"""`torpor diverge`: several ways to go on from one session, and the best of them."""

from __future__ import annotations

import itertools
from typing import Annotated, Final

from ...daemon.api.branching import Attempt, DivergeResult
from ...daemon.api.events import TokenEvent, WorkEvent
from ...daemon.api.limits import MAX_CHILDREN, MAX_GENERATED_TOKENS
from ...daemon.api.sampling import Sampling
from ...memvid.units import format_count, format_plural
from ...memvid.uri import parse_reference
from ...socket_api.client.client import Client
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, tokens_after
from ..reach.generation_options import TemperatureOption
from ..reach.options import JsonOption, SocketOption, VersionArgument, option, require_sessions
from ..view.markup import escape
from ..view.output import Output, neutralise, plain, rows_table
from ..view.table import PlainTable

_DRAWN_AT: Final = 0.8
"""The temperature where the session's own is 0, at which all would be the same."""

CountOption = Annotated[int, option("--count N", "How many. Default: 4.", min=1, max=MAX_CHILDREN)]
LengthOption = Annotated[
    int, option("--max-tokens -n N", "At most N tokens each. Default: 80.", min=1, max=MAX_GENERATED_TOKENS)
]
KeepOption = Annotated[
    str | None, option("--keep NAME", "Make a session of the best, with this name.", callback=require_sessions)
]


def diverge(
    session: VersionArgument,
    count: CountOption = 4,
    max_tokens: LengthOption = 80,
    keep: KeepOption = None,
    temperature: TemperatureOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Each begins where the session stands, and writes beside the others. They share what they have in common, so that
    many take little more memory than one. The best comes first: the one with the highest mean log-probability of its
    tokens; what was cut off comes behind what has ended. The session does not change, and without --keep nothing stays.
    At temperature 0 all would be the same: a session of that temperature draws at 0.8 here.

    [bold]Examples[/]

    [cyan]torpor diverge notes --count 4 --max-tokens 80[/]
    [cyan]torpor diverge notes@before-refactor --keep better[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        if keep is not None:
            _require_free(client, keep)
        root = client.tree(session)
        if temperature is None and root.sampling.temperature == 0 and count > 1:
            temperature = _DRAWN_AT
            output.remark(f"[dim]drawn at temperature {temperature}: that of the session is 0[/]")
        if temperature is not None:
            client.guide([root.branch], sampling=Sampling(temperature=temperature))
        made = _write(output, client, root.branch, count, max_tokens)
        kept = None if keep is None else client.keep(made.attempts[0].branch, keep)
    if output.told("diverge", made, session=session, kept=kept):
        return
    output.show(_table(made.attempts, on_screen=output.stdout.is_terminal))
    if kept is not None:
        output.line(f"{plain(kept.session)}  kept: the first of these, {format_plural(kept.token_count, 'token')}")


def _write(output: Output, client: Client, branch: int, count: int, max_tokens: int) -> DivergeResult:
    with output.progress("write", unit="tokens") as report:
        written = itertools.count(1)

        def on_event(event: WorkEvent) -> None:
            if isinstance(event, TokenEvent) and event.token is not None:
                report(next(written), count * max_tokens)

        return client.diverge(branch, count=count, max_tokens=max_tokens, on_event=on_event)


def _require_free(client: Client, name: str) -> None:
    """Raises InvalidUsage: there is such a session. Asked before anything is written, which would be lost."""
    if tokens_after(client.socket_path, name) is not None:
        raise InvalidUsage(
            f"{parse_reference(name)} is there already. Choose another name for --keep.", option="--keep"
        )


def _table(attempts: tuple[Attempt, ...], *, on_screen: bool) -> PlainTable:
    table = rows_table("", "LOGPROB", "TOKENS", "ENDED BY", "TEXT", right=("LOGPROB", "TOKENS"))
    for number, each in enumerate(attempts, 1):
        text = escape(neutralise(each.text).strip("\n")) if on_screen else plain(each.text)
        measure = "–" if each.measure is None else f"{each.measure:.3f}"
        table.add_row(str(number), measure, format_count(len(each.tokens)), plain(each.finish_reason), text)
    return table
