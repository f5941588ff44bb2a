"""`torpor why`: why requests read tokens again, or did not, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from ...daemon.api.causes import REMEDIES, By, CausesResult, Costs, RequestCost, Reuse
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.units import format_count, format_plural
from ..errors import InvalidUsage
from ..reach.options import (
    JsonOption,
    NamespaceChoice,
    SocketOption,
    StoreOption,
    argument,
    option,
    require_sessions,
)
from ..reach.since import SinceOption, parse_ago, parse_since
from ..reach.viewing import look
from ..view.formatting import format_name, format_seconds, format_time
from ..view.output import Output, neutralise, plain, rows_table
from ..view.table import PlainTable

_NOT_TAKEN: Final = {
    "no_whole_block": f"only whole blocks of {BLOCK_TOKENS} are",
    "other_calls": "they were read in other calls than a new session makes",
    "other_bits": "its state may have other bits than this model computes",
    "no_room": "there was no memory for a copy",
    "unreadable": "it cannot be read",
}

_RECOMPUTED: Final = {
    "": "the session went on from an earlier token, whose logits were not kept.",
    "stripped": "it was stripped, as the store needed room or somebody asked for it. To keep a session whole, pin it "
    "(`torpor pin`), or give the store more (`torpor serve --store-budget`).",
    "ledger": "its last version ended in its ledger alone, as behind a crash, a short stop or a single question.",
}


AnySessionArgument = Annotated[
    str | None,
    argument("SESSION", "NAME, NAMESPACE/NAME or torpor://NAMESPACE/NAME.", callback=require_sessions),
]
AllOption = Annotated[bool, option("--all", "Count the requests of all sessions, as without a SESSION.")]
ByOption = Annotated[
    By | None, option("--by WORD", "Count by cause, session, client or hour; by cause if left out. With --all.")
]


def why(
    session: AnySessionArgument = None,
    of_all: AllOption = False,
    since: SinceOption = None,
    by: ByOption = None,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """A hit reused the whole prefix. Where a request, or the beginning of a new session, left the known prefix, this
    shows the token, the text on both sides, the kind of cause (a clock, reordered keys, dropped thinking, another
    template, an edited message) and what to do. The last 16 requests of a session are told, also those before the
    daemon began; with --since, those of them from then on.

    With --all the requests of all sessions are counted: tokens that were read, and read again though a session had
    them, and the seconds by stage. The store keeps what it cost for some 60,000 requests, the oldest go first.

    [bold]Examples[/]

    [cyan]torpor why helper[/]
    [cyan]torpor why helper --json | jq '.requests[-1].cause'[/]
    [cyan]torpor why --all --since 2h[/]
    [cyan]torpor why --all --since 1d --by hour[/]
    """
    output = Output(as_json=as_json)
    if session is None:
        _tell_all(output, since, by or "cause", namespace, socket, store)
        return
    if of_all or by is not None:
        raise InvalidUsage("Give either a SESSION, or --all, which goes with --by.")
    since_ns = parse_since(since)
    result = look(socket, store, lambda source: source.why(session)).record
    result = replace(result, requests=tuple(each for each in result.requests if each.at_ns >= since_ns))
    if output.told("why", result):
        return
    if not result.requests:
        output.line(f"{plain(result.session)}  no request is known{_since(since_ns)}")
    for reuse in reversed(result.requests):
        _tell(output, reuse, result.session)
    _tell_problem(output, result.problem)


def _tell(output: Output, reuse: Reuse, session: str) -> None:
    output.line(_headline(reuse, session))
    if reuse.outcome == "diverged":
        for name, text in (("there", reuse.expected_text), ("asked", reuse.found_text)):
            shown = "(deleted since)" if text is None else neutralise(repr(text))
            output.line(f"    {name}  {plain(shown)}")
        output.line(f"    {plain(reuse.remedy or '')}")
        if reuse.became is not None:
            output.line(f"    {_what_became(reuse)}")
    for line in reuse.volatile:
        output.line(f"    volatile, so it is said later: {plain(neutralise(line))}")
    if reuse.cost is not None:
        if reuse.cost.recomputed_tokens:
            output.line(f"    {_recomputed(reuse.cost)}")
        output.line(f"    [dim]{_cost(reuse.cost)}[/]")


def _tell_problem(output: Output, problem: str | None) -> None:
    if problem is not None:
        output.remark(f"[yellow]not all is told[/]  {plain(problem)}")


_STAGES: Final = {
    "waited_seconds": "waited",
    "wake_seconds": "woke",
    "read_seconds": "read",
    "write_seconds": "wrote",
    "durable_seconds": "kept",
}


def _cost(cost: RequestCost) -> str:
    """What a request cost, and where its time went: stages that took no thousandth of it are left out."""
    again = f" ({format_count(cost.read_again_tokens)} again)" if cost.read_again_tokens else ""
    tokens = f"read {format_count(cost.read_tokens)}{again}, wrote {format_count(cost.written_tokens)}"
    stages = [
        f"{word} {format_seconds(getattr(cost, name))}"
        for name, word in _STAGES.items()
        if getattr(cost, name) > max(0.00005, cost.seconds / 1000)
    ]
    failed = f"; {plain(cost.code)}" if cost.code else ""
    by = f"; {plain(cost.client)}" if cost.client else ""
    where = f" ({', '.join(stages)})" if stages else ""
    return f"{tokens} in {format_seconds(cost.seconds)}{where}{failed}{by}"


# --- all sessions

_FIGURES: Final = {
    "REQUESTS": "requests",
    "AGAIN": "read_again_tokens",
    "READ": "read_tokens",
    "REUSED": "reused_tokens",
    "WRITTEN": "written_tokens",
    "TIME": "seconds",
    "WAITING": "waited_seconds",
    "WAKING": "wake_seconds",
    "READING": "read_seconds",
    "WRITING": "write_seconds",
    "KEEPING": "durable_seconds",
    "FAILED": "failed",
}
_FIRST_TO_GO: Final = ("FAILED", "KEEPING", "WRITING", "READING", "WAKING", "WAITING", "REUSED", "WRITTEN")
_WORDS: Final[dict[str, str]] = {
    "hit": "All that was known was used; a new session reads the end of a block again that is not whole.",
    "new": "No session began like this one.",
    "stripped": "The session had been stripped, as the store needed room.",
    "ledger": "The session's last version ended in its ledger alone, as behind a crash.",
    "recomputed": "The session had the tokens, but not what was computed for them.",
    "sleep": "Requests to sleep or to save: no prompt was read.",
    "wake": "Requests to wake: no prompt was read.",
    "fork": "Requests to fork: no prompt was read.",
    "fold": "A smaller session went on in the place of an exhausted one, and read what it was given to go on from.",
    "tree": "Branches of a tree: what they read and wrote, compared with no session.",
    **{cause: f"A new session took over nothing: {reason}." for cause, reason in _NOT_TAKEN.items()},
    **{str(cause): remedy for cause, remedy in REMEDIES.items()},
}

_OTHER: Final = "Requests of this verb: no prompt was compared with what sessions had."


def _tell_all(
    output: Output, since: str | None, by: By, namespace: str | None, socket: Path | None, store: Path | None
) -> None:
    since_ns, within = parse_since(since), None if since is None else _seconds(parse_ago(since))
    result = look(socket, store, lambda source: source.causes(since=within, by=by, namespace=namespace)).record
    if output.told("why", result):
        return
    if not result.rows:
        where = "" if namespace is None else f" in namespace {plain(namespace)}"
        output.line(f"no request is known{where}{_since(since_ns)}")
    else:
        output.show(_table(result))
        output.remark(f"[dim]requests since {format_time(result.since_ns)}[/]")
    if result.left_out:
        output.remark(f"[dim]{format_plural(result.left_out, 'row')} more (all counts them)[/]")
    if by == "cause":
        cells = max((len(row.key) for row in result.rows), default=0)
        for row in result.rows:
            output.remark(f"[dim]{plain(row.key.ljust(cells))}[/]  {plain(_WORDS.get(row.key, _OTHER))}")
    _tell_problem(output, result.problem)


def _seconds(ago: float) -> str:
    """A time ago as the verb takes it: above 0, and of at most nine digits."""
    seconds = round(min(max(ago, 0.001), 999_999_999.0), 3)
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _since(since_ns: int) -> str:
    return f" since {format_time(since_ns)}" if since_ns else ""


def _table(result: CausesResult) -> PlainTable:
    first, last = result.by.upper(), ("LAST AGAIN",) if result.by == "session" else ()
    columns, first_to_go = (first, *_FIGURES, *last), (*last, *_FIRST_TO_GO)
    table = rows_table(*columns, right=tuple(_FIGURES), whole=columns, first_to_go=first_to_go)
    for row in result.rows:
        table.add_row(_key(result.by, row.key), *_figures(row), *(_last_again(row) for _ in last))
    table.add_row("[dim]all[/]", *_figures(result.total), *("" for _ in last))
    return table


def _last_again(row: Costs) -> str:
    """Why tokens were last read again, and when."""
    return f"{plain(row.last_again)}, {format_time(row.last_again_ns)}" if row.last_again else "–"


def _key(by: str, key: str) -> str:
    if by == "session":
        return plain(format_name(key)) if key else "[dim](deleted since)[/]"
    if by == "hour":
        return format_time(int(key) * 10**9)
    return plain(key) if key else "[dim]Unix socket[/]"


def _figures(row: Costs) -> list[str]:
    values = [getattr(row, name) for name in _FIGURES.values()]
    return [
        (format_seconds(each) if each else "–") if isinstance(each, float) else format_count(each) for each in values
    ]


# --- one session


def _what_became(reuse: Reuse) -> str:
    if reuse.became == "refused":
        return "It was refused, and nothing was changed."
    return f"The session went back to token {reuse.position}, and went on from there."


def _recomputed(cost: RequestCost) -> str:
    count = format_plural(cost.recomputed_tokens, "token")
    reason = _RECOMPUTED.get(cost.recomputed_because, cost.recomputed_because)
    return f"{count} recomputed: {plain(reason)}"


def _taken_over(reuse: Reuse, session: str) -> str:
    """The tokens taken over from another session."""
    if reuse.source == session:
        return ""
    if reuse.cached_tokens:
        return f"; {format_count(reuse.cached_tokens)} of these taken over"
    reason = _NOT_TAKEN.get(reuse.not_taken or "", reuse.not_taken)
    return f"; none taken over{f': {plain(reason)}' if reason else ''}"


def _headline(reuse: Reuse, session: str) -> str:
    cause = (reuse.cause or reuse.outcome) if reuse.cost is None else reuse.cost.cause
    begun = f"{format_time(reuse.at_ns)}  {plain(reuse.verb)}  {plain(cause)}"
    if reuse.outcome == "none":
        return f"{begun}: no session began like this one"
    kept = f"{format_plural(reuse.common_tokens, 'token')} of {plain(reuse.source or '')}"
    if reuse.outcome == "hit":
        return f"{begun}: {kept}{_taken_over(reuse, session)}"
    where = "" if reuse.message_index is None else f", in message {reuse.message_index}"
    source = "" if reuse.source == session else f" from {plain(reuse.source or '')}"
    at = f"at token {reuse.position} of {reuse.stored_tokens}{where}"
    return f"{begun}: diverged{source} {at}{_taken_over(reuse, session)}"
