"""Which calls the results of a dialogue answer, where they are not in the order of the newest calls.

Of the id of a call there is a digest. A result names the call by the client's own id, or by that under which recall
tells it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from ..api.dialogue import Role
from ..models.chat_template import Message
from ..tasks.pieces import Pieces

if TYPE_CHECKING:
    from .transcripts import Turn

DIGEST_BYTES: Final = 16
CALL_BYTES: Final = 8
NOTHING: Final = bytes(DIGEST_BYTES)
"""In place of a digest of nothing."""

_PLACE: Final = struct.Struct("<4sIII")
"""What stands for the call of a result that is not in order: `_IS_PLACE`, how many rows back from the newest it is, the
number of the answer in its row, and of the call in that."""
_IS_PLACE: Final = b"call"

_TURNS_AT_ONCE: Final = 1024
"""Turns whose calls are noted in one piece of work."""


def hashed(text: str) -> bytes:
    """The digest of a text."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)


_SILENCE: Final = hashed("assistant\0")


@dataclass(frozen=True, slots=True)
class Called:
    """A call by its place. answers: the numbers of turns; place: among all calls of these."""

    answers: Sequence[int]
    place: int


@dataclass(slots=True)
class _Row:
    """Answers in a row, and the results behind them. numbers: of their turns. calls: those whose ids are known, each by
    the number of its answer in the row and its own in that. at: where they are in `calls`, by their ids; -1 for one
    that several have. came: how many results."""

    numbers: list[int] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    at: dict[bytes, int] = field(default_factory=dict)
    came: int = 0

    def add(self, number: int, calls: Sequence[bytes]) -> None:
        self.numbers.append(number)
        for place, each in enumerate(calls):
            self.at[each] = -1 if each in self.at else len(self.calls)
            self.calls.append((len(self.numbers) - 1, place))


class _Rows:
    """The answers of a dialogue, in rows. An empty answer says nothing: it stands where results came in two
    requests."""

    def __init__(self) -> None:
        self.rows = [_Row()]
        self._in_answer = False
        self._earlier: dict[bytes, tuple[int, int]] = {}  # by the id: a row, and where in its `calls`

    def add(self, number: int, role: Role, calls: Sequence[bytes], *, is_empty: bool) -> None:
        if is_empty:
            return
        was_in_answer, self._in_answer = self._in_answer, role == "assistant"
        if self._in_answer:
            if not was_in_answer:
                row = len(self.rows) - 1
                self._earlier |= {each: (row, at) for each, at in self.rows[row].at.items()}
                self.rows.append(_Row())
            self.rows[-1].add(number, calls)
        self.rows[-1].came += role == "tool"

    def exact_of(self, call_id: bytes) -> bytes:
        """What stands for the call of the newest result; nothing if it is in order, or the call is not known. Of two
        calls with one id in two rows the newer has it."""
        newest, row = self.rows[-1], len(self.rows) - 1
        at = newest.at.get(call_id)
        if at is None:
            row, at = self._earlier.get(call_id, (row, -1))
        elif at == newest.came - 1:
            return NOTHING
        return NOTHING if at < 0 else _PLACE.pack(_IS_PLACE, len(self.rows) - 1 - row, *self.rows[row].calls[at])

    def called(self, exact: bytes) -> Called:
        """The call of the newest result; none if no call has that place."""
        newest = self.rows[-1]
        if exact == NOTHING:
            if newest.came <= len(newest.calls):
                answer, place = newest.calls[newest.came - 1]
                return Called(newest.numbers[answer : answer + 1], place)
            return Called(newest.numbers, newest.came - 1)
        mark, back, answer, place = _PLACE.unpack(exact)
        if mark != _IS_PLACE or back >= len(self.rows):
            return Called((), 0)
        return Called(self.rows[-1 - back].numbers[answer : answer + 1], place)


class Results:
    """Tells which results of a dialogue are not in the order of the newest calls."""

    def __init__(self) -> None:
        self._rows = _Rows()

    @classmethod
    def behind(cls, turns: Sequence[Turn]) -> Pieces[Results]:
        """Those behind all turns of a dialogue."""
        results = cls()
        for number, turn in enumerate(turns):
            results._rows.add(number, turn.role, turn.calls, is_empty=is_empty(turn))
            if number % _TURNS_AT_ONCE == _TURNS_AT_ONCE - 1:
                yield
        return results

    def push(self, message: Message) -> bytes:
        """Take the next message. Gives the `exact` of a result that is not in order; nothing for any other message."""
        is_silent = message["role"] == "assistant" and not message.get("tool_calls") and not message["content"].strip()
        self._rows.add(0, message["role"], ids_of_calls(message), is_empty=is_silent)
        if message["role"] != "tool":
            return NOTHING
        return self._rows.exact_of(_call_digest(message.get("tool_call_id") or ""))


def calls_answered(turns: Sequence[Turn], first: int, last: int) -> dict[int, Called]:
    """The calls that results answer, by the numbers of the results' turns, which are from `first` to `last`."""
    called, rows = dict[int, Called](), _Rows()
    numbers = {number for number in range(first, last + 1) if turns[number].role == "tool"}
    for number, turn in enumerate(turns[: max(numbers, default=-1) + 1]):
        rows.add(number, turn.role, turn.calls, is_empty=is_empty(turn))
        if number in numbers:
            called[number] = rows.called(turn.beyond)
    return called


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
    return [own if _call_digest(own) == digest else f"call_{digest.hex()}" for digest, own in pairs]


def _call_digest(call_id: str) -> bytes:
    hit = _TOLD_CALL.fullmatch(call_id)
    return bytes.fromhex(hit[1]) if hit else hashed(call_id)[:CALL_BYTES]


_TOLD_CALL: Final = re.compile(f"call_([0-9a-f]{{{2 * CALL_BYTES}}})")


def ids_of_calls(message: Message) -> tuple[bytes, ...]:
    """Digests of the ids of its calls; none if these do not tell the calls apart."""
    ids = [call.get("id") or "" for call in message.get("tool_calls", ())]
    return tuple(map(_call_digest, ids)) if all(ids) and len(set(ids)) == len(ids) else ()
