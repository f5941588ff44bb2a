"""A cut is a consistent picture of one moment, copies nothing, and stays what it was (GM12)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torpor.memvid.format.blocks import BLOCK_TOKENS, BlockEntry
from torpor.snapshot.caches import truncate
from torpor.snapshot.capture import cut, plan_reuse
from torpor.snapshot.errors import InconsistentState
from torpor.snapshot.layout import layout_of
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import KVCache, RotatingKVCache  # isort: skip

MakeState = Callable[..., LiveState]


def entry(number: int, count: int = BLOCK_TOKENS, kind: Any = "span") -> BlockEntry:
    return BlockEntry(bytes([number] * 32), kind, number * BLOCK_TOKENS, count, 0)


def cut_of(state: LiveState, **options: Any) -> Any:
    options = {"durable": (), "unchanged_tokens": 0} | options
    return cut(state, layout_of(state.caches, 50), **options)


def raw(snapshot: Any) -> list[tuple[Any, ...]]:
    """Every draft with its bytes copied out."""
    return [
        (
            draft.kind,
            draft.start,
            draft.tokens,
            [(slot.spec, b"".join(map(bytes, slot.buffers))) for slot in draft.slots],
        )
        for draft in snapshot.drafts()
    ]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_the_drafts_hold_the_bytes_of_every_slot(make_state: MakeState, kv_of: Any, count: int) -> None:
    state = make_state(count)
    *spans, record = raw(cut_of(state))
    assert [start for _, start, _, _ in spans] == list(range(0, count, 256))
    assert b"".join(tokens for _, _, tokens, _ in spans) == state.tokens.tobytes()
    for layer, (keys, values) in enumerate(kv_of(state)):
        for index, whole in ((2 * layer, keys), (2 * layer + 1, values)):
            for _, start, tokens, slots in spans:
                spec, data = slots[index]
                heads, held, dim = spec.shape
                assert held == len(tokens) // 4
                row = 4 * dim
                wanted = b"".join(
                    whole[(head * count + start) * row : (head * count + start + held) * row] for head in range(heads)
                )
                assert data == wanted, (spec.name, start)
    assert (record[0], record[1]) == ("state", count)
    assert record[3][0][1] == bytes(memoryview(state.last_logits))
    assert record[3][1][1] == bytes(memoryview(state.random_key))


def test_arrays_that_are_not_in_row_major_order_are_cut_in_it(make_state: MakeState) -> None:
    state = make_state(10)
    clean = raw(cut_of(state))
    for cache in state.caches:
        turned = mx.contiguous(mx.swapaxes(cache.keys, 1, 2))
        cache.keys = mx.swapaxes(turned, 1, 2)
    assert raw(cut_of(state)) == clean


def test_a_cut_copies_nothing(make_state: MakeState) -> None:
    """The views are of the cache's own memory: a byte written through one is seen in the cache."""
    state = make_state(10)
    snapshot = cut_of(state)
    keys = state.caches[0].keys
    import numpy as np

    address = np.asarray(keys).ctypes.data
    view = np.frombuffer(snapshot.spans[0].view, dtype=np.uint8)
    assert view.ctypes.data == address


def test_copied_blocks_have_memory_of_their_own(make_state: MakeState) -> None:
    """So the next model call need not copy the caches, as it would beside a view of them."""
    snapshot = cut_of(make_state(600))
    *spans, record = (draft for start in (0, 256, 512) for draft in snapshot.copied(start))
    assert [(each.kind, each.start, each.tokens) for each in (*spans, record)] == [each[:3] for each in raw(snapshot)]
    for draft, (_, _, _, slots) in zip(spans, raw(snapshot), strict=False):
        assert all(type(buffer.obj) is bytes for slot in draft.slots for buffer in slot.buffers)
        assert [(slot.spec, b"".join(slot.buffers)) for slot in draft.slots] == slots


def test_a_cut_may_end_before_the_session_does_and_has_no_record_there(make_state: MakeState) -> None:
    state = make_state(600)
    whole, snapshot = raw(cut_of(state)), cut_of(state, end=557)
    *full, last = raw(snapshot)
    assert snapshot.token_count == 557
    assert full == whole[:2]
    assert (last[0], last[1], last[2]) == ("span", 512, state.tokens[512:557].tobytes())


def test_a_cut_that_ends_earlier_may_be_made_in_the_midst_of_a_model_call_and_no_other(
    make_state: MakeState, grow: Any
) -> None:
    """The caches have tokens then that are not in the ledger, and there may be no logits."""
    state = make_state(600)
    whole = raw(cut_of(state, end=557))
    grow(state, 64)
    del state.tokens[600:]
    state.last_logits = None
    assert raw(cut_of(state, end=557)) == whole
    for wrong in (None, 601):
        with pytest.raises(InconsistentState):
            cut_of(state, end=wrong)


def test_a_cut_stays_what_it_was_while_the_session_goes_on_gm12(make_state: MakeState, grow: Any) -> None:
    state = make_state(300)
    snapshot = cut_of(state)
    before = raw(snapshot)
    for step in (1, 1, 5, 256, 300):
        grow(state, step)
    truncate(state.caches, 100)
    del state.tokens[100:]
    grow(state, 20)
    assert raw(snapshot) == before


def test_a_cut_owns_its_memory_when_the_session_is_gone_gm12(make_state: MakeState) -> None:
    import gc

    state = make_state(300)
    snapshot = cut_of(state)
    before = raw(snapshot)
    state.caches.clear()
    state.last_logits = None
    del state
    gc.collect()
    mx.clear_cache()
    junk = [mx.full((1, 2, 512, 8), 9.0) for _ in range(20)]
    mx.eval(junk)
    assert raw(snapshot) == before


def test_the_drafts_may_be_read_on_another_thread_gm13(make_state: MakeState) -> None:
    snapshot = cut_of(make_state(300))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(raw(snapshot)))
    thread.start()
    thread.join()
    assert found == [raw(snapshot)]


def test_what_stands_behind_the_offset_is_never_in_a_cut(make_state: MakeState, grow: Any) -> None:
    """After a rollback the arrays still hold the bytes that were dropped."""
    state = make_state(100)
    clean = raw(cut_of(state))
    logits = state.last_logits
    grow(state, 50)
    truncate(state.caches, 100)
    del state.tokens[100:]
    state.passes = state.passes.cut(100)
    state.last_logits = logits
    assert raw(cut_of(state)) == clean


def test_nothing_read_is_nothing_to_keep_gm4(make_state: MakeState) -> None:
    state = make_state(0)
    with pytest.raises(InconsistentState):
        cut(state, layout_of(make_state(1).caches, 50), durable=(), unchanged_tokens=0)


@pytest.mark.parametrize("drop", [1, 2, 3])
def test_a_ledger_and_caches_of_different_lengths_are_refused_qc8(make_state: MakeState, drop: int) -> None:
    state = make_state(30)
    truncate(state.caches[:drop], 29)
    with pytest.raises(InconsistentState):
        cut_of(state)


def test_caches_that_are_not_those_of_the_model_are_refused(make_state: MakeState) -> None:
    state = make_state(30)
    layout = layout_of(state.caches, 50)
    plain, state.caches[1] = state.caches[1], RotatingKVCache(max_size=64)
    with pytest.raises(InconsistentState, match="ring/1"):
        cut(state, layout, durable=(), unchanged_tokens=0)
    state.caches[1] = KVCache()
    with pytest.raises(InconsistentState, match="Cache 1 is empty"):
        cut(state, layout, durable=(), unchanged_tokens=0)
    state.caches[1] = plain
    idle = replace(layout, entries=(*layout.entries[:2], replace(layout.entries[2], in_use=False)))
    with pytest.raises(InconsistentState, match="Cache 2 is in use"):
        cut(state, idle, durable=(), unchanged_tokens=0)


@pytest.mark.parametrize(
    ("entries", "unchanged", "reused"),
    [
        ([], 1000, 0),
        ([entry(0), entry(1)], 512, 2),
        ([entry(0), entry(1)], 511, 1),
        ([entry(0), entry(1)], 255, 0),
        ([entry(0), entry(1, 10)], 266, 1),
        ([entry(0), entry(1, 10)], 1000, 1),
        ([entry(0), entry(1), entry(2, 0, "state")], 512, 2),
        ([entry(0, 10)], 10, 0),
    ],
)
def test_only_full_blocks_that_still_hold_what_the_cache_holds_are_reused(
    entries: list[BlockEntry], unchanged: int, reused: int
) -> None:
    assert plan_reuse(entries, unchanged) == tuple(entries[:reused])


def test_a_sleep_writes_only_what_is_new_however_many_blocks_the_rest_has() -> None:
    chain = [entry(number) for number in range(200)]
    assert plan_reuse(chain, 10**6) == tuple(chain)


def test_the_new_blocks_begin_where_the_reused_ones_end(make_state: MakeState) -> None:
    state = make_state(600)
    snapshot = cut_of(state, durable=[entry(0), entry(1), entry(2, 88)], unchanged_tokens=600)
    assert snapshot.reused_tokens == 512
    assert [(kind, start) for kind, start, _, _ in raw(snapshot)] == [("span", 512), ("state", 600)]
    assert raw(snapshot)[0] == raw(cut_of(state))[2]
