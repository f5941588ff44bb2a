"""Which calls the results of a dialogue answer, where they are not in the order of the newest calls.

Of the id of a call there is a digest. A result names the call by the client's own id, or by that under which recall
tells it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from ..api.dialogue import Role
from ..models.chat_template import Message

if TYPE_CHECKING:
    from .transcripts import Turn

DIGEST_BYTES: Final = 16
CALL_BYTES: Final = 8
NOTHING: Final = bytes(DIGEST_BYTES)
"""In place of a digest of nothing."""

_MOST_PLACES: Final = 1024
"""Calls of the newest answers among which one is looked for by its place, where their ids are not known any more."""


def hashed(text: str) -> bytes:
    """The digest of a text."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)


_SILENCE: Final = hashed("assistant\0")


@dataclass(slots=True)
class _Answers:
    """Answers in a row, and the results behind them. numbers: of their turns. calls: the ids of all their calls that
    are known. came: how many results."""

    numbers: list[int] = field(default_factory=list)
    calls: list[bytes] = field(default_factory=list)
    came: int = 0


class _Rows:
    """The answers of a dialogue, in rows. An empty answer says nothing: it stands where results came in two
    requests."""

    def __init__(self, turns: Iterable[Turn] = (), first: int = 0) -> None:
        self.rows = [_Answers()]
        self._in_answer = False
        for number, turn in enumerate(turns, first):
            self.add(number, turn.role, turn.calls, is_empty=is_empty(turn))

    def add(self, number: int, role: Role, calls: Sequence[bytes], *, is_empty: bool) -> None:
        if is_empty:
            return
        was_in_answer, self._in_answer = self._in_answer, role == "assistant"
        if self._in_answer:
            self.rows += [] if was_in_answer else [_Answers()]
            self.rows[-1].numbers.append(number)
            self.rows[-1].calls += calls
        self.rows[-1].came += role == "tool"


class Results:
    """Tells which results of a dialogue are not in the order of the newest calls. A result whose call is not known
    counts as in their order. turns: all before the dialogue."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        newest = calls_before(turns, len(turns))
        self._before = turns[:newest]
        self._rows = _Rows(turns[newest:])

    def push(self, message: Message) -> bytes:
        """The next message. `exact` of a result; nothing for others, and for a result in order."""
        is_silent = message["role"] == "assistant" and not message.get("tool_calls") and not message["content"].strip()
        self._rows.add(0, message["role"], ids_of_calls(message), is_empty=is_silent)
        if message["role"] != "tool":
            return NOTHING
        newest, answered = self._rows.rows[-1], _call_digest(message.get("tool_call_id") or "")
        if (times := newest.calls.count(answered)) == 1:
            place = newest.calls.index(answered)
            return NOTHING if place == newest.came - 1 else hashed(f"{place}")
        return NOTHING if times else self._earlier(answered)

    def _earlier(self, answered: bytes) -> bytes:
        """`exact` of a result whose call stands before the newest answers."""
        for back, row in enumerate(reversed(self._rows.rows[:-1]), 1):
            if row.calls.count(answered) == 1:
                return _at(back, row.calls.index(answered))
        if (found := self._places_before.get(answered)) is None:
            return NOTHING
        back, place = found
        return _at(back + len(self._rows.rows) - 1, place)

    @cached_property
    def _places_before(self) -> Mapping[bytes, tuple[int, int]]:
        """The places of the calls before those turns, by their ids: how many rows back, and where in that. Of two with
        one id the newest has it."""
        found: dict[bytes, tuple[int, int]] = {}
        for back, row in enumerate(reversed(_Rows(self._before).rows)):
            for at, each in enumerate(row.calls):
                found.setdefault(each, (back, at))
        return found


@dataclass(frozen=True, slots=True)
class Called:
    """A call, by its place: among all calls of the answers that are turns of these numbers."""

    answers: Sequence[int]
    place: int


def calls_answered(turns: Sequence[Turn], first: int, last: int) -> dict[int, Called]:
    """The calls that results answer, by the numbers of the results' turns, which are from `first` to `last`."""
    found, rows = dict[int, Called](), _Rows()
    for number, turn in enumerate(turns[: last + 1]):
        rows.add(number, turn.role, turn.calls, is_empty=is_empty(turn))
        if turn.role == "tool" and number >= first:
            found[number] = _called(turn.beyond, rows.rows)
    return found


def _called(beyond: bytes, rows: Sequence[_Answers]) -> Called:
    newest = rows[-1]
    in_order = Called(newest.numbers, newest.came - 1)
    if beyond == NOTHING:
        return in_order
    for place in range(max(len(newest.calls), _MOST_PLACES)):
        if hashed(f"{place}") == beyond:
            return Called(newest.numbers, place)
    for back, row in enumerate(reversed(rows[:-1]), 1):
        for place in range(len(row.calls)):
            if _at(back, place) == beyond:
                return Called(row.numbers, place)
    return in_order


def _at(back: int, place: int) -> bytes:
    """What stands for a call that is not one of the newest answers'. back: rows of answers before those."""
    return hashed(f"{back} {place}")


def is_empty(turn: Turn) -> bool:
    """Whether it is an answer that says nothing."""
    return turn.digest == _SILENCE


def calls_before(turns: Sequence[Turn], at: int) -> int:
    """The number of the turn with which the newest answers before a place begin."""
    while at and (turns[at - 1].role != "assistant" or is_empty(turns[at - 1])):
        at -= 1
    while at and turns[at - 1].role == "assistant":
        at -= 1
    return at


def told_ids(turn: Turn, ids: Sequence[str]) -> list[str]:
    """The ids under which the calls of an answer are told, as a result may have them. Of those that a client gave
    there is only the digest. ids: those that are made up for the calls."""
    if len(turn.calls) != len(ids):
        return list(ids)
    pairs = zip(turn.calls, ids, strict=True)
    return [made if _call_digest(made) == known else f"call_{known.hex()}" for known, made in pairs]


def _call_digest(call_id: str) -> bytes:
    told = _TOLD_CALL.fullmatch(call_id)
    return bytes.fromhex(told[1]) if told else hashed(call_id)[:CALL_BYTES]


_TOLD_CALL: Final = re.compile(f"call_([0-9a-f]{{{2 * CALL_BYTES}}})")


def ids_of_calls(message: Message) -> tuple[bytes, ...]:
    """Digests of the ids of its calls; none if these do not tell the calls apart."""
    ids = [call.get("id") or "" for call in message.get("tool_calls", ())]
    return tuple(map(_call_digest, ids)) if all(ids) and len(set(ids)) == len(ids) else ()
