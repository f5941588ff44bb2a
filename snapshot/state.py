"""A session's model state as a value: what is captured by a sleep and given back by a wake."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .kinds import length

TOKEN_TYPECODE = "I"  # uint32, the width in which token ids are stored


def token_array(tokens: bytes = b"") -> array[int]:
    """A ledger from stored bytes (uint32, little-endian)."""
    ledger = array(TOKEN_TYPECODE)
    ledger.frombytes(tokens)
    return ledger


@dataclass(slots=True)
class LiveState:
    """The state of one session on its model.

    tokens: the ledger, one id for every position that the caches hold.
    caches: one cache per layer, all of the length of the ledger.
    last_logits: float32 `[vocabulary]`, those that the next token is drawn from; None before the first token.
    random_key: uint32 `[2]`, the key that draws it.
    """

    tokens: array[int]
    caches: list[Any]
    last_logits: mx.array | None
    random_key: mx.array

    @property
    def is_consistent(self) -> bool:
        """Whether ledger and caches describe one span."""
        return length(self.caches) == len(self.tokens)
