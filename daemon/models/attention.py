"""Model calls that read one token for each of several states, whose attention lies where their caches are.

Sessions: row by row over each one's own cache, by mlx-lm's own function. So nothing is merged or padded.

Branches: over keys and values in segments (`snapshot/runs.py`). Each branch takes products of its own query with one
segment after the other, while the segment is in the processor's cache. A product has one shape, and the parts are added
up in the order of the segments. So the bits follow from the branch's own tokens, never from who decodes beside it, or
who shares a run with it.

mlx-lm's models import `scaled_dot_product_attention` by name. `install` puts `attend` in its place; what a model hands
over with a mask, with attention sinks, or with other keys than it has fetched goes on to mlx-lm's own function. So do
models that compute attention themselves: what they fetch are all keys and values of the cache.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from weakref import ref

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from ...snapshot.kinds import is_shared
from ...snapshot.runs import SEGMENT_TOKENS

_NAME: Final = "scaled_dot_product_attention"
_plain = base.scaled_dot_product_attention


class NoRound(Exception):
    """A model wants something of its caches that several states in one call do not have."""


class RoundLayer:
    """One layer's caches of several states, as the cache of a model call that reads one token for each.

    offset: int32 `[rows]`, the tokens that each has read. rows: of the call; those behind the states compute for
    nothing.
    """

    def __init__(self, caches: Sequence[Any], offset: mx.array, rows: int) -> None:
        self.caches, self.offset, self.rows = caches, offset, rows
        self._fetched: tuple[Any, ...] = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put each state's row `[1, heads, 1, dim]` at the end of its cache. What is fetched holds NaN: states have no
        common keys, so a model that looks at them fails."""
        self._append(list(mx.split(keys, self.rows)), list(mx.split(values, self.rows)))
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

    def attention(self, queries: mx.array, scale: float) -> mx.array:
        """Of each row over its own cache, `[rows, heads, 1, dim]`."""
        raise NotImplementedError

    def _append(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        raise NotImplementedError


class _OfBranches(RoundLayer):
    """Of caches that share runs."""

    def attention(self, queries: mx.array, scale: float) -> mx.array:
        return over_segments(queries, self.caches, scale)

    def _append(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        for cache, *row in zip(self.caches, keys, values, strict=False):
            cache.append(*row)


class _OfSessions(RoundLayer):
    """Of plain caches, one for each row."""

    def attention(self, queries: mx.array, scale: float) -> mx.array:
        rows = zip(mx.split(queries, self.rows), self._held, self.caches, strict=True)
        return mx.concatenate([_plain(query, *kv, cache=cache, scale=scale, mask=None) for query, kv, cache in rows])

    def _append(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        self._held = [cache.update_and_fetch(*row) for cache, *row in zip(self.caches, keys, values, strict=True)]


def install(network: Any) -> None:
    """Take the place of mlx-lm's attention in the modules that define a network's layers. Idempotent; what is neither a
    round nor of a branch goes on to what was there."""
    for name in {type(module).__module__ for module in network.modules()}:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _NAME, None) is _plain:
            setattr(module, _NAME, attend)


def run_round(network: Any, tokens: Sequence[int], states: Sequence[Sequence[Any]], rows: int) -> mx.array:
    """One model call that reads one token for each state: unevaluated float32 logits `[states, vocabulary]`.

    states: the caches of each, all shared or all plain. rows: of the call; for branches it may be more. Raises NoRound,
    or anything that the model raises; then some of the caches may have the token.
    """
    idle = [0] * (rows - len(states))
    layers = []
    for caches in zip(*states, strict=True):
        offset = mx.array([*(cache.offset for cache in caches), *idle])
        layers.append((_OfBranches if is_shared(caches[0]) else _OfSessions)(caches, offset, rows))
    logits: mx.array = network(mx.array([*tokens, *idle])[:, None], cache=layers)
    return logits[: len(states), -1].astype(mx.float32)


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
    is_plain = mask is None and sinks is None and queries.shape[2] == 1
    if is_plain and (isinstance(cache, RoundLayer) or is_shared(cache)) and cache.has_fetched(keys, values):
        if isinstance(cache, RoundLayer):
            return cache.attention(queries, scale)
        cache.takes_segments = True
        return over_segments(queries, [cache], scale)
    if isinstance(cache, RoundLayer):
        raise NoRound("attention over gathered keys")
    mixed: mx.array = _plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return mixed


def over_segments(queries: mx.array, caches: Sequence[Any], scale: float) -> mx.array:
    """The attention `[rows, heads, 1, dim]` of one query each, over all that the caches hold. Rows without a cache
    become zero."""
    rows, heads, count = *queries.shape[:2], len(caches)
    ends = _Ends(caches)
    groups: list[_Group | _Ends] = [*_groups(caches), ends]
    scaled = (queries[:count] * scale).reshape(count, ends.keys[0].shape[1], -1, queries.shape[3])
    scores = [group.scores(_taken(scaled, group.rows)) for group in groups]
    highest = mx.full(scaled.shape[:3], -mx.inf)
    for group, each in zip(groups, scores, strict=True):
        highest = _put(highest, group.rows, mx.maximum(_taken(highest, group.rows), group.highest(each)))
    below = [group.below(each, _taken(highest, group.rows)) for group, each in zip(groups, scores, strict=True)]
    sums, mixed = mx.zeros(scaled.shape[:3]), mx.zeros(scaled.shape)
    for group, weights in zip(groups, _exponentials(below), strict=True):
        added = functools.partial(group.added, is_first=group is groups[0])
        sums = _put(sums, group.rows, added(_taken(sums, group.rows), weights.sum(-1)))
        mixed = _put(mixed, group.rows, added(_taken(mixed, group.rows), group.mix(weights)))
    answers = (mixed / sums[..., None]).reshape(count, heads, 1, -1)
    if count < rows:
        answers = mx.concatenate([answers, mx.zeros((rows - count, *answers.shape[1:]))])
    return answers.astype(queries.dtype)


def _exponentials(arrays: list[mx.array]) -> list[mx.array]:
    """The exponentials of arrays that nobody else has. On a CPU NumPy takes them by vectors: a twentieth of the time,
    and a number has the same bits wherever it stands."""
    if mx.default_device() != mx.Device(mx.cpu):
        return [mx.exp(each) for each in arrays]
    mx.eval(arrays)
    for each in arrays:
        numbers = np.array(each, copy=False)
        np.exp(numbers, out=numbers)
    return arrays


def _taken(array: mx.array, rows: mx.array | None) -> mx.array:
    """Some rows of an array, None for all."""
    return array if rows is None else array[rows]


def _put(array: mx.array, rows: mx.array | None, numbers: mx.array) -> mx.array:
    """An array with other numbers in some of its rows, None for all."""
    if rows is None:
        return numbers
    array[rows] = numbers
    return array


class _Group:
    """Rows that attend to the same whole segments. keys, values: `[segments, heads, 64, dim]`. rows: which; None for
    all."""

    def __init__(self, keys: mx.array, values: mx.array, rows: mx.array | None) -> None:
        self.keys, self.values, self.rows = keys, values, rows

    def scores(self, queries: mx.array) -> mx.array:
        """`[segments, heads, rows, queries a head, 64]`: all rows take a segment while it is in the cache."""
        scores = queries.swapaxes(0, 1)[None] @ self.keys[:, :, None].swapaxes(-1, -2)
        return scores.astype(mx.float32)

    def highest(self, scores: mx.array) -> mx.array:
        """Of each row, `[rows, heads, queries a head]`."""
        return scores.max(axis=(0, -1)).swapaxes(0, 1)

    def below(self, scores: mx.array, highest: mx.array) -> mx.array:
        """The scores without the highest of their rows."""
        return scores - highest.swapaxes(0, 1)[None, ..., None]

    def mix(self, weights: mx.array) -> mx.array:
        """The weighted sums of values in each segment, `[segments, heads, rows, queries a head, dim]`."""
        return (weights.astype(self.values.dtype) @ self.values[:, :, None]).astype(mx.float32)

    def added(self, before: mx.array, parts: mx.array, *, is_first: bool) -> mx.array:
        """What each row has before, `[rows, heads, …]`, and the parts of the segments, one added after the other as a
        sum along the first axis does it. is_first: before there is only zero."""
        if not is_first:
            parts = mx.concatenate([before.swapaxes(0, 1)[None], parts])
        return parts.sum(0).swapaxes(0, 1)


class _Ends:
    """What each row has for itself: the segments of its tail, all rows' one behind the other."""

    rows = None

    def __init__(self, caches: Sequence[Any]) -> None:
        tails = [cache.tail_segments() for cache in caches]
        self.keys, self.values = zip(*tails, strict=True)
        self._places = _places_of(tuple(keys.shape[0] for keys in self.keys))
        self._tokens = tuple(cache.tail_tokens for cache in caches)

    def scores(self, queries: mx.array) -> mx.array:
        """`[segments, heads, queries a head, 64]`, minus infinity where there is no token."""
        by_row = mx.split(queries, len(self.keys))
        scores = [each @ keys.swapaxes(-1, -2) for each, keys in zip(by_row, self.keys, strict=True)]
        return mx.where(_is_there(self._tokens), mx.concatenate(scores).astype(mx.float32), -mx.inf)

    def highest(self, scores: mx.array) -> mx.array:
        """As of `_Group`."""
        highest = scores.max(-1)
        if self._places.of is None:
            return highest
        nothing = mx.full((1, *highest.shape[1:]), -mx.inf)
        return mx.concatenate([highest, nothing])[self._places.padded].max(0)

    def below(self, scores: mx.array, highest: mx.array) -> mx.array:
        """As of `_Group`."""
        return scores - _taken(highest, self._places.of)[..., None]

    def mix(self, weights: mx.array) -> mx.array:
        """As of `_Group`, `[segments, heads, queries a head, dim]`."""
        parts = mx.split(weights.astype(self.values[0].dtype), self._places.starts)
        mixed = [each @ values for each, values in zip(parts, self.values, strict=True)]
        return mx.concatenate(mixed).astype(mx.float32)

    def added(self, before: mx.array, parts: mx.array, *, is_first: bool) -> mx.array:
        """As of `_Group`."""
        if self._places.of is None:
            return before + parts
        sums = mx.concatenate([before[None], parts[self._places.common]]).sum(0)
        for rows, segments in self._places.further:
            sums = _put(sums, rows, sums[rows] + parts[segments])
        return sums


class _Places(NamedTuple):
    """Where the segments of tails lie that have so many each, one tail behind the other.

    starts: of the tails but the first. of: each segment's tail; None where each tail has one segment. padded: the
    segments of each tail, `[most, tails]`; one behind the last where it has none. common: those that every tail has,
    `[fewest, tails]`. further: the other ones, a pair for each place in a tail: the tails that go so far, and their
    segments there.
    """

    starts: list[int]
    of: mx.array | None
    padded: mx.array
    common: mx.array
    further: list[tuple[mx.array, mx.array]]


@functools.lru_cache(maxsize=64)
def _places_of(counts: tuple[int, ...]) -> _Places:
    ends = list(itertools.accumulate(counts))
    firsts = np.array([0, *ends[:-1]])
    steps = np.arange(max(counts))[:, None]
    padded = np.where(steps < np.array(counts), firsts + steps, ends[-1])
    further = [(np.flatnonzero(row < ends[-1]), row[row < ends[-1]]) for row in padded[min(counts) :]]
    of = None if max(counts) == 1 else mx.array(np.repeat(np.arange(len(counts)), counts))
    common = mx.array(padded[: min(counts)])
    places = _Places(ends[:-1], of, mx.array(padded), common, [(mx.array(one), mx.array(two)) for one, two in further])
    mx.eval(places)  # other threads have other streams
    return places


def _groups(caches: Sequence[Any]) -> list[_Group]:
    """The groups in an order in which each row meets its segments from the first to the last."""
    parts: dict[Any, tuple[Any, list[int]]] = {}
    for row, cache in enumerate(caches):
        for part in cache.parts:
            parts.setdefault((part.run.place, part.segments), (part, []))[1].append(row)
    everybody = list(range(len(caches)))
    return [
        _Group(part.keys, part.values, None if rows == everybody else mx.array(rows)) for part, rows in parts.values()
    ]


@functools.lru_cache(maxsize=64)
def _is_there(tokens: tuple[int, ...]) -> mx.array:
    """Which places of tails with so many tokens have one, bool `[segments, 1, 1, 64]`."""
    places = np.arange(SEGMENT_TOKENS)
    rows = [places + start < count for count in tokens for start in range(0, count, SEGMENT_TOKENS)]
    there = mx.array(np.stack(rows)[:, None, None])
    mx.eval(there)  # other threads have other streams
    return there
