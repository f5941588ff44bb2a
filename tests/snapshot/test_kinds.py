"""Only what has an adapter is slept: a plain KVCache; every other kind is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torpor.snapshot import kinds
from torpor.snapshot.errors import InconsistentState, UnsupportedCache
from torpor.snapshot.kinds import LayerLayout, capacity_for, layer_layout, length, rebuilt, resident_bytes, truncate
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip

MakeState = Callable[..., LiveState]


class Derived(caches.KVCache):
    """A subclass may keep more than we would save."""


OTHERS = {
    "RotatingKVCache": lambda: caches.RotatingKVCache(max_size=64),
    "QuantizedKVCache": lambda: caches.QuantizedKVCache(),
    "ChunkedKVCache": lambda: caches.ChunkedKVCache(16),
    "ArraysCache": lambda: caches.ArraysCache(2),
    "ConcatenateKVCache": lambda: caches.ConcatenateKVCache(),
    "CacheList": lambda: caches.CacheList(caches.KVCache()),
    "Derived": Derived,
    "NoneType": lambda: None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_of_another_kind_is_refused_by_its_name(make_state: MakeState, name: str) -> None:
    other = [*make_state(3).caches, OTHERS[name]()]
    for use in (
        length,
        resident_bytes,
        lambda them: truncate(them, 1),
        lambda them: layer_layout(them[-1]),
        lambda them: kinds.live_arrays(them[-1]),
    ):
        with pytest.raises(UnsupportedCache, match=name) as refusal:
            use(other)
        assert refusal.value.cache_kind == name


def test_the_length_is_that_of_every_layer(make_state: MakeState) -> None:
    state = make_state(5)
    assert length(state.caches) == 5
    assert length([]) == 0
    assert length(make_state(0).caches) == 0
    state.caches[1].trim(1)
    with pytest.raises(InconsistentState) as refusal:
        length(state.caches)
    assert refusal.value.lengths == [4, 5]


def test_truncating_mends_layers_of_unlike_lengths_qx7(make_state: MakeState) -> None:
    state = make_state(300)
    state.caches[0].trim(10)
    truncate(state.caches, 290)
    assert length(state.caches) == 290
    truncate(state.caches, 400)
    assert length(state.caches) == 290


def test_truncating_to_nothing_leaves_an_empty_cache_that_can_grow(make_state: MakeState, grow: Any) -> None:
    state = make_state(3)
    truncate(state.caches, 0)
    del state.tokens[:]
    grow(state, 4)
    assert length(state.caches) == 4


@pytest.mark.parametrize(
    ("dtype", "name"), [(mx.float32, "float32"), (mx.float16, "float16"), (mx.bfloat16, "bfloat16")]
)
def test_a_layers_layout_has_its_sizes_and_its_type(make_state: MakeState, dtype: mx.Dtype, name: str) -> None:
    layout = layer_layout(make_state(3, dtype=dtype).caches[0])
    assert layout == LayerLayout("kv/1", 2, 8, 4, name)
    assert str(layout) == f"kv/1 2x8+4 {name}"
    assert kinds.dtype_named(name) == dtype


@pytest.mark.parametrize(
    ("keys", "values"), [(mx.float32, mx.float16), (mx.int32, mx.int32), (mx.complex64, mx.complex64)]
)
def test_element_types_that_cannot_be_stored_are_refused_threat_14(keys: mx.Dtype, values: mx.Dtype) -> None:
    cache = caches.KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 2), keys), mx.zeros((1, 1, 1, 2), values))
    with pytest.raises(UnsupportedCache) as refusal:
        layer_layout(cache)
    assert str(keys) in refusal.value.message


def test_a_rebuilt_cache_is_a_plain_one_that_goes_on(make_state: MakeState) -> None:
    original = make_state(5).caches[0]
    again = rebuilt(original.keys, original.values, 5)
    assert type(again) is caches.KVCache
    more = mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 4))
    keys, values = again.update_and_fetch(*more)
    assert (keys.shape, values.shape) == ((1, 2, 6, 8), (1, 2, 6, 4))


@pytest.mark.parametrize(("count", "capacity"), [(1, 256), (256, 256), (257, 512), (512, 512)])
def test_capacity_grows_in_the_steps_of_mlx_lm(count: int, capacity: int) -> None:
    assert capacity_for(count) == capacity


def test_resident_bytes_count_the_padding(make_state: MakeState) -> None:
    assert resident_bytes(make_state(1).caches) == 3 * 256 * 2 * (8 + 4) * 4
    assert resident_bytes(make_state(0).caches) == 0
