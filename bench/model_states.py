"""Whole states in the shapes of real models, in mlx-lm's own caches, full of random numbers: what sleeping and waking
are measured with, without a model's weights.

Owns the shapes, and how such a state is made and grows. Knows no store and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.memvid.format.identity import Identity
from torpor.snapshot.layout import CacheLayout, layout_of
from torpor.snapshot.state import LiveState, token_array
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache
# isort: on

IDENTITY: Final = Identity((("weights", "random bytes"),))
_CHUNK: Final = 2048
_BFLOAT16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its state, in bfloat16. window: tokens that a layer keeps which is not the
    last of `period` layers; 0 where all layers keep all."""

    name: str
    layers: int
    heads: int
    dim: int
    vocabulary: int
    window: int = 0
    period: int = 1

    def caches(self) -> list[Any]:
        """Empty ones, as the model makes them."""
        return [
            RotatingKVCache(max_size=self.window) if self.is_windowed(layer) else KVCache()
            for layer in range(self.layers)
        ]

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer keeps the last tokens only."""
        return bool(self.window) and layer % self.period != self.period - 1

    def tokens_for(self, size_bytes: int) -> int:
        """How many tokens have a state of about this size."""
        row = 2 * self.heads * self.dim * _BFLOAT16_BYTES
        windowed = sum(map(self.is_windowed, range(self.layers)))
        return (size_bytes - windowed * self.window * row) // ((self.layers - windowed) * row)


QWEN3_06B: Final = ModelShape("Qwen3-0.6B", layers=28, heads=8, dim=128, vocabulary=151_936)
LLAMA_32_1B: Final = ModelShape("Llama-3.2-1B", layers=16, heads=8, dim=64, vocabulary=128_256)
GEMMA_3_1B: Final = ModelShape("Gemma-3-1B", layers=26, heads=1, dim=256, vocabulary=262_144, window=512, period=6)
SHAPES: Final = {shape.name: shape for shape in (QWEN3_06B, LLAMA_32_1B, GEMMA_3_1B)}


def layout(shape: ModelShape) -> CacheLayout:
    """The layout of the shape's caches, found as when a model is loaded: with one token in them."""
    return layout_of(random_state(shape, 1).caches, shape.vocabulary)


def random_state(shape: ModelShape, tokens: int, seed: int = 0) -> LiveState:
    """A state of so many tokens, evaluated."""
    state = LiveState(token_array(), shape.caches(), None, mx.random.key(seed))
    grow(state, shape, tokens, seed)
    return state


def grow(state: LiveState, shape: ModelShape, tokens: int, seed: int) -> None:
    """Append random keys and values as a model would: in chunks, the last token alone."""
    random = np.random.default_rng((seed, len(state.tokens)))
    for cache in state.caches:
        for start in range(0, tokens - 1, _CHUNK):
            _append(cache, shape, min(_CHUNK, tokens - 1 - start), random)
        _append(cache, shape, 1, random)
    for start in range(0, tokens - 1, _CHUNK):
        state.passes.add(min(_CHUNK, tokens - 1 - start))
    state.passes.add(1)
    state.tokens.extend(random.integers(0, shape.vocabulary, tokens, dtype="<u4").tolist())
    state.last_logits = mx.array(random.normal(size=shape.vocabulary).astype("f4"))
    mx.eval(state.last_logits, state.random_key)


def other_tokens(state: LiveState, shape: ModelShape, seed: int) -> None:
    """Another ledger over the same keys and values, so that no block of it has an id that a store knows."""
    random = np.random.default_rng((seed, 1))
    state.tokens[:] = token_array(random.integers(0, shape.vocabulary, len(state.tokens), dtype="<u4").tobytes())


def arrays_in(caches: list[Any]) -> list[mx.array]:
    """What a load has to have evaluated before it is done."""
    return [array for cache in caches for array in (cache.keys, cache.values)]


def _append(cache: Any, shape: ModelShape, count: int, random: np.random.Generator) -> None:
    cache.update_and_fetch(*(_rows(shape, count, random.integers) for _ in "kv"))
    mx.eval(cache.keys, cache.values)


def _rows(shape: ModelShape, count: int, integers: Callable[..., Any]) -> mx.array:
    """Numbers of all signs and magnitudes below 2, of random bits: without the highest bit of the exponent none of them
    is infinite or NaN."""
    size = shape.heads * count * shape.dim
    words = integers(0, 1 << 63, -(-size // 4), dtype="u8").view("u2")[:size] & 0xBFFF
    return mx.array(words.reshape(1, shape.heads, count, shape.dim)).view(mx.bfloat16)
