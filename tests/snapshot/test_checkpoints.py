"""Whole state at earlier positions: how far apart, and what a snapshot keeps of it as the session grows."""

from __future__ import annotations

from torpor.memvid.format.records import Receipt
from torpor.memvid.limits import MAX_TOKENS
from torpor.snapshot.checkpoints import (
    CHECKPOINT_TOKENS,
    DEFAULT_BUDGET_BYTES,
    MAX_MARKS,
    Checkpoint,
    Checkpoints,
    checkpoint_of,
)
from torpor.snapshot.passes import Passes
from torpor.snapshot.state import LiveState, token_array
from torpor.tests.snapshot.stored_rig import VOCABULARY, Shelf

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import ArraysCache, KVCache  # isort: skip


def grow(state: LiveState, until: int) -> None:
    """Read up to that many tokens, with a checkpoint wherever one is due."""
    while len(state.tokens) < until:
        held = len(state.tokens)
        count = min(until, state.checkpoints.next_due(held)) - held
        rows = mx.random.normal((1, 2, count, 4), key=mx.random.key(held))
        state.caches[0].update_and_fetch(rows, rows)
        state.caches[1][0] = mx.full((1, 8), held + count, mx.float32)
        state.tokens.extend(index % VOCABULARY for index in range(held, held + count))
        state.passes.add(count)
        state.last_logits = mx.random.normal((VOCABULARY,), key=mx.random.key(held))
        if state.checkpoints.is_due(held + count):
            made = checkpoint_of(state.caches, held + count, state.last_logits, state.random_key, state.passes)
            state.checkpoints.add(made)


def sleep(shelf: Shelf, state: LiveState, before: Receipt | None = None) -> Receipt:
    """Put it to sleep as its next version, and know what is durable since."""
    receipt = shelf.put(state, before=before, unchanged=before.token_count if before else 0)
    state.checkpoints.became_durable(records_in(receipt)[:-1])
    return receipt


def records_in(receipt: Receipt) -> list[int]:
    return [entry.start for entry in receipt.entries if entry.kind == "state"]


def test_a_session_that_keeps_fewer_checkpoints_than_it_did_sleeps_on(shelf: Shelf) -> None:
    """What lies in the last snapshot and is let go stands in the middle of its chain."""
    state = LiveState(token_array(), [KVCache(), ArraysCache(1)], None, mx.random.key(7))
    grow(state, CHECKPOINT_TOKENS)
    state.checkpoints.record_bytes = next(iter(state.checkpoints)).size_bytes
    state.checkpoints.budget_bytes = 2 * state.checkpoints.record_bytes
    grow(state, 2 * CHECKPOINT_TOKENS + 10)
    first = sleep(shelf, state)
    assert records_in(first) == [CHECKPOINT_TOKENS, 2 * CHECKPOINT_TOKENS, first.token_count]
    grow(state, 4 * CHECKPOINT_TOKENS + 10)
    assert state.checkpoints.positions == (2 * CHECKPOINT_TOKENS, 4 * CHECKPOINT_TOKENS)
    second = sleep(shelf, state, first)
    assert records_in(second) == [2 * CHECKPOINT_TOKENS, 4 * CHECKPOINT_TOKENS, second.token_count]
    assert second.entries[0] == first.entries[0]
    assert shelf.store.verify(deep=True).ok


def test_where_checkpoints_are_taken_does_not_depend_on_those_that_there_are() -> None:
    """A session that has slept reads its tokens in the same calls as one that has not."""
    for record_bytes in (1, 60 << 20, DEFAULT_BUDGET_BYTES, DEFAULT_BUDGET_BYTES + 1):
        held, woken = Checkpoints(record_bytes=record_bytes), Checkpoints(record_bytes=record_bytes)
        held.became_durable(range(CHECKPOINT_TOKENS, 5 * CHECKPOINT_TOKENS, CHECKPOINT_TOKENS))
        for position in range(0, 100 * CHECKPOINT_TOKENS, 100):
            assert held.next_due(position) == woken.next_due(position)
            assert held.is_due(position) == woken.is_due(position)


def test_a_record_that_no_budget_holds_is_never_due() -> None:
    held = Checkpoints(record_bytes=DEFAULT_BUDGET_BYTES + 1)
    assert not any(held.is_due(position) for position in range(0, 10_000, 256))
    assert held.next_due(10_000) > MAX_TOKENS


def test_the_distance_doubles_so_that_as_many_as_the_budget_holds_are_kept() -> None:
    held = Checkpoints(record_bytes=DEFAULT_BUDGET_BYTES // 4)
    due, position = [], 0
    while (position := held.next_due(position)) <= 32 * CHECKPOINT_TOKENS:
        due.append(position // CHECKPOINT_TOKENS)
    assert due == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(held.is_due(at * CHECKPOINT_TOKENS) for at in due)


def test_a_mark_is_taken_half_way_between_two_places_of_the_grid_and_at_no_other_moment() -> None:
    held, half = Checkpoints(record_bytes=DEFAULT_BUDGET_BYTES // 16), CHECKPOINT_TOKENS // 2
    held.mark([half - 1, half, half + 7, 3 * half - 1, 20 * CHECKPOINT_TOKENS + 3])
    assert held.marks == (half, 39 * half)
    assert [held.next_due(at) for at in (0, half)] == [half, CHECKPOINT_TOKENS]
    assert (held.is_due(half), held.is_due(39 * half), held.is_due(3 * half)) == (True, True, False)
    grown = held.growth_of(0)
    assert grown(half) == held.record_bytes
    assert grown(40 * half) - Checkpoints(record_bytes=held.record_bytes).growth_of(0)(40 * half) == 2 << 24
    held.mark([])
    assert held.next_due(0) == CHECKPOINT_TOKENS


def test_the_newest_marks_are_kept_however_far_apart_the_others_are() -> None:
    mx.eval(logits := mx.zeros(4))
    held = Checkpoints(record_bytes=DEFAULT_BUDGET_BYTES // 16)
    for number in range(80):
        position = number * CHECKPOINT_TOKENS + CHECKPOINT_TOKENS // 2
        held.mark([position])
        for at in (position, position + CHECKPOINT_TOKENS // 2):
            if held.is_due(at):
                held.add(Checkpoint(at, {}, logits, logits, Passes()))
    marks = [at for at in held.positions if at % CHECKPOINT_TOKENS]
    assert marks == [number * CHECKPOINT_TOKENS + CHECKPOINT_TOKENS // 2 for number in range(76, 80)]
    assert len(held.positions) <= 16 + MAX_MARKS


def test_records_too_large_for_a_quarter_of_the_budget_have_no_marks() -> None:
    held = Checkpoints(record_bytes=DEFAULT_BUDGET_BYTES // 3)
    held.mark([1000])
    assert held.marks == ()
    assert held.next_due(0) == CHECKPOINT_TOKENS
