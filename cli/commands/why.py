"""`torpor why`: why a request read tokens again, or did not."""

from __future__ import annotations

from typing import Final

from ...daemon.api.reading import Reuse
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.units import format_count, format_plural
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, SessionArgument, SocketOption
from ..view.formatting import format_time
from ..view.output import Output, neutralise, plain

_NOT_TAKEN: Final = {
    "no_whole_block": f"only whole blocks of {BLOCK_TOKENS} are",
    "other_calls": "they were read in other calls than a new session makes",
    "other_bits": "its state may have other bits than this model computes",
    "no_room": "there was no memory for a copy",
    "unreadable": "it cannot be read",
}

_RECOMPUTED: Final = {
    "stripped": "it was stripped, as the store needed room or somebody asked for it. To keep a session whole, pin it "
    "(`torpor pin`), or give the store more (`torpor serve --store-budget`).",
    "ledger": "its last version ended in its ledger alone, as behind a crash, a short stop or a single question.",
}


def why(session: SessionArgument, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """A hit reused the whole prefix. Where a request, or the beginning of a new session, left the known prefix, this
    shows the token, the text on both sides, the kind of cause (a clock, reordered keys, dropped thinking, another
    template, an edited message) and what to do. The daemon remembers the last 16 requests of a session while it runs.

    [bold]Examples[/]

    [cyan]torpor why helper[/]
    [cyan]torpor why helper --json | jq '.requests[-1].cause'[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        result = client.why(session)
    if output.told("why", result):
        return
    if not result.requests:
        output.line(f"{plain(result.session)}  no request since the daemon began")
    for reuse in reversed(result.requests):
        output.line(_headline(reuse, result.session))
        if reuse.outcome == "diverged":
            for name, text in (("there", reuse.expected_text), ("asked", reuse.found_text)):
                shown = "(deleted since)" if text is None else neutralise(repr(text))
                output.line(f"    {name}  {plain(shown)}")
            output.line(f"    {plain(reuse.remedy or '')}")
            if reuse.became is not None:
                output.line(f"    {_what_became(reuse)}")
        if reuse.recomputed_tokens:
            output.line(f"    {_recomputed(reuse)}")
        for line in reuse.volatile:
            output.line(f"    volatile, so it is said later: {plain(neutralise(line))}")


def _what_became(reuse: Reuse) -> str:
    if reuse.became == "refused":
        return "It was refused, and nothing was changed."
    return f"The session went back to token {reuse.position}, and went on from there."


def _recomputed(reuse: Reuse) -> str:
    count = format_plural(reuse.recomputed_tokens, "token")
    reason = _RECOMPUTED.get(reuse.recomputed_because or "", reuse.recomputed_because)
    return f"{count} of the session read again{f': {plain(reason)}' if reason else ''}"


def _taken_over(reuse: Reuse, session: str) -> str:
    """The tokens taken over from another session."""
    if reuse.source == session:
        return ""
    if reuse.cached_tokens:
        return f"; {format_count(reuse.cached_tokens)} of them taken over"
    reason = _NOT_TAKEN.get(reuse.not_taken or "", reuse.not_taken)
    return f"; none taken over{f': {plain(reason)}' if reason else ''}"


def _headline(reuse: Reuse, session: str) -> str:
    when = f"{format_time(reuse.at_ns)}  {plain(reuse.verb)}"
    if reuse.outcome == "none":
        return f"{when}  none: no session began like this one"
    kept = f"{format_plural(reuse.common_tokens, 'token')} of {plain(reuse.source or '')}"
    if reuse.outcome == "hit":
        return f"{when}  hit: {kept}{_taken_over(reuse, session)}"
    where = "" if reuse.message_index is None else f", in message {reuse.message_index}"
    source = "" if reuse.source == session else f" from {plain(reuse.source or '')}"
    at = f"at token {reuse.position} of {reuse.stored_tokens}{where}"
    return f"{when}  diverged{source} {at}: {plain(reuse.cause or '')}"
