"""How keys and values are held, as a part of the identity (QC14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torpor.snapshot.layout import KV_BITS, KV_GROUPS, kv_format_of, layout_of, serving

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


def filled(cache: Any) -> Any:
    """The cache, with one token in it."""
    if isinstance(cache, CacheList):
        for each in cache.caches:
            filled(each)
    elif isinstance(cache, ArraysCache):
        cache[0] = mx.zeros((1, 4))
    else:
        cache.update_and_fetch(mx.zeros((1, 1, 1, 128)), mx.zeros((1, 1, 1, 128)))
    return cache


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ([], "float"),
        ([KVCache(), RotatingKVCache(max_size=8), ArraysCache(1)], "float"),
        ([QuantizedKVCache(group_size=64, bits=8)], "q8g64"),
        ([QuantizedKVCache(group_size=32, bits=4), QuantizedKVCache(group_size=32, bits=4)], "q4g32"),
        ([KVCache(), QuantizedKVCache(group_size=64, bits=8)], "float+q8g64"),
        ([CacheList(KVCache(), QuantizedKVCache(group_size=64, bits=4))], "float+q4g64"),
    ],
)
def test_bits_and_group_size_of_every_cache_are_named(caches: Sequence[object], expected: str) -> None:
    assert kv_format_of(layout_of([filled(cache) for cache in caches], 50)) == expected


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("group_size", KV_GROUPS)
def test_a_format_names_the_options_that_give_it(bits: int, group_size: int) -> None:
    cache = filled(QuantizedKVCache(group_size=group_size, bits=bits))
    how = f"with --kv-bits m={bits} --kv-group m={group_size}"
    assert serving(kv_format_of(layout_of([cache], 50)), "m") == how


def test_a_cache_that_its_model_leaves_empty_has_no_format() -> None:
    used = filled(QuantizedKVCache(group_size=64, bits=8))
    assert kv_format_of(layout_of([used, KVCache()], 50)) == "q8g64"
