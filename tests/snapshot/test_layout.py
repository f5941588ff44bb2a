"""The slots that a model's caches are cut into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torpor.memvid.format.blocks import SlotSpec
from torpor.memvid.limits import MAX_SLOTS
from torpor.snapshot.errors import UnsupportedCache
from torpor.snapshot.layout import ArrayLayout, CacheEntry, CacheLayout, described, layout_of, told_caches
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip


def plain(path: str, heads: int = 2, dims: tuple[int, int] = (8, 4), dtype: str = "float16") -> CacheEntry:
    arrays = tuple(ArrayLayout(name, dtype, (heads, None, dim)) for name, dim in zip(("k", "v"), dims, strict=True))
    return CacheEntry(path, "kv/1", (), arrays, ())


def wide(path: str) -> CacheEntry:
    return plain(path, 4, (16, 16), "float32")


def test_slots_go_cache_by_cache_keys_before_values() -> None:
    slots = CacheLayout((plain("0"), wide("1")), 50).span_slots(7)
    assert [(slot.name, slot.kind, slot.dtype, slot.shape) for slot in slots] == [
        ("0.k", "kv.k/1", "float16", (2, 7, 8)),
        ("0.v", "kv.v/1", "float16", (2, 7, 4)),
        ("1.k", "kv.k/1", "float32", (4, 7, 16)),
        ("1.v", "kv.v/1", "float32", (4, 7, 16)),
    ]


def test_a_state_record_begins_with_logits_a_random_key_and_the_passes() -> None:
    slots = CacheLayout((plain("0"),), 50).state_slots(3)
    assert [(slot.name, slot.dtype, slot.shape, slot.size_bytes) for slot in slots] == [
        ("logits", "float32", (50,), 200),
        ("random_key", "uint32", (2,), 8),
        ("passes", "uint32", (3, 2), 24),
    ]


def test_caches_are_told_from_stored_slots_alone_as_from_the_model() -> None:
    ring = caches.RotatingKVCache(max_size=4)
    ring.update_and_fetch(mx.zeros((1, 1, 6, 8)), mx.zeros((1, 1, 6, 8)))
    state = caches.ArraysCache(2)
    state[1] = mx.zeros((1, 5), mx.int64)
    listed = caches.CacheList(state, caches.KVCache())
    listed[1].update_and_fetch(mx.zeros((1, 2, 6, 8)), mx.zeros((1, 2, 6, 8)))
    layout = layout_of([ring, listed, caches.KVCache()], 50)
    stored = [
        *layout.state_slots(1),
        SlotSpec("0.n", "ring.n/1", "int64", (2,)),
        SlotSpec("0.k", "ring.k/1", "float32", (1, 1, 6, 8)),
        SlotSpec("0.v", "ring.v/1", "float32", (1, 1, 6, 8)),
        SlotSpec("1.0.n", "arrays.n/1", "int64", (2,)),
        SlotSpec("1.0.a1", "arrays.a1/1", "int64", (1, 5)),
    ]
    assert described(layout.span_slots(6), stored) == (
        "ring/1 k, v 1x1xnx8 float32",
        "arrays/1 a1 1x5 int64",
        "kv/1 k, v 2xnx8 float32",
    )
    assert tuple(entry.described for entry in layout.entries if entry.in_use) == described(layout.span_slots(6), stored)


@pytest.mark.parametrize("name", ["k", "0", "x.k"])
def test_a_slot_of_no_cache_is_not_told_as_one(name: str) -> None:
    with pytest.raises(ValueError, match="of no cache"):
        described([SlotSpec(name, "kv.k/1", "float32", (1, 1, 1))], ())


def test_a_slot_of_an_unknown_kind_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedCache, match="'later/7'"):
        described([SlotSpec("0.k", "later.k/7", "float32", (1, 1, 1))], ())


def test_the_layout_of_caches_is_that_of_each(make_state: Callable[..., LiveState]) -> None:
    layout = layout_of(make_state(1).caches, 50)
    assert layout == CacheLayout(tuple(plain(str(index), dtype="float32") for index in range(3)), 50)
    assert layout.by_token


def test_a_cache_that_the_model_leaves_empty_has_no_slots(make_state: Callable[..., LiveState]) -> None:
    layout = layout_of([*make_state(1, layers=1).caches, caches.KVCache()], 50)
    assert [entry.in_use for entry in layout.entries] == [True, False]
    assert [slot.name for slot in layout.span_slots(1)] == ["0.k", "0.v"]
    assert str(layout).endswith("kv/1 not used @ 1")


def test_a_layout_names_the_places_of_equal_caches() -> None:
    entries = (plain("0"), plain("1"), wide("2"), plain("3"))
    assert str(CacheLayout(entries, 50)) == (
        "kv/1 k 2xnx8 float16; v 2xnx4 float16 @ 0-1,3; kv/1 k, v 4xnx16 float32 @ 2"
    )


def test_layouts_that_differ_read_differently() -> None:
    """The text is a part of the identity."""
    layouts = [
        (plain("0"),),
        (plain("0"), plain("1")),
        (wide("0"),),
        (plain("0"), wide("1")),
        (wide("0"), plain("1")),
        (plain("0"), wide("1"), plain("2")),
        (plain("0.0"), plain("0.1")),
    ]
    assert len({str(CacheLayout(entries, 50)) for entries in layouts}) == len(layouts)


def test_what_a_cache_was_made_with_is_part_of_its_layout() -> None:
    texts = set()
    for max_size, keep in ((4, 0), (8, 0), (8, 2)):
        ring = caches.RotatingKVCache(max_size=max_size, keep=keep)
        ring.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))
        texts.add(str(layout_of([ring], 50)))
    for bits, group_size in ((8, 32), (4, 32), (8, 64)):
        quantized = caches.QuantizedKVCache(group_size=group_size, bits=bits)
        quantized.update_and_fetch(mx.zeros((1, 1, 1, 64)), mx.zeros((1, 1, 1, 64)))
        texts.add(str(layout_of([quantized], 50)))
    assert len(texts) == 6


def test_the_text_of_a_layout_tells_its_caches_again() -> None:
    ring = caches.RotatingKVCache(max_size=4, keep=1)
    ring.update_and_fetch(mx.zeros((1, 1, 6, 8)), mx.zeros((1, 1, 6, 4)))
    quantized = [caches.QuantizedKVCache(group_size=32, bits=4) for _ in range(3)]
    for each in quantized:
        each.update_and_fetch(mx.zeros((1, 1, 1, 64)), mx.zeros((1, 1, 1, 32)))
    listed = caches.CacheList(quantized[2], caches.KVCache())
    layout = layout_of([*quantized[:2], ring, listed], 50)
    told = told_caches(str(layout))
    assert {
        entry.path: (entry.kind, dict(entry.settings) if entry.in_use else {}, entry.in_use) for entry in layout.entries
    } == {path: (cache.kind, dict(cache.settings), cache.in_use) for path, cache in told.items()}


@pytest.mark.parametrize("text", ["", "ab" * 32, "3 x kv/1 2x16 float32", "kv/1 @ 3", "kv/1 k 2xnx8 float32 @ x"])
def test_another_text_tells_of_no_cache(text: str) -> None:
    assert told_caches(text) == {}


def test_a_text_that_claims_caches_without_end_tells_of_no_more_than_there_can_be() -> None:
    for places in ("0-999999999999", ",".join(f"{at}00000-{at}99999" for at in range(10, 99))):
        assert len(told_caches(f"kv/1 not used @ {places}")) == MAX_SLOTS
