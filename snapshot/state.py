"""A session's model state as a value: a sleep captures it, and a wake restores it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .caches import is_empty, keep, length, truncate
from .checkpoints import Checkpoints
from .passes import Passes


def token_array(tokens: bytes = b"") -> array[int]:
    """A ledger from stored bytes (uint32, little-endian)."""
    ledger = array("I")  # uint32, the width in which token ids are stored
    ledger.frombytes(tokens)
    return ledger


@dataclass(slots=True)
class LiveState:
    """The state of one session on its model.

    tokens: the ledger, one id for every position in the caches.
    caches: one cache per layer, each as long as the ledger; empty while they are rows of a batch (`batches.py`).
    last_logits: float32 `[vocabulary]`, for the next token; None before the first token.
    random_key: uint32 `[2]`, by which the next token is drawn.
    passes: the model calls that read the ledger, and the tokens of each.
    checkpoints: whole state at earlier positions, of caches that cannot go back.
    computed_tokens: how many tokens the model has computed for this state since it came into memory; 0 after a wake.
    is_lost: whether it is not to be used any more: its caches are gone, because there was no memory to take them out of
        a batch; or nobody may be told of its last tokens.
    """

    tokens: array[int]
    caches: list[Any]
    last_logits: mx.array | None
    random_key: mx.array
    passes: Passes = field(default_factory=Passes)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    computed_tokens: int = 0
    is_lost: bool = False

    @property
    def is_consistent(self) -> bool:
        """Whether ledger, caches and passes describe one span."""
        held = length(self.caches)
        if held is None:  # no cache counts
            held = 0 if is_empty(self.caches) else len(self.tokens)
        return held == len(self.tokens) == self.passes.token_count

    def holds(self, token_count: int) -> bool:
        """Whether the caches have the first tokens of the ledger, and maybe more."""
        held = length(self.caches)
        return token_count <= min(len(self.tokens), len(self.tokens) if held is None else held)

    def cut_back(self, token_count: int) -> None:
        """Let go of all behind the first tokens, and of the logits. Raises InconsistentState: a cache cannot."""
        truncate(self.caches, token_count)
        del self.tokens[token_count:]
        self.passes, self.last_logits = self.passes.cut_back(token_count), None

    def kept(self, *, one_token: bool = False) -> Callable[[], None]:
        """A function that restores the present state, but for the count of computed tokens."""
        put_caches_back = keep(self.caches, one_token=one_token)
        held, passes = len(self.tokens), self.passes.copy()
        logits, key = self.last_logits, self.random_key

        def put_back() -> None:
            put_caches_back()
            del self.tokens[held:]
            self.checkpoints.cut(held)
            self.passes, self.last_logits, self.random_key = passes, logits, key

        return put_back
