"""States go into a batch and come out again with every bit; a call that failed half-way leaves no trace in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from torpor.snapshot import batches
from torpor.snapshot.caches import arrays_of, length
from torpor.snapshot.kinds import leaves

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

WINDOW = 24


def caches_of(kind: str) -> list[Any]:
    if kind == "lists":
        return [CacheList(KVCache(), ArraysCache(2)), CacheList(KVCache(), ArraysCache(2))]
    one = {"plain": KVCache, "window": lambda: RotatingKVCache(WINDOW), "recurrent": lambda: ArraysCache(2)}[kind]
    return [one(), one()]


KINDS = ["plain", "window", "recurrent", "lists"]


def grow(caches: list[Any], seed: int, tokens: int, rows: int = 1) -> None:
    """What a model call of that many tokens leaves in caches, or in a batch of `rows`."""
    mx.random.seed(seed)
    for cache in caches:
        for _, leaf in leaves([cache]):
            if hasattr(leaf, "cache"):
                leaf[0], leaf[1] = mx.random.normal((rows, 3, 4)), mx.random.normal((rows, 2, 5, 5))
            else:
                new = mx.random.normal((2, rows, 2, tokens, 8))
                leaf.update_and_fetch(new[0], new[1])


def filled(kind: str, seed: int, tokens: int) -> list[Any]:
    caches = caches_of(kind)
    grow(caches, seed, tokens)
    for step in range(3):
        grow(caches, 100 * seed + step, 1)
    mx.eval(arrays_of(caches))
    return caches


def numbers(caches: list[Any]) -> list[np.ndarray]:
    """What the caches hold of their tokens, in the order of these."""
    found = []
    for _, leaf in leaves(caches):
        if hasattr(leaf, "cache"):
            found += [np.asarray(array) for array in leaf.cache]
        elif hasattr(leaf, "_temporal_order"):
            found += [np.asarray(leaf._temporal_order(a))[..., -leaf.size() :, :] for a in (leaf.keys, leaf.values)]
        else:
            found += [np.asarray(array[..., : leaf.offset, :]) for array in (leaf.keys, leaf.values)]
    return found


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_comes_out_bit_for_bit(kind: str) -> None:
    before = [numbers(filled(kind, seed, 10 * seed)) for seed in (1, 2, 4)]
    batch = batches.merge([filled(kind, 1, 10), filled(kind, 4, 40)])
    batches.extend(batch, batches.merge([filled(kind, 2, 20)]))
    for row, number in enumerate((0, 2, 1)):
        assert same(numbers(batches.extract(batch, row)), before[number])
    batches.retain(batch, [0, 2])
    assert same(numbers(batches.extract(batch, 1)), before[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_put_back_after_a_call_that_failed_half_way(kind: str) -> None:
    """Also where a window has begun to write over its own rows, and where only the first layer has grown."""
    batch = batches.merge([filled(kind, 1, 10), filled(kind, 3, 30)])
    for step in range(2 * WINDOW):
        before = [numbers(batches.extract(batch, row)) for row in (0, 1)]
        for layers in (1, 2):
            put_back = batches.keep(batch, caches_of(kind))
            grow(batch[:layers], 7 * step, 1, rows=2)
            mx.eval(batches.arrays(batch))
            put_back()
            assert all(same(numbers(batches.extract(batch, row)), before[row]) for row in (0, 1))
        grow(batch, step, 1, rows=2)


@pytest.mark.parametrize("kind", ["plain", "recurrent", "lists"])
def test_a_row_that_nobody_has_any_more_is_given_to_another_state_where_it_lies(kind: str) -> None:
    first, second, third = (numbers(filled(kind, seed, 10 * seed)) for seed in (1, 4, 2))
    batch = batches.merge([filled(kind, 1, 10), filled(kind, 4, 40)])
    late = filled(kind, 2, 20)
    assert batches.has_places(late)
    assert batches.fits_place(batch, late)
    batches.place(batch, 0, late)
    assert late == [None, None]
    assert same(numbers(batches.extract(batch, 0)), third)
    assert same(numbers(batches.extract(batch, 1)), second)
    assert not same(first, third)
    grow(batch, 5, 1, rows=2)
    alone = [filled(kind, 2, 20), filled(kind, 4, 40)]
    control = batches.merge(alone)
    grow(control, 5, 1, rows=2)
    for row in (0, 1):
        assert same(numbers(batches.extract(batch, row)), numbers(batches.extract(control, row)))


def test_a_row_is_not_given_to_a_state_that_is_longer_nor_one_of_windows_to_any() -> None:
    batch = batches.merge([filled("plain", 1, 10), filled("plain", 2, 20)])
    assert not batches.fits_place(batch, filled("plain", 3, 30))
    assert not batches.has_places(filled("window", 1, 10))


def test_rows_are_let_go_of_as_they_go_in() -> None:
    rows = [filled("plain", 1, 10), filled("plain", 2, 20)]
    batch = batches.merge(rows)
    assert rows == [[None, None], [None, None]]
    assert length(batches.extract(batch, 0)) == 13


@pytest.mark.parametrize(
    "cache", [QuantizedKVCache(), ConcatenateKVCache(), RotatingKVCache(WINDOW, keep=4)], ids=lambda c: type(c).__name__
)
def test_caches_that_mlx_lm_cannot_give_back_whole_are_not_batched(cache: Any) -> None:
    kv = mx.ones((1, 2, 3, 64))
    cache.update_and_fetch(kv, kv)
    assert not batches.can_batch([cache])


def test_caches_that_hold_nothing_are_not_batched() -> None:
    assert not batches.can_batch([KVCache()])
    half = ArraysCache(2)
    half[0] = mx.ones((1, 3))
    assert not batches.can_batch([half])
    assert batches.can_batch(filled("lists", 1, 5))
