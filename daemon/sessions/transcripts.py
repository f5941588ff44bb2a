"""Transcripts: finds by text which messages of a full chat a session has read already.

Owns the text map of a session (QX8): for each committed message a digest of its role and text, and where in the ledger
the reading or writing ended that it was part of. Values only; nothing here renders, tokenises or reads.

An assistant's text is the text shown of the committed tokens. It is also recognised without its thinking, and with
other blanks around it: clients and templates strip both from earlier turns. Any other change by a client (the JSON of a
tool call rewritten, say) makes it another message.

A text map ends where the ledger continues with text or tokens that did not come by a chat (QC7): nothing is added to it
after that, so that it stays shorter than the ledger and nothing there matches by text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from blake3 import blake3

from ...memvid.limits import MAX_TOKENS
from ..models.chat_template import Message

TEXT_MAP: Final = "text_map"
"""Under which the session map keeps it."""

MAX_TURNS: Final = 16_384
"""Messages of one text map, which then has 600 KiB in each version; also those of one transcript, which could not match
a longer one. Behind that many nothing is added."""

MAX_SYSTEM_CHARS: Final = 256 * 1024
"""Of the system text that is kept to render a conversation from its beginning again, at most 1 MiB of UTF-8."""

_ROLES: Final = ("system", "user", "assistant", "tool")
_OWN_SYSTEM: Final = "own_system"
_DIGEST_BYTES: Final = 16
_LINE: Final = struct.Struct(f"<BI{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
_THINK, _END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Turn:
    """A committed message.

    whole, bare: what it is recognised by; the second is that of an assistant's words without the thinking.
    end: tokens of the ledger at the end of what it was read or written together with: an assistant's words at their
        end token, if the template sets that behind them; others at the end of the next such words, or of the request.
    """

    role: str
    whole: bytes
    bare: bytes
    end: int

    @classmethod
    def of(cls, message: Message, end: int) -> Turn:
        """The mark of a message."""
        role, text = message["role"], message["content"]
        bare = without_thinking(text) if role == "assistant" else text
        return cls(role, _digest(role, text), _digest(role, bare), end)

    def is_mark_of(self, message: Message) -> bool:
        """Whether this message was committed, or it without its thinking."""
        return _digest(message["role"], message["content"]) in (self.whole, self.bare)


@dataclass(frozen=True, slots=True)
class TextMap:
    """The committed messages of a session from the beginning of its ledger on.

    system: the text that opened its chat, unless that is too long to be kept.
    """

    turns: tuple[Turn, ...] = ()
    system: str | None = None

    @property
    def end(self) -> int:
        """Tokens that it tells of."""
        return self.turns[-1].end if self.turns else 0

    @property
    def places(self) -> tuple[int, ...]:
        """Where another turn follows on an assistant's words. Words whose end is that of the turn behind them have none
        that is known."""
        ends = [*(turn.end for turn in self.turns[1:]), None]
        known = zip(self.turns, ends, strict=False)
        return tuple(turn.end for turn, following in known if turn.role == "assistant" and following != turn.end)

    def extended(
        self,
        messages: Sequence[Message],
        *,
        start: int,
        end: int,
        lengths: Sequence[int] = (),
    ) -> TextMap:
        """With messages that were read or written together, from one position of the ledger to another. As it is, if it
        does not tell all that is before them, or would become too long.

        lengths: tokens behind `start` at the end of each message; all of them end together if there are none.
        """
        if start != self.end or len(self.turns) + len(messages) > MAX_TURNS:
            return self
        ends = [start + length for length in lengths] or [end] * len(messages)
        turns = (*self.turns, *(Turn.of(message, at) for message, at in zip(messages, ends, strict=True)))
        if self.turns or not messages:
            return replace(self, turns=turns)
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        return TextMap(turns, system if len(system or "") <= MAX_SYSTEM_CHARS else None)

    def answered(self, end: int) -> TextMap:
        """With an answer behind its messages: one without words, if the turn was given up before its first token. As it
        is, if it does not tell all that is before `end`."""
        if self.end != end or not self.turns or self.turns[-1].role == "assistant":
            return self
        return self.extended([message_of("assistant", "")], start=end, end=end)

    def cut(self, tokens: int) -> TextMap:
        """That of a ledger which is cut to so many tokens."""
        if self.end <= tokens:
            return self
        return replace(self, turns=tuple(turn for turn in self.turns if turn.end <= tokens))

    def followed_by(self, turns: Sequence[Turn], moved: int) -> TextMap:
        """With turns of another map, which here end so many tokens later, or earlier if `moved` is negative. As it is,
        if it would become too long."""
        if len(self.turns) + len(turns) > MAX_TURNS:
            return self
        return replace(self, turns=(*self.turns, *(replace(turn, end=turn.end + moved) for turn in turns)))

    def to_map(self) -> dict[str, Any]:
        """The entry of the session map."""
        lines = (_LINE.pack(_ROLES.index(turn.role), turn.end, turn.whole, turn.bare) for turn in self.turns)
        return {"turns": b"".join(lines), "system": self.system}

    @classmethod
    def from_map(cls, stored: object) -> TextMap:
        """Read what `to_map` kept. A snapshot from before there were text maps has none: then nothing matches by text.
        Raises ValueError: `to_map` does not make this."""
        if stored is None:
            return cls()
        if type(stored) is not dict or stored.keys() - {_OWN_SYSTEM} != {"turns", "system"}:
            raise ValueError(f"{TEXT_MAP} has other fields than a text map")
        packed, system = stored["turns"], stored["system"]
        if type(packed) is not bytes or len(packed) % _LINE.size or len(packed) > MAX_TURNS * _LINE.size:
            raise ValueError(f"{TEXT_MAP} has turns of a wrong length")
        if not (system is None or type(system) is str):
            raise ValueError(f"{TEXT_MAP} has a system text that is none")
        turns = tuple(_turn_of(*line) for line in _LINE.iter_unpack(packed))
        if any(one.end > other.end for one, other in pairwise(turns)):
            raise ValueError(f"{TEXT_MAP} has turns that end before those ahead of them")
        return cls(turns, system)


def own_system_of(text_map: object) -> str | None:
    """The session's own system text, out of a text map of before the session itself kept that; None if it has none."""
    return text_map["system"] if type(text_map) is dict and text_map.get(_OWN_SYSTEM) is True else None


@dataclass(frozen=True, slots=True)
class Standing:
    """How a transcript stands to a text map. common: leading messages that are committed; kept: of them, those that end
    where a conversation can go on; at: tokens of the ledger up to there."""

    common: int
    kept: int
    at: int


@dataclass(frozen=True, slots=True)
class NewTurn:
    """What a chat has to read, `ids` behind the first `at` tokens of the ledger, and the text map when it has been.

    common: leading messages of a transcript that are committed by their text. Where the ledger has more than `at`
    tokens, the transcript has diverged from it there.
    """

    at: int
    ids: Sequence[int]
    text_map: TextMap
    common: int = 0


def message_of(role: str, content: str) -> Message:
    """A message as templates take it."""
    return {"role": role, "content": content}


def spoken(messages: Sequence[Message], system: str | None) -> list[Message]:
    """A conversation with the session's own system text before it, unless it begins with one."""
    opening = [message_of("system", system)] if system and messages[0]["role"] != "system" else []
    return [*opening, *messages]


def standing(text_map: TextMap, messages: Sequence[Message]) -> Standing:
    """How many messages of a transcript are committed.

    A conversation goes on behind an assistant's words, or, if the transcript ends there, where the assistant is to
    speak. What was read together has no place in between where it could: its tokens have to be compared.
    """
    turns = text_map.turns
    pairs = enumerate(zip(turns, messages, strict=False))
    common = next((at for at, (turn, message) in pairs if not turn.is_mark_of(message)), min(len(turns), len(messages)))
    for kept in range(common, 0, -1):
        is_end = kept == len(turns) or turns[kept].end > turns[kept - 1].end
        if is_end and (turns[kept - 1].role == "assistant") == (kept < len(messages)):
            return Standing(common, kept, turns[kept - 1].end)
    return Standing(common, 0, 0)


def _digest(role: str, text: str) -> bytes:
    words = text.strip().removeprefix(_THINK).strip() if role == "assistant" else text
    return blake3(f"{role}\0{words}".encode("utf-8", "surrogatepass")).digest(_DIGEST_BYTES)


def without_thinking(text: str) -> str:
    """An assistant's text after its thinking; empty if it was cut off while thinking."""
    if _END_OF_THOUGHT in text:
        return text.rpartition(_END_OF_THOUGHT)[2]
    return "" if text.lstrip().startswith(_THINK) else text


def _turn_of(role: int, end: int, whole: bytes, bare: bytes) -> Turn:
    if role >= len(_ROLES) or not 1 <= end <= MAX_TOKENS:
        raise ValueError(f"{TEXT_MAP} has a role or a position that cannot be")
    return Turn(_ROLES[role], whole, bare, end)
