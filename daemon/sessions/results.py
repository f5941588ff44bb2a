"""Which calls the results of a dialogue answer, where they are not in the order of the calls.

Of the id of a call there is a digest. A result names the call by the client's own id, or by that under which recall
tells it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def hashed(text: str) -> bytes:
    """The digest of a text."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)


_SILENCE: Final = hashed("assistant\0")


class Results:
    """Tells which results of a dialogue are not in the order of the calls before them. Where these are not known, a
    result counts as in their order. An empty answer says nothing: it stands where results came in two requests. turns:
    those before the dialogue, from the calls on."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._calls: list[bytes] = []
        self._came = 0
        self._in_answer = False
        for turn in turns:
            self._pass(turn.role, turn.calls, is_empty=is_empty(turn))

    def push(self, message: Message) -> bytes:
        """The next message. `exact` of a result; nothing for others, and for a result in order."""
        came, calls = self._came, ids_of_calls(message)
        is_silent = message["role"] == "assistant" and not message.get("tool_calls") and not message["content"].strip()
        self._pass(message["role"], calls, is_empty=is_silent)
        if message["role"] != "tool" or not self._calls:
            return NOTHING
        answered = _call_digest(message.get("tool_call_id") or "")
        place = self._calls.index(answered) if self._calls.count(answered) == 1 else came
        return NOTHING if place == came else hashed(f"{place}")

    def _pass(self, role: Role, calls: Sequence[bytes], *, is_empty: bool) -> None:
        if is_empty:
            return
        was_in_answer, self._in_answer = self._in_answer, role == "assistant"
        if self._in_answer:
            self._calls, self._came = [*self._calls, *calls] if was_in_answer else list(calls), 0
        self._came += role == "tool"


def is_empty(turn: Turn) -> bool:
    """Whether it is an answer that says nothing."""
    return turn.digest == _SILENCE


def calls_before(turns: Sequence[Turn], at: int) -> int:
    """The number of the turn with which the answers begin whose calls a result at a place may answer."""
    while at and (turns[at - 1].role != "assistant" or is_empty(turns[at - 1])):
        at -= 1
    while at and turns[at - 1].role == "assistant":
        at -= 1
    return at


def call_answered(beyond: bytes, came: int, calls: int) -> int:
    """The place of the call that a result answers, both counted from 0. beyond: of its turn. came: its own place among
    the results. calls: how many there are."""
    return came if beyond == NOTHING else next((at for at in range(calls) if hashed(f"{at}") == beyond), came)


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
