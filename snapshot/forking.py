"""A state of its own made of another one in memory: of its beginning, for a session that begins alike, or a fork, which
goes on from the same token with the same logits.

Of a beginning everything is copied: two caches over one array would see each other's writes, and a source may go at any
time. What a fork and its source hold together is in memory once, as far as their kinds of cache allow it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import mlx.core as mx

from .kind import Kind, Record, with_room
from .kinds import is_shared, kind_of, leaves
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
    return LiveState(
        tokens=source.tokens[:token_count],
        caches=list(caches),
        last_logits=None,
        random_key=random_key,
        passes=source.passes.cut_back(token_count),
        checkpoints=source.checkpoints.copy(token_count),
    )


def copy_into(empty: Any, kind: Kind, cache: Any, token_count: int, record: Record | None) -> None:
    """Fill an empty cache with the first tokens of another of its stored kind, copied. record: its whole state
    there, if it is not cut by token."""
    capacity = kind.capacity(token_count)
    spans = {name: with_room(array, token_count, capacity) for name, array in kind.spans(cache).items()}
    kept = None if record is None else Record(record.numbers, {name: mx.array(a) for name, a in record.arrays.items()})
    mx.eval(list(spans.values()), list(kept.arrays.values()) if kept else [])
    kind_of(empty).fill(empty, token_count, spans, kept)


def fork(source: LiveState, caches: Sequence[Any]) -> LiveState:
    """A state that equals the source to the bit; what is read into one of them never shows in the other. Evaluated, on
    the engine thread, with the source in no batch.

    caches: empty ones of the same model, which become the new state's. Those that are `shareable` share runs with the
        source; others are copied into.
    """
    for (_, cache), (_, empty) in zip(leaves(source.caches), leaves(caches), strict=True):
        kind = kind_of(cache)
        if kind.is_empty(cache):
            continue
        if not is_shared(empty):
            copy_into(empty, kind, cache, len(source.tokens), None if kind.by_token else kind.record(cache))
        elif is_shared(cache):
            cache.fork(empty)
        else:
            kind_of(empty).fill(empty, len(source.tokens), kind.spans(cache), None)
    return LiveState(
        tokens=source.tokens[:],
        caches=list(caches),
        last_logits=None if source.last_logits is None else mx.array(source.last_logits),
        random_key=source.random_key,
        passes=source.passes.copy(),
        checkpoints=source.checkpoints.copy(),
    )


def share(state: LiveState, source: LiveState) -> None:
    """Let a state hold in the source's memory what both have in common, if their caches can. On the engine thread, with
    none of them in a batch. Both are evaluated, and the same as before."""
    for (_, cache), (_, theirs) in zip(leaves(state.caches), leaves(source.caches), strict=True):
        if is_shared(cache) and is_shared(theirs):
            cache.adopt(theirs)


def fork_bytes(state: LiveState) -> int:
    """The most memory that a fork adds to what a state holds, or the state to itself when it goes on behind one, as
    `held_bytes` counts: a segment of each cache whose content they share, and copies of the others."""
    found = 0
    for _, cache in leaves(state.caches):
        if is_shared(cache):
            found += sum(int(array.nbytes) // array.shape[0] for array in cache.tail())
        elif not kind_of(cache).is_empty(cache):
            found += int(cache.nbytes)
    return found


def held_bytes(states: Iterable[LiveState]) -> int:
    """The memory that the caches of these states take together, what they share counted once. A tail counts for each of
    its forks: it is copied when the second one goes on. Evaluated, and none of them in a batch."""
    own, shared = 0, dict[int, int]()
    for state in states:
        mine, others = held(state)
        own += mine
        shared |= others
    return own + sum(shared.values())


def held(state: LiveState) -> tuple[int, dict[int, int]]:
    """The memory of the caches of one state: the bytes that it alone has, and those that others may have, too, by the
    place of each piece."""
    own, shared = 0, dict[int, int]()
    for _, cache in leaves(state.caches):
        kind = kind_of(cache)
        if not kind.is_empty(cache):
            own += kind.own_bytes(cache)
            shared |= kind.shared(cache)
    return own, shared
