"""What MLX itself loads from a version's tensors is what the live caches hold, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.store import Store
from torpor.tests.snapshot.stored_rig import Kept

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip


def same(loaded: mx.array, live: mx.array) -> bool:
    words = [mx.contiguous(each).view(mx.uint8) for each in (loaded, live)]
    return loaded.dtype == live.dtype and loaded.shape == live.shape and bool(mx.array_equal(*words))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [1, 257, 600])
def test_mlx_loads_the_keys_and_values_of_the_live_cache(
    store: Store, tmp_path: Path, dtype: mx.Dtype, count: int
) -> None:
    session = Kept(store, lambda: [caches.KVCache(), caches.QuantizedKVCache(group_size=32, bits=4)], dtype=dtype)
    session.read(count)
    session.sleep()
    target = tmp_path / "kv.safetensors"
    store.export_tensors(session.uri, None, target)
    loaded: Any = mx.load(str(target))
    plain, quantized = session.state.caches
    assert same(loaded["layers.0.k"], plain.keys[0, :, :count])
    assert same(loaded["layers.0.v"], plain.values[0, :, :count])
    for name, part in zip(("", ".scales", ".biases"), quantized.keys, strict=True):
        assert same(loaded[f"layers.1.k{name}"], part[0, :, :count])
    assert loaded["tokens"].tolist() == list(session.state.tokens)
    assert same(loaded["state.logits"], session.state.last_logits)  # type: ignore[arg-type]


def test_mlx_loads_windows_and_recurrent_state_as_they_lie(store: Store, tmp_path: Path) -> None:
    session = Kept(store, lambda: [caches.RotatingKVCache(max_size=16), caches.ArraysCache(3)])
    for count in (12, 9):
        session.read(count)
    session.sleep()
    target = tmp_path / "kv.safetensors"
    store.export_tensors(session.uri, None, target)
    loaded: Any = mx.load(str(target))
    ring, arrays = session.state.caches
    assert same(loaded["layers.0.k"], ring.keys)
    assert loaded["layers.0.n"].tolist() == [21, ring._idx]
    assert same(loaded["layers.1.a0"], arrays[0])
    assert same(loaded["layers.1.a2"], arrays[2])
