"""Every kind of cache, made and filled as a model would, with numbers that depend on the position alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torpor.snapshot.caches import arrays_of, make_room
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.layout import layout_of
from torpor.snapshot.state import LiveState, token_array

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip
from mlx_lm.models.deepseek_v41 import LayerCache  # isort: skip

VOCABULARY = 50


def rows(start: int, count: int, heads: int, dim: int, dtype: mx.Dtype, salt: int) -> mx.array:
    """Rows `[1, heads, count, dim]` that depend on their position alone, however many are made at once."""
    at = mx.arange(start, start + count)[None, None, :, None]
    head, column = mx.arange(heads)[None, :, None, None], mx.arange(dim)[None, None, None, :]
    # Exact in float32: the same bits whatever the shape in which they are computed.
    return (((at * 31 + head * 7 + column * 3 + salt * 13) % 251) / 256 - 0.5).astype(dtype)


@dataclass(frozen=True)
class Grower:
    """A way to make an empty cache, and to read tokens into it as a model would."""

    make: Callable[[], Any]
    read: Callable[[Any, int, int, mx.Dtype], None]


def read_kv(cache: Any, start: int, count: int, dtype: mx.Dtype) -> None:
    cache.update_and_fetch(rows(start, count, 2, 64, dtype, 1), rows(start, count, 2, 32, dtype, 2))


def read_chunked(cache: Any, start: int, count: int, dtype: mx.Dtype) -> None:
    cache.maybe_trim_front()
    read_kv(cache, start, count, dtype)


def read_arrays(cache: Any, start: int, count: int, dtype: mx.Dtype) -> None:
    """Some of its arrays change with each token, one is never made, one holds the last tokens in a type of its own."""
    at = start + count
    cache[0] = rows(at, 1, 2, 8, dtype, 3)[0]
    cache[2] = rows(at, 1, 2, 8, mx.float32, 4)
    cache[3] = mx.arange(max(0, at - 3), at, dtype=mx.int64)[None]


def read_pooled(cache: Any, start: int, count: int, dtype: mx.Dtype) -> None:
    ratio = 4
    for at in range(start, start + count):
        cache.update_window(rows(at, 1, 1, 8, dtype, 5)[0])
        pending = rows(at, 1, 1, 8, mx.float32, 6)[0]
        held = pending if cache.pending_kv is None else mx.concatenate([cache.pending_kv, pending], axis=1)
        full = held.shape[1] - held.shape[1] % ratio
        if full:
            group = held[:, :1].astype(dtype)
            whole = cache.compress_kv
            cache.compress_kv = group if whole is None else mx.concatenate([whole, group], axis=1)
        cache.pending_kv = held[:, full:]


def read_list(cache: Any, start: int, count: int, dtype: mx.Dtype) -> None:
    read_arrays(cache[0], start, count, dtype)
    read_kv(cache[1], start, count, dtype)
    read_kv(cache[2], start, count, dtype)


GROWERS = {
    "plain": Grower(caches.KVCache, read_kv),
    "concatenating": Grower(caches.ConcatenateKVCache, read_kv),
    "quantised to 8 bits": Grower(lambda: caches.QuantizedKVCache(group_size=32, bits=8), read_kv),
    "quantised to 4 bits": Grower(lambda: caches.QuantizedKVCache(group_size=32, bits=4), read_kv),
    "rotating": Grower(lambda: caches.RotatingKVCache(max_size=16), read_kv),
    "rotating that keeps 4": Grower(lambda: caches.RotatingKVCache(max_size=16, keep=4), read_kv),
    "rotating over 300": Grower(lambda: caches.RotatingKVCache(max_size=300), read_kv),
    "chunked": Grower(lambda: caches.ChunkedKVCache(16), read_chunked),
    "arrays": Grower(lambda: caches.ArraysCache(4), read_arrays),
    "pooled": Grower(lambda: LayerCache(16), read_pooled),
    "list": Grower(
        lambda: caches.CacheList(caches.ArraysCache(4), caches.KVCache(), caches.RotatingKVCache(max_size=16)),
        read_list,
    ),
}


class Run:
    """A state over two caches of one kind and a plain one, read as a model would."""

    def __init__(self, grower: Grower, dtype: mx.Dtype) -> None:
        self.grower, self.dtype = grower, dtype
        self.state = LiveState(token_array(), self.fresh(), None, mx.random.key(7))

    def fresh(self) -> list[Any]:
        return [self.grower.make(), caches.KVCache(), self.grower.make()]

    def read(self, count: int) -> None:
        state = self.state
        held = len(state.tokens)
        make_room(state.caches, count)
        for index, cache in enumerate(state.caches):
            grow = read_kv if index == 1 else self.grower.read
            grow(cache, held, count, self.dtype)
        state.passes.add(count)
        state.tokens.extend((held + at) % VOCABULARY for at in range(count))
        state.last_logits = mx.random.normal((VOCABULARY,), key=mx.random.key(held + count))
        mx.eval(arrays_of(state.caches), state.last_logits, state.random_key)

    def layout(self) -> Any:
        probe = Run(self.grower, self.dtype)
        probe.read(1)
        return layout_of(probe.state.caches, VOCABULARY)


def fingerprint(held: list[Any]) -> list[Any]:
    """All that caches hold: numbers, and the live rows of each array with type and shape, bit for bit."""
    found: list[Any] = []
    for path, cache in leaves(held):
        kind = kind_of(cache)
        found += [path, kind.name, kind.settings(cache), kind.is_empty(cache)]
        if kind.is_empty(cache):
            continue
        count = kind.offset(cache)
        found.append(count)
        arrays = {name: array[..., :count, :] for name, array in kind.spans(cache).items()}
        record = None if kind.by_token else kind.record(cache)
        if record is not None:
            found.append(record.numbers)
            arrays |= record.arrays
        for name, array in arrays.items():
            words = mx.contiguous(array).view(mx.uint8)
            mx.eval(words)
            found.append((name, str(array.dtype), array.shape, bytes(memoryview(words))))
    return found
