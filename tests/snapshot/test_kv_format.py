"""How keys and values are held, as a part of the identity (QC14)."""

from __future__ import annotations

import pytest
from torpor.snapshot.kv_format import kv_format_of

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache  # isort: skip


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ([], "float"),
        ([KVCache(), RotatingKVCache(max_size=8)], "float"),
        ([QuantizedKVCache(group_size=64, bits=8)], "q8g64"),
        ([QuantizedKVCache(group_size=32, bits=4), QuantizedKVCache(group_size=32, bits=4)], "q4g32"),
        ([KVCache(), QuantizedKVCache(group_size=64, bits=8)], "float+q8g64"),
        ([CacheList(KVCache(), QuantizedKVCache(group_size=64, bits=4))], "float+q4g64"),
    ],
)
def test_bits_and_group_size_of_every_layer_are_named(caches: list[object], expected: str) -> None:
    assert kv_format_of(caches) == expected
