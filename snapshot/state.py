"""A session's model state as a value: what is captured by a sleep and given back by a wake."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .kinds import length


def token_array(tokens: bytes = b"") -> array[int]:
    """A ledger from stored bytes (uint32, little-endian)."""
    ledger = array("I")  # uint32, the width in which token ids are stored
    ledger.frombytes(tokens)
    return ledger


@dataclass(slots=True)
class LiveState:
    """The state of one session on its model.

    tokens: the ledger, one id for every position that the caches hold.
    caches: one cache per layer, all of the length of the ledger.
    last_logits: float32 `[vocabulary]`, those that the next token is drawn from; None before the first token.
    random_key: uint32 `[2]`, the key that draws it.
    computed_tokens: how many tokens the model has computed for this state since it came into memory; a state that
        was put back from a snapshot starts at 0.
    """

    tokens: array[int]
    caches: list[Any]
    last_logits: mx.array | None
    random_key: mx.array
    computed_tokens: int = 0

    @property
    def is_consistent(self) -> bool:
        """Whether ledger and caches describe one span."""
        return length(self.caches) == len(self.tokens)
