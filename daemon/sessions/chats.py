"""What the tokens of a session say as a chat, and its entries in the session map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from ..models.chat_template import NO_ROOT, Root
from .transcripts import MAX_SYSTEM_CHARS, TEXT_MAP, TextMap, own_system_of
from .unprocessed_tail import Unread

OPENED: Final = "chat_opened_at"
"""The key for the token at which a chat has begun."""

ROOT: Final = "chat_root"
"""The key for the root of a chat."""

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Chat:
    """What a session says as a chat.

    system: the text that opens it, unless a transcript brings one; None without one. opened_at: the token at which a
        chat has begun, so the system text is said already; None before that.
    root: the tools and template arguments.
    turn_open: whether the ledger ends inside an assistant's turn.
    text_map: the committed messages, as far as only a chat has made the ledger.
    """

    system: str | None = None
    root: Root = NO_ROOT
    opened_at: int | None = None
    turn_open: bool = False
    text_map: TextMap = field(default_factory=TextMap)

    @property
    def has_system_to_say(self) -> bool:
        """Whether its system text comes before the next message."""
        return bool(self.system) and self.opened_at is None

    def opened(self, at: int) -> Chat:
        """The same that goes on at a token, or begins there. A system text that is too long to keep is dropped."""
        system = None if len(self.system or "") > MAX_SYSTEM_CHARS else self.system
        return replace(self, system=system, opened_at=at if self.opened_at is None else self.opened_at)

    def to_map(self) -> dict[str, Any]:
        """Its entries in the session map."""
        return {
            "system": self.system,
            OPENED: self.opened_at,
            "turn_open": self.turn_open,
            **({TEXT_MAP: self.text_map.to_map()} if self.text_map.turns or self.text_map.disowned else {}),
            **({ROOT: self.root.to_text()} if self.root else {}),
        }

    @classmethod
    def from_map(cls, entries: Mapping[str, Any], token_count: int, unread: Unread | None) -> Chat:
        """The chat of a session's first tokens, before the unread end of its ledger, from its session map. Raises
        KeyError, TypeError, ValueError: `to_map` does not make this."""
        text_map = TextMap.from_map(entries.get(TEXT_MAP)).cut(token_count)
        system, opened_at = opening_in(entries, token_count + (len(unread.tokens) if unread else 0))
        return cls(
            system=system,
            root=(unread.text_map if unread else text_map).root_at_end(Root.from_text(entries.get(ROOT))),
            opened_at=opened_at,
            # At the end of a chat it is the assistant's turn.
            turn_open=of_type(entries["turn_open"], "turn_open", bool) or text_map.end == token_count,
            text_map=text_map,
        )


def opening_in(entries: Mapping[str, Any], end: int) -> tuple[str | None, int | None]:
    """`Chat.system` and `Chat.opened_at` from a session map. end: the tokens of the ledger. Raises KeyError, TypeError,
    ValueError: `Chat.to_map` does not make this map."""
    # In older snapshots, a system text that had been said is only in the text map.
    text = entries["system"] if OPENED in entries else entries["system"] or own_system_of(entries.get(TEXT_MAP))
    system = None if text is None else of_type(text, "system", str)
    if OPENED not in entries:
        return system, 0 if entries["system"] is None else None
    at = None if entries[OPENED] is None else of_type(entries[OPENED], OPENED, int)
    if at is not None and at < 0:
        raise ValueError(f"a chat has begun at token {at}")
    return system, at if at is not None and at < end else None


def of_type(value: object, name: str, kind: type[Kind]) -> Kind:
    """An entry of a session map that has this very type. Raises TypeError: it has another."""
    # The exact type: to isinstance a bool is an int, and `to_map` writes exact types.
    if type(value) is not kind:
        raise TypeError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    return value
