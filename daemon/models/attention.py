"""Attention of one token over keys and values that lie in segments (`snapshot/runs.py`), for several branches at once.

Each branch takes products of its own query with one segment after the other, while the segment is in the processor's
cache. A product has one shape, and the parts are added up in the order of the segments. So the bits follow from the
branch's own tokens, never from who decodes beside it, or who shares a run with it.

mlx-lm's models import `scaled_dot_product_attention` by name. `install` puts `attend` in its place; what a model hands
over with a mask, with attention sinks, or with other keys than it has fetched goes on to mlx-lm's own function. So do
models that compute attention themselves: what they fetch are all keys and values of the cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final
from weakref import ref

import mlx.core as mx
from mlx_lm.models import base

from ...snapshot.kinds import is_shared
from ...snapshot.runs import SEGMENT_TOKENS

_NAME: Final = "scaled_dot_product_attention"
_plain = base.scaled_dot_product_attention


class NoRound(Exception):
    """A model wants something of its caches that several branches in one call do not have."""


class RoundLayer:
    """One layer's caches of several branches, as the cache of a model call that reads one token for each.

    offset: int32 `[rows]`, the tokens that each has read. rows: of the call; those behind the branches compute for
    nothing.
    """

    def __init__(self, caches: Sequence[Any], offset: mx.array, rows: int) -> None:
        self.caches, self.offset, self.rows = caches, offset, rows
        self._fetched: tuple[Any, ...] = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put each branch's row `[1, heads, 1, dim]` at the end of its cache. What is fetched holds NaN: branches have
        no common keys, so a model that looks at them fails."""
        for row, cache in enumerate(self.caches):
            cache.append(keys[row : row + 1], values[row : row + 1])
        longest = max(cache.offset for cache in self.caches)
        fetched = [
            mx.broadcast_to(mx.array(float("nan"), dtype=each.dtype), (*each.shape[:2], longest, each.shape[3]))
            for each in (keys, values)
        ]
        self._fetched = tuple(ref(array) for array in fetched)
        return fetched[0], fetched[1]

    def has_fetched(self, keys: mx.array, values: mx.array) -> bool:
        """As of `SharedKVCache`."""
        return len(self._fetched) == 2 and self._fetched[0]() is keys and self._fetched[1]() is values

    def make_mask(self, count: int, *, return_array: bool = False, window_size: int | None = None) -> None:
        """None: one token sees all before it. Raises NoRound: the model wants a window."""
        if count != 1 or window_size:
            raise NoRound("a mask")


def install(network: Any) -> None:
    """Take the place of mlx-lm's attention in the modules that define a network's layers. Idempotent; other caches than
    those of branches go on to what was there."""
    for name in {type(module).__module__ for module in network.modules()}:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _NAME, None) is _plain:
            setattr(module, _NAME, attend)


def run_round(network: Any, tokens: Sequence[int], branches: Sequence[Sequence[Any]], rows: int) -> mx.array:
    """One model call that reads one token for each branch: unevaluated float32 logits `[branches, vocabulary]`.

    branches: the caches of each, all shared. rows: of the call, at least as many. Raises NoRound, or anything that the
    model raises; then some of the caches may have the token.
    """
    idle = [0] * (rows - len(branches))
    layers = []
    for caches in zip(*branches, strict=True):
        offset = mx.array([*(cache.offset for cache in caches), *idle])
        layers.append(RoundLayer(caches, offset, rows))
    logits: mx.array = network(mx.array([*tokens, *idle])[:, None], cache=layers)
    return logits[: len(branches), -1].astype(mx.float32)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """As mlx-lm's function, `[rows, heads, tokens, dim]`."""
    in_round = isinstance(cache, RoundLayer)
    is_plain = mask is None and sinks is None and queries.shape[2] == 1
    if is_plain and (in_round or is_shared(cache)) and cache.has_fetched(keys, values):
        if in_round:
            return over_segments(queries, cache.caches, scale)
        cache.takes_segments = True
        return over_segments(queries, [cache], scale)
    if in_round:
        raise NoRound("attention over gathered keys")
    found: mx.array = _plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return found


def over_segments(queries: mx.array, caches: Sequence[Any], scale: float) -> mx.array:
    """The attention `[rows, heads, 1, dim]` of one query each, over all that the caches hold. Rows without a cache
    become zero."""
    rows, heads = queries.shape[:2]
    groups = _groups(caches)
    kv_heads = next(iter(groups.values())).keys.shape[1]
    queries = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, -1)
    highest: list[mx.array | None] = [None] * len(caches)
    for group in groups.values():
        group.score(queries)
        for place, row in enumerate(group.rows):
            mine, known = group.highest[:, place], highest[row]
            highest[row] = mine if known is None else mx.maximum(known, mine)
    sums: list[tuple[mx.array, mx.array] | None] = [None] * len(caches)
    for group in groups.values():
        group.add_to(sums, highest)
    found = mx.stack([mixed / weights[..., None] for weights, mixed in filter(None, sums)])
    if len(caches) < rows:
        found = mx.concatenate([found, mx.zeros((rows - len(caches), *found.shape[1:]))])
    return found.reshape(rows, heads, 1, -1).astype(queries.dtype)


class _Group:
    """Rows that attend to the same segments. keys, values: `[segments, heads, 64, dim]`; tokens: in them."""

    def __init__(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        self.keys, self.values, self.tokens = keys, values, tokens
        self.rows: list[int] = []
        self.highest = self._scores = keys

    def score(self, queries: mx.array) -> None:
        """Find the scores `[segments, heads, rows, queries a head, 64]`, and the highest `[heads, rows, …]`."""
        mine = queries if self.rows == list(range(queries.shape[0])) else queries[mx.array(self.rows)]
        scores = mine.swapaxes(0, 1)[None] @ self.keys[:, :, None].swapaxes(-1, -2)
        scores = scores.astype(mx.float32)
        if self.tokens < self.keys.shape[0] * SEGMENT_TOKENS:
            scores = mx.where(_is_there(self.keys.shape[0], self.tokens), scores, -mx.inf)
        self._scores, self.highest = scores, scores.max(axis=(0, -1))

    def add_to(self, sums: list[tuple[mx.array, mx.array] | None], highest: Sequence[mx.array | None]) -> None:
        """Add the sum of the weights `[heads, …]` and of the weighted values `[heads, …, dim]` to those of each row,
        segment by segment: a sum along the first axis adds one after the other."""
        top = mx.stack([each for row in self.rows if (each := highest[row]) is not None], axis=1)
        weights = mx.exp(self._scores - top[None, ..., None])
        mixed = (weights.astype(self.values.dtype) @ self.values[:, :, None]).astype(mx.float32)
        summed = weights.sum(-1)
        self._scores = self.highest
        whole = (summed.sum(0), mixed.sum(0))
        for place, row in enumerate(self.rows):
            before = sums[row]
            if before is None:
                sums[row] = whole[0][:, place], whole[1][:, place]
            elif self.keys.shape[0] == 1:
                sums[row] = before[0] + whole[0][:, place], before[1] + whole[1][:, place]
            else:
                sums[row] = (
                    mx.concatenate([before[0][None], summed[:, :, place]]).sum(0),
                    mx.concatenate([before[1][None], mixed[:, :, place]]).sum(0),
                )


def _groups(caches: Sequence[Any]) -> dict[Any, _Group]:
    """The groups in an order in which each row meets its segments from the first to the last."""
    groups: dict[Any, _Group] = {}
    for row, cache in enumerate(caches):
        for part in cache.parts:
            key = (part.run.place, part.segments)
            if key not in groups:
                groups[key] = _Group(part.keys, part.values, part.segments * SEGMENT_TOKENS)
            groups[key].rows.append(row)
        if (tail := cache.tail_segments()) is not None:
            groups[row] = _Group(tail[0], tail[1], cache.tail_tokens)
            groups[row].rows.append(row)
    return groups


@functools.lru_cache(maxsize=1024)
def _is_there(segments: int, tokens: int) -> mx.array:
    """Which places of segments have a token, bool `[segments, 1, 1, 1, 64]`."""
    found = mx.arange(segments * SEGMENT_TOKENS).reshape(segments, 1, 1, 1, SEGMENT_TOKENS) < tokens
    mx.eval(found)  # other threads have other streams
    return found
