"""The end of a ledger without keys and values in a version: a stop had no time or room to write them.

Owns its entry in the session map. The version holds the tokens before it in full; the next use of the session reads the
tail again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...memvid.format.manifest import UNREAD
from ...memvid.limits import MAX_TOKENS
from ...memvid.uri import SessionUri
from ...snapshot.errors import MalformedSnapshot
from ...snapshot.passes import Passes
from ...snapshot.state import token_array
from .transcripts import TEXT_MAP, TextMap

_DIGEST_CHARS: Final = 64
_KEY_BYTES: Final = 8
_FIELDS: Final = {
    "start": int,
    "tokens": bytes,
    "passes": bytes,
    "random_key": bytes,
    "logits_digest": str,
    "turn_open": bool,
    TEXT_MAP: dict,
}
_DAMAGED: Final = "damaged"
"""A field that is written only if it is true."""


def unread_in(entries: Mapping[str, Any], uri: SessionUri) -> Unread | None:
    """Read the unread end of a ledger from a session map. Raises MalformedSnapshot: `to_map` does not make this."""
    try:
        return Unread.from_map(entries.get(UNREAD))
    except (KeyError, ValueError) as error:
        raise MalformedSnapshot(
            f"The end of the ledger of {uri} is not of the form that this version writes: {error}.", session=str(uri)
        ) from error


def text_map_in(entries: Mapping[str, Any], uri: SessionUri) -> TextMap:
    """The text map of the whole ledger of a version. Raises ValueError, MalformedSnapshot: `to_map` makes none such."""
    unread = unread_in(entries, uri)
    return TextMap.from_map(entries.get(TEXT_MAP)) if unread is None else unread.text_map


def without_answers(entries: Mapping[str, Any], uri: SessionUri, answers: Sequence[bytes]) -> dict[str, Any]:
    """A session map without the ids of answers; as it is, where it is malformed: its wake reports that."""
    if not answers:
        return dict(entries)
    try:
        unread, text_map = unread_in(entries, uri), TextMap.from_map(entries.get(TEXT_MAP)).without_answers(answers)
    except (MalformedSnapshot, ValueError):
        return dict(entries)
    behind = unread and replace(unread, text_map=unread.text_map.without_answers(answers))
    return {**entries, TEXT_MAP: text_map.to_map(), **({UNREAD: behind.to_map()} if behind else {})}


def without_unread(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A session map without the unread end of a ledger, for a session at an earlier token."""
    return {name: value for name, value in entries.items() if name != UNREAD}


@dataclass(frozen=True, slots=True)
class Unread:
    """start: the number of tokens before it. tokens: uint32; none if only the other fields have changed. passes: how
    they were read. random_key: for the next token, uint32 `[2]` as bytes. logits_digest: of the float32 logits behind
    the tokens, as hex. text_map, turn_open: of the whole ledger. damaged: whether it replaces damaged blocks."""

    start: int
    tokens: array[int]
    passes: Passes
    random_key: bytes
    logits_digest: str
    text_map: TextMap
    turn_open: bool
    damaged: bool = False

    def to_map(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "tokens": self.tokens.tobytes(),
            "passes": self.passes.tobytes(),
            "random_key": self.random_key,
            "logits_digest": self.logits_digest,
            "turn_open": self.turn_open,
            TEXT_MAP: self.text_map.to_map(),
            **({_DAMAGED: True} if self.damaged else {}),
        }

    @classmethod
    def from_map(cls, stored: object) -> Unread | None:
        """Read the map of `to_map`; None for a version with its whole ledger in blocks. Raises ValueError: `to_map`
        does not make this."""
        if stored is None:
            return None
        if type(stored) is not dict:
            raise ValueError(f"{UNREAD} is not the end of a ledger")
        fields = dict(stored)
        damaged = fields.pop(_DAMAGED, False)
        if type(damaged) is not bool or {name: type(value) for name, value in fields.items()} != _FIELDS:
            raise ValueError(f"{UNREAD} is not the end of a ledger")
        size = len(stored["tokens"])
        if size % 4 or not 0 <= stored["start"] <= MAX_TOKENS - size // 4:
            raise ValueError(f"{UNREAD} has {size} bytes of tokens, four each, behind {stored['start']} tokens")
        if len(stored["random_key"]) != _KEY_BYTES or len(stored["logits_digest"]) != _DIGEST_CHARS:
            raise ValueError(f"{UNREAD} has a random key or a digest of a size that cannot be")
        tokens, text_map = token_array(stored["tokens"]), TextMap.from_map(stored[TEXT_MAP])
        if text_map.end > stored["start"] + len(tokens):
            raise ValueError(f"{UNREAD} has a text map that ends behind the ledger")
        return cls(
            stored["start"],
            tokens,
            Passes.from_bytes(stored["passes"], len(tokens)),
            stored["random_key"],
            stored["logits_digest"],
            text_map,
            stored["turn_open"],
            damaged,
        )
