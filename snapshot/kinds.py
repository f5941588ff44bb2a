"""The kinds of cache that can be slept and woken, each with its adapter: the one file that names mlx-lm's classes.

A stored kind is a short string of ours with a version ("kv/1"), never a class name. What an adapter owns is the
translation between one mlx-lm cache object and our slots; the order and the hashing of slots is `capture.py`'s
and `restore.py`'s affair. A cache of any other class is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .errors import InconsistentState, UnsupportedCache

KV_KIND = "kv/1"
SHORTENED_KINDS = frozenset({KV_KIND})
"""Kinds whose caches can drop their last token, as a wake without a state record must."""
_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The shape of one layer's cache, token axis left out.

    heads: key-value heads; key_dim and value_dim: size of one head; dtype: name of the element type.
    """

    kind: str
    heads: int
    key_dim: int
    value_dim: int
    dtype: str

    def __str__(self) -> str:
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}+{self.value_dim}"
        return f"{self.kind} {self.heads}x{dims} {self.dtype}"


def dtype_named(name: str) -> mx.Dtype:
    """The MLX dtype of a stored name."""
    return _DTYPES[name]


def length(caches: Sequence[Any]) -> int:
    """Tokens that every layer holds.

    Raises:
        UnsupportedCache: a layer's cache is of a kind without adapter.
        InconsistentState: layers hold different numbers of tokens.
    """
    lengths = {_plain(cache).offset for cache in caches}
    if len(lengths) > 1:
        raise InconsistentState(f"Layers hold different numbers of tokens: {sorted(lengths)}.", lengths=sorted(lengths))
    return lengths.pop() if lengths else 0


def truncate(caches: Sequence[Any], token_count: int) -> None:
    """Drop all that was appended after the first `token_count` tokens, layer by layer.

    Also mends a model call that failed half-way, when only the first layers had grown.
    """
    for cache in caches:
        plain = _plain(cache)
        if plain.offset > token_count:
            plain.trim(plain.offset - token_count)


def last_rows(caches: Sequence[Any]) -> list[tuple[mx.array, mx.array]]:
    """Each layer's keys and values of the last token, evaluated, as arrays of their own."""
    rows = []
    for cache in caches:
        keys, values = live_arrays(cache)
        at = slice(_plain(cache).offset - 1, _plain(cache).offset)
        rows.append((mx.contiguous(keys[..., at, :]), mx.contiguous(values[..., at, :])))
    mx.eval(rows)
    return rows


def put_last_rows(caches: Sequence[Any], rows: Sequence[tuple[mx.array, mx.array]]) -> None:
    """Put back what `last_rows` gave, over what the caches hold of the last token now."""
    for cache, (keys, values) in zip(caches, rows, strict=True):
        plain = _plain(cache)
        at = slice(plain.offset - 1, plain.offset)
        plain.keys[..., at, :], plain.values[..., at, :] = keys, values
    mx.eval([live_arrays(cache) for cache in caches])


def layer_layout(cache: Any) -> LayerLayout:
    """The layout of a cache that holds at least one token."""
    keys, values, _ = _plain(cache).state
    _, heads, _, key_dim = keys.shape
    if keys.dtype != values.dtype or keys.dtype not in _DTYPE_NAMES:
        raise UnsupportedCache(
            f"Keys of {keys.dtype} and values of {values.dtype} are not a pair that can be stored; "
            f"use one of {', '.join(_DTYPES)} for both.",
            key_dtype=str(keys.dtype),
            value_dtype=str(values.dtype),
        )
    return LayerLayout(KV_KIND, heads, key_dim, values.shape[3], _DTYPE_NAMES[keys.dtype])


def live_arrays(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values as the cache holds them, `[1, heads, capacity, dim]`, padding behind the offset included."""
    keys, values, _ = _plain(cache).state
    return keys, values


def rebuilt(keys: mx.array, values: mx.array, token_count: int) -> KVCache:
    """A cache over filled arrays `[1, heads, capacity, dim]`, of which the first `token_count` tokens are live."""
    cache: KVCache = KVCache.from_state((keys, values, token_count))
    return cache


def capacity_for(token_count: int) -> int:
    """Tokens that the arrays of a cache have room for: mlx-lm grows them in steps, and so do we."""
    step: int = KVCache.step
    return -(-token_count // step) * step


def resident_bytes(caches: Sequence[Any]) -> int:
    """Memory that the arrays take, padding included."""
    return sum(array.nbytes for cache in caches if not _plain(cache).empty() for array in live_arrays(cache))


def _plain(cache: Any) -> Any:
    # Exactly this class: a subclass may keep more state than we would save.
    if type(cache) is not KVCache:
        raise UnsupportedCache(
            f"Caches of kind {type(cache).__name__} cannot be slept yet; this model keeps at least one layer in it. "
            "Use a model whose layers all keep a plain KVCache.",
            cache_kind=type(cache).__name__,
        )
    return cache
