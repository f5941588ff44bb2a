"""The beginning of a state in memory, as a state of its own, for another session that begins alike.

Everything is copied: two caches over one array would see each other's writes, and a source may go at any time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx

from .checkpoints import Checkpoints
from .kind import Kind, Record
from .kinds import kind_of, leaves, with_room
from .state import LiveState


def borrow(
    source: LiveState, caches: Sequence[Any], random_key: mx.array, token_count: int
) -> Generator[None, None, LiveState | None]:
    """As much of the first `token_count` tokens of a state as can be had without computing: all if its caches are cut
    by token, else up to the last checkpoint in memory; None if that is nothing.

    Steps for the engine thread, a cache each. In between the source may go on: the rows of its tokens stay.

    caches: empty ones of the same model, which become the new state's. random_key: the new state's own. The new state
    has no logits: the borrower reads on.
    """
    assert 0 < token_count <= len(source.tokens)
    checkpoint = None
    if not all(kind_of(cache).by_token for _, cache in leaves(source.caches)):
        checkpoint = next((each for each in reversed(list(source.checkpoints)) if each.position <= token_count), None)
        if checkpoint is None:
            return None
        token_count = checkpoint.position
    for (path, cache), (_, empty) in zip(leaves(source.caches), leaves(caches), strict=True):
        kind = kind_of(cache)
        if not kind.is_empty(cache):
            record = checkpoint.records.get(path) if checkpoint else None
            copy_into(empty, kind, cache, token_count, record)
            yield
    checkpoints = Checkpoints(source.checkpoints.record_bytes, source.checkpoints.budget_bytes)
    for each in source.checkpoints:
        if each.position <= token_count:
            checkpoints.add(each)  # it is never written to, so both states may have it
    return LiveState(
        tokens=source.tokens[:token_count],
        caches=list(caches),
        last_logits=None,
        random_key=random_key,
        passes=source.passes.cut_back(token_count),
        checkpoints=checkpoints,
    )


def copy_into(empty: Any, kind: Kind, cache: Any, token_count: int, record: Record | None) -> None:
    """Fill an empty cache with the first tokens of another of its stored kind, copied. record: its whole state
    there, if it is not cut by token."""
    capacity = kind.capacity(token_count)
    spans = {name: with_room(array, token_count, capacity) for name, array in kind.spans(cache).items()}
    kept = None if record is None else Record(record.numbers, {name: mx.array(a) for name, a in record.arrays.items()})
    mx.eval(list(spans.values()), list(kept.arrays.values()) if kept else [])
    kind_of(empty).fill(empty, token_count, spans, kept)
