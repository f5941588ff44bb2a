"""What a text map stores of its turns beside their lines: what counts beside their words, the ids of calls, blanks
around the words, and how much of a system text says fields of a request.

Templates strip such blanks, so they may be in no token. With them, words are told again as they were said.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from .results import CALL_BYTES, DIGEST_BYTES, NOTHING

if TYPE_CHECKING:
    from .transcripts import Turn

_CALLS_OF: Final = struct.Struct("<II")
"""The number of a turn, and of its calls, whose ids follow."""

MAX_CALL_IDS: Final = 64 * 1024
"""Of all calls of a text map. Beyond it, those of the oldest turns are forgotten: results of theirs that come in
another request count as in order."""

MAX_BLANKS: Final = 64 * 1024
"""Characters around all words of a text map. Beyond it, those of the oldest turns are forgotten: words that a template
has stripped are uncertain there."""

BEYOND_LINE: Final = struct.Struct(f"<IB{DIGEST_BYTES}s")
"""Of a turn: its number, an index of `_WRITTEN`, and `Turn.beyond`."""

_INSTRUCTED: Final = struct.Struct("<II")
"""The number of a turn, and its `instructed`."""

_WRITTEN: Final = ((False, None), (True, None), (True, False), (True, True))
"""`own` and `finished` of a turn."""


# --- what counts beside the words


def packed_beyond(turns: Sequence[Turn], first: int = 0) -> bytes:
    """`BEYOND_LINE` for each turn that is the model's own, or has more than its words. first: the number of the first
    of them."""
    lines = enumerate(turns, first)
    return b"".join(
        BEYOND_LINE.pack(at, _WRITTEN.index((turn.own, turn.finished)), turn.beyond)
        for at, turn in lines
        if turn.own or turn.beyond != NOTHING
    )


def with_beyond(turns: list[Turn], packed: object) -> list[Turn]:
    """The turns with those of `packed_beyond`. Raises ValueError: that does not make them."""
    if type(packed) is not bytes or len(packed) % BEYOND_LINE.size or len(packed) > len(turns) * BEYOND_LINE.size:
        raise ValueError("text_map has more than words of a wrong length")
    for at, written, beyond in BEYOND_LINE.iter_unpack(packed):
        roles = ("assistant",) if written else ("assistant", "tool")
        if at >= len(turns) or turns[at].role not in roles or written >= len(_WRITTEN):
            raise ValueError("text_map has more than words at a turn that cannot have it")
        own, finished = _WRITTEN[written]
        turns[at] = replace(turns[at], own=own, finished=finished, beyond=beyond)
    return turns


# --- ids of calls


def with_few_calls(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns with the ids of the newest calls that are kept."""
    count = _forgotten((len(turn.calls) for turn in turns), MAX_CALL_IDS)
    # Of answers in a row all ids are known or none: a result in their order counts the known ones.
    while 0 < count < len(turns) and turns[count - 1].role == turns[count].role == "assistant":
        count += 1
    return (*(replace(turn, calls=()) for turn in turns[:count]), *turns[count:]) if count else turns


def packed_calls(turns: Sequence[Turn]) -> bytes:
    """The ids of the calls of turns, as a text map stores them."""
    called = ((at, turn.calls) for at, turn in enumerate(turns) if turn.calls)
    return b"".join(_CALLS_OF.pack(at, len(ids)) + b"".join(ids) for at, ids in called)


def with_calls(turns: list[Turn], packed: object) -> list[Turn]:
    """The turns with those of `packed_calls`. Raises ValueError: that does not make them."""
    if type(packed) is not bytes:
        raise ValueError("text_map has calls of a wrong type")
    at = id_count = 0
    while at < len(packed):
        if at + _CALLS_OF.size > len(packed):
            raise ValueError("text_map has calls of a wrong length")
        turn, count = _CALLS_OF.unpack_from(packed, at)
        begins, at = at + _CALLS_OF.size, at + _CALLS_OF.size + count * CALL_BYTES
        id_count += count
        if not count or at > len(packed) or id_count > MAX_CALL_IDS:
            raise ValueError("text_map has calls of a wrong length")
        if turn >= len(turns) or turns[turn].role != "assistant" or turns[turn].calls:
            raise ValueError("text_map has calls at a turn that cannot have them")
        ids = tuple(packed[each : each + CALL_BYTES] for each in range(begins, at, CALL_BYTES))
        turns[turn] = replace(turns[turn], calls=ids)
    return turns


# --- blanks


def blanks_around(text: str) -> tuple[str, str]:
    """What stands before the words of a text, and behind them. A text of blanks alone stands before no words."""
    if not (text[:1].isspace() or text[-1:].isspace()):
        return "", ""
    rest = text.lstrip()
    return text[: len(text) - len(rest)], rest[len(rest.rstrip()) :]


def with_few_blanks(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns with the newest blanks that are kept."""
    count = _forgotten((sum(map(len, turn.blanks)) for turn in turns), MAX_BLANKS)
    return (*(replace(turn, blanks=("", "")) for turn in turns[:count]), *turns[count:]) if count else turns


def packed_blanks(turns: Sequence[Turn]) -> list[Any]:
    """The blanks around words, as a text map stores them: each pair behind the number of its turn."""
    return [part for at, turn in enumerate(turns) if any(turn.blanks) for part in (at, *turn.blanks)]


def with_blanks(turns: list[Turn], stored: object) -> list[Turn]:
    """The turns with those of `packed_blanks`. Raises ValueError: that does not make them."""
    if type(stored) is not list or len(stored) % 3 or len(stored) > 3 * len(turns):
        raise ValueError("text_map has blanks of a wrong form")
    for number, before, behind in zip(stored[::3], stored[1::3], stored[2::3], strict=True):
        if type(number) is not int or not 0 <= number < len(turns):
            raise ValueError("text_map has blanks at a turn that it has not")
        if type(before) is not str or type(behind) is not str or (before + behind).strip():
            raise ValueError("text_map has blanks that are none")
        turns[number] = replace(turns[number], blanks=(before, behind))
    return turns


# --- fields of a request


def packed_instructed(turns: Sequence[Turn]) -> bytes:
    """How much of system texts says fields of a request, as a text map stores it."""
    return b"".join(_INSTRUCTED.pack(at, turn.instructed) for at, turn in enumerate(turns) if turn.instructed)


def with_instructed(turns: list[Turn], packed: object) -> list[Turn]:
    """The turns with those of `packed_instructed`. Raises ValueError: that does not make them."""
    if type(packed) is not bytes or len(packed) % _INSTRUCTED.size or len(packed) > len(turns) * _INSTRUCTED.size:
        raise ValueError("text_map has fields of requests of a wrong length")
    for at, chars in _INSTRUCTED.iter_unpack(packed):
        if at >= len(turns) or turns[at].role != "system" or turns[at].instructed or not chars:
            raise ValueError("text_map has fields of requests at a turn that cannot have them")
        turns[at] = replace(turns[at], instructed=chars)
    return turns


def _forgotten(sizes: Iterable[int], most: int) -> int:
    """How many of the first turns lose what they have, for that of the rest to be at most so much."""
    sums = list(accumulate(sizes))
    more = sums[-1] - most if sums else 0
    return next(at for at, upto in enumerate(sums, 1) if upto >= more) if more > 0 else 0
