"""A fork of a state in memory: a state of its own that goes on from the same token, with the same logits.

What two states hold together is in memory once, as far as their kinds of cache allow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from .borrowing import copy_into
from .caches import resident_bytes
from .checkpoints import Checkpoints
from .kinds import kind_of, leaves
from .state import LiveState


def fork(source: LiveState, caches: Sequence[Any]) -> LiveState:
    """A state that equals the source to the bit; what is read into one of them never shows in the other. Evaluated, on
    the engine thread, with the source in no batch.

    caches: empty ones of the same model, which become the new state's.
    """
    for (_, cache), (_, empty) in zip(leaves(source.caches), leaves(caches), strict=True):
        kind = kind_of(cache)
        if not kind.is_empty(cache):
            record = None if kind.by_token else kind.record(cache)
            copy_into(empty, kind, cache, len(source.tokens), record)
    checkpoints = Checkpoints(source.checkpoints.record_bytes, source.checkpoints.budget_bytes)
    for each in source.checkpoints:
        checkpoints.add(each)  # it is never written to, so both states may have it
    return LiveState(
        tokens=source.tokens[:],
        caches=list(caches),
        last_logits=None if source.last_logits is None else mx.array(source.last_logits),
        random_key=source.random_key,
        passes=source.passes.copy(),
        checkpoints=checkpoints,
    )


def held_bytes(states: Iterable[LiveState]) -> int:
    """The memory that the caches of these states take together, what they share counted once."""
    return sum(resident_bytes(state.caches) for state in states)
