"""Bytes of a bundle become caches again, aside, and only when all of them are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from torpor.memvid.errors import CorruptBlock
from torpor.memvid.format.identity import Identity
from torpor.memvid.store import Store
from torpor.memvid.units import format_bytes
from torpor.memvid.writing.reader import BundleReader
from torpor.snapshot import capture, memory, restore
from torpor.snapshot.errors import ContextTooShort, IdentityMismatch, LayoutMismatch, NonFiniteState, NotEnoughMemory
from torpor.snapshot.layout import layout_of
from torpor.snapshot.restore import allocate
from torpor.snapshot.state import LiveState
from torpor.tests.snapshot.stored_rig import VOCABULARY, Shelf, spoil

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

pytestmark = pytest.mark.usefixtures("dirty_memory")

MakeState = Callable[..., LiveState]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_what_was_cut_comes_back_bit_for_bit_t11(
    shelf: Shelf, make_state: MakeState, kv_of: Any, count: int, dtype: mx.Dtype
) -> None:
    state = make_state(count, dtype=dtype)
    shelf.put(state)
    again = shelf.wake(state)
    assert kv_of(again) == kv_of(state)
    assert again.tokens == state.tokens
    assert [cache.offset for cache in again.caches] == [count] * 3
    assert [cache.keys.dtype for cache in again.caches] == [dtype] * 3
    assert again.last_logits.tolist() == state.last_logits.tolist()  # type: ignore[union-attr]
    assert again.random_key.tolist() == state.random_key.tolist()
    assert again.computed_tokens == 0


def test_a_wake_refuses_a_flipped_bit(shelf: Shelf, make_state: MakeState) -> None:
    state = make_state(300)
    shelf.put(state)
    spoil(shelf.store, bytes(memoryview(state.caches[0].keys))[:64])
    with pytest.raises(CorruptBlock):
        shelf.wake(state)


def test_odd_numbers_come_back_as_they_were(shelf: Shelf, make_state: MakeState, kv_of: Any) -> None:
    """Bits are kept, not values: negative zero, subnormal numbers and the largest ones included."""
    state = make_state(2)
    odd = mx.array([0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x007FFFFF, 0], dtype=mx.uint32)
    state.caches[0].keys[..., :2, :] = mx.broadcast_to(odd.view(mx.float32), (1, 2, 2, 8))
    mx.eval(state.caches[0].keys)
    shelf.put(state)
    again = shelf.wake(state)
    assert kv_of(again) == kv_of(state)


def test_compressed_blocks_come_back_bit_for_bit(shelf: Shelf, make_state: MakeState, kv_of: Any) -> None:
    state = make_state(300, dtype=mx.bfloat16)
    for cache in state.caches:
        cache.keys[..., :200, :] = 0
        mx.eval(cache.keys)
    receipt = shelf.put(state, compressed=True)
    assert receipt.bytes_written < receipt.logical_bytes
    assert kv_of(shelf.wake(state)) == kv_of(state)


def test_a_restored_state_goes_on_growing_without_touching_the_store(
    shelf: Shelf, make_state: MakeState, grow: Any, kv_of: Any, store: Store
) -> None:
    state = make_state(300)
    shelf.put(state)
    first, second = shelf.wake(state), shelf.wake(state)
    grow(first, 20)
    assert kv_of(second) == kv_of(state), "two wakes of one bundle share no memory (BR8)"
    assert store.verify(deep=True).findings == ()


def test_two_layers_of_one_restored_state_share_no_memory_br8(shelf: Shelf, make_state: MakeState) -> None:
    state = make_state(3)
    shelf.put(state)
    again = shelf.wake(state)
    before = again.caches[1].keys.tolist()
    again.caches[0].keys[..., :3, :] = 5.0
    mx.eval(again.caches[0].keys, again.caches[1].keys)
    assert again.caches[1].keys.tolist() == before


def test_progress_is_told_in_bytes_up_to_all_of_them(shelf: Shelf, make_state: MakeState) -> None:
    state = make_state(600)
    shelf.put(state)
    told: list[tuple[int, int]] = []
    shelf.wake(state, on_progress=lambda done, total: told.append((done, total)))
    size = 600 * 3 * 2 * (8 + 4) * 4 + 50 * 4 + 8 + 8
    assert told[-1] == (size, size)
    assert told == sorted(told)


def test_padding_behind_the_tokens_is_zero(shelf: Shelf, make_state: MakeState) -> None:
    """No bytes of another session reach a woken one through memory that was not filled."""
    state = make_state(3)
    shelf.put(state)
    again = shelf.wake(state)
    assert again.caches[0].keys.shape == (1, 2, 256, 8)
    assert not mx.any(again.caches[0].keys[..., 3:, :]).item()


def test_another_identity_is_refused_before_a_block_is_looked_at_gm3(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(3)
    shelf.put(state)
    shelf.identity = Identity((("compute_dtype", "float32"), ("weights", "v" * 64)))
    monkeypatch.setattr(BundleReader, "read_header", lambda *_: pytest.fail("a block was looked at"))
    with pytest.raises(IdentityMismatch) as refusal:
        shelf.plan(layout_of(state.caches, VOCABULARY))
    assert refusal.value.mismatched_fields == [
        {"field": "weights", "stored": "w" * 64, "live": "v" * 64, "policy": "must_match"}
    ]


@pytest.mark.parametrize(
    ("options", "vocabulary"),
    [({"layers": 2}, VOCABULARY), ({"layers": 4}, VOCABULARY), ({"dtype": mx.float16}, VOCABULARY), ({}, 51)],
    ids=["fewer layers", "more layers", "another type", "another vocabulary"],
)
def test_a_layout_that_the_model_does_not_have_is_refused_before_memory_is_taken(
    shelf: Shelf, make_state: MakeState, options: dict[str, Any], vocabulary: int
) -> None:
    """Threat 14: even where the identity says that all is well."""
    shelf.put(make_state(3))
    layout = layout_of(make_state(1, **options).caches, vocabulary)
    with pytest.raises(LayoutMismatch):
        shelf.plan(layout)


def test_a_snapshot_longer_than_the_context_is_refused_before_memory_is_taken(
    shelf: Shelf, make_state: MakeState
) -> None:
    state = make_state(300)
    shelf.put(state)
    layout = layout_of(state.caches, VOCABULARY)
    shelf.plan(layout, most=300)
    with pytest.raises(ContextTooShort) as refusal:
        shelf.plan(layout, most=299)
    assert (refusal.value.token_count, refusal.value.context_tokens) == (300, 299)


def test_memory_that_the_system_does_not_have_is_refused_before_mlx_is_asked_threat_59(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX ends the process when an allocation fails."""
    state = make_state(300)
    shelf.put(state)
    needed = 512 * 3 * 2 * (8 + 4) * 4
    monkeypatch.setattr(restore.memory, "unfilled", lambda *_: pytest.fail("MLX was asked"))
    monkeypatch.setattr(restore.memory, "_available", lambda: needed - 1)
    with pytest.raises(NotEnoughMemory) as refusal:
        shelf.wake(state)
    assert (refusal.value.size_bytes, refusal.value.available_bytes) == (needed, needed - 1)
    assert f"needs {format_bytes(needed)} of memory and {format_bytes(needed - 1)} are" in refusal.value.message


def test_wakes_that_fit_one_by_one_are_refused_while_another_one_is_not_filled(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(300)
    shelf.put(state)
    needed = 512 * 3 * 2 * (8 + 4) * 4
    monkeypatch.setattr(restore.memory, "_available", lambda: needed * 3 // 2)
    filling = allocate(shelf.plan(layout_of(state.caches, VOCABULARY)))
    with shelf.store.open_session(shelf.uri) as reader:
        with pytest.raises(NotEnoughMemory) as refusal:
            shelf.wake(state)
        assert refusal.value.promised_bytes == needed
        filling.run(reader, shelf.pool)
        assert memory.granted_bytes() == 0, "all that was granted is filled"
        shelf.wake(state)
        assert filling.spans


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_no_token_can_be_drawn_from_are_refused_threat_11(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch, broken: float
) -> None:
    """At sleep, so that nothing is acknowledged that cannot wake; and at wake, for a bundle of another maker."""
    state = make_state(3)
    state.last_logits = mx.array([0.0] * 49 + [broken])
    with pytest.raises(NonFiniteState, match="NaN"):
        shelf.put(state)
    assert not shelf.store.index.bundle_ids()
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_drawable", lambda _: True)
        shelf.put(state)
    with pytest.raises(NonFiniteState, match="NaN"):
        shelf.wake(state)


@pytest.mark.parametrize(
    ("dtype", "broken", "layer", "part"),
    [
        *((dtype, float("nan"), 0, "keys") for dtype in (mx.float32, mx.float16, mx.bfloat16)),
        (mx.float32, float("inf"), 2, "values"),
        (mx.float16, float("-inf"), 2, "keys"),
        (mx.bfloat16, float("inf"), 0, "values"),
    ],
)
def test_keys_and_values_that_are_no_numbers_are_refused_threat_11(
    shelf: Shelf, make_state: MakeState, dtype: mx.Dtype, broken: float, layer: int, part: str
) -> None:
    """Which bits are no numbers, the tests of `is_finite` say; here, that each slot is looked at and named."""
    state = make_state(300, dtype=dtype)
    getattr(state.caches[layer], part)[0, 1, 299, 3] = broken
    mx.eval(getattr(state.caches[layer], part))
    with pytest.raises(NonFiniteState) as refusal:
        shelf.put(state)
    assert (refusal.value.slot, refusal.value.start) == (f"{layer}.{part[0]}", 256)
    assert not shelf.store.index.bundle_ids()


def test_what_lies_behind_the_last_token_is_not_looked_at(shelf: Shelf, make_state: MakeState, kv_of: Any) -> None:
    """A cache's spare room holds whatever was there."""
    state = make_state(3)
    state.caches[0].keys[0, 0, 3:, :] = float("nan")
    mx.eval(state.caches[0].keys)
    shelf.put(state)
    assert kv_of(shelf.wake(state)) == kv_of(state)


def test_every_reader_thread_has_stopped_when_a_wake_is_refused(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T12: none may go on writing into memory that has been let go."""
    state = make_state(600)
    shelf.put(state)
    spoil(shelf.store, bytes(memoryview(state.caches[0].keys))[:64])
    jobs: list[Future[None]] = []
    submit = shelf.pool.submit

    def remember(*args: Any) -> Future[None]:
        jobs.append(submit(*args))
        return jobs[-1]

    monkeypatch.setattr(shelf.pool, "submit", remember)
    with pytest.raises(CorruptBlock):
        shelf.wake(state)
    assert len(jobs) == 3  # one a cache
    assert all(job.done() for job in jobs)


def test_the_memory_of_a_wake_is_taken_on_the_engine_and_filled_elsewhere(
    shelf: Shelf, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan alone takes none: what it will read is known from headers."""
    state = make_state(600)
    shelf.put(state)
    monkeypatch.setattr(restore.memory, "unfilled", lambda *_: pytest.fail("memory was taken"))
    plan = shelf.plan(layout_of(state.caches, VOCABULARY))
    assert plan.read_bytes == 600 * 3 * 2 * (8 + 4) * 4 + 50 * 4 + 8 + 8
    assert plan.tokens == state.tokens.tobytes()
