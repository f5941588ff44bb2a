"""Keys and values that several states hold together: immutable runs of segments, and a private tail for each state.

A segment is 64 tokens, and begins at a multiple of 64. So where a segment lies follows from the position alone, never
from who shares it. A fork takes over the runs and the tail; memory is copied when one of the two writes, and that is at
most the tail's 63 rows. A run is freed with the last cache that refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from weakref import ref

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import create_attention_mask

from .kind import copied
from .memory import address_of

SEGMENT_TOKENS: Final = 64

_GROWTH: Final = 4
"""A tail grows by a segment, and by one more for each so many that it has."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Keys and values `[segments, heads, 64, dim]` of whole segments, evaluated and never written to.

    memory: the bytes of the memory that they keep, by the address where it begins. It may be more than theirs: they may
    lie at the beginning of a cache's memory.
    """

    keys: mx.array
    values: mx.array
    memory: Mapping[int, int]

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, within: tuple[mx.array, mx.array]) -> Run:
        """A run that lies at the beginning of two other arrays."""
        mx.eval(keys, values)
        sizes = [int(array.nbytes) for array in within]
        return cls(keys, values, dict(zip((address_of(keys), address_of(values)), sizes, strict=True)))

    @property
    def place(self) -> int:
        """Where it begins in memory: runs of the same memory begin at the same place."""
        return next(iter(self.memory))

    @property
    def held_bytes(self) -> int:
        return sum(self.memory.values())


class Part(NamedTuple):
    """The first segments of a run, as one cache holds them."""

    run: Run
    segments: int

    @property
    def keys(self) -> mx.array:
        return self.run.keys[: self.segments]

    @property
    def values(self) -> mx.array:
        return self.run.values[: self.segments]


@dataclass(slots=True, eq=False)
class SharedKVCache:
    """One layer's keys and values: whole segments in runs, then a tail. Models of mlx-lm take it for a `KVCache`.

    parts: the runs in order. tail_keys, tail_values: the segments behind them, `[segments, heads, 64, dim]`, zero where
    there is no token yet; None if there are none. offset: tokens. takes_segments: whether the attention of the last
    single token was taken segment by segment (`daemon/models/attention.py`), and not over gathered keys and values.
    """

    parts: tuple[Part, ...] = ()
    tail_keys: mx.array | None = None
    tail_values: mx.array | None = None
    offset: int = 0
    takes_segments: bool = False
    _fetched: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the runs."""
        return self.offset - SEGMENT_TOKENS * sum(part.segments for part in self.parts)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Put tokens at the end. keys, values: `[1, heads, tokens, dim]`."""
        held = self.tail_tokens
        self.tail_keys = _appended(self.tail_keys, held, keys)
        self.tail_values = _appended(self.tail_values, held, values)
        self.offset += int(keys.shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put tokens at the end; all keys and values `[1, heads, tokens, dim]`, which are copied together only if they
        are used."""
        self.append(keys, values)
        fetched = self.gathered()
        self.takes_segments, self._fetched = False, tuple(ref(array) for array in fetched)
        return fetched

    def has_fetched(self, keys: mx.array, values: mx.array) -> bool:
        """Whether these very arrays came from the last `update_and_fetch`, so that they are what the cache holds."""
        return len(self._fetched) == 2 and self._fetched[0]() is keys and self._fetched[1]() is values

    def gathered(self) -> tuple[mx.array, mx.array]:
        """All keys and values `[1, heads, tokens, dim]`, not evaluated; of at least one token."""
        keys, values = zip(*self.segments(), strict=True)
        return _in_a_row(keys, self.offset), _in_a_row(values, self.offset)

    def segments(self) -> Iterator[tuple[mx.array, mx.array]]:
        """Keys and values of the parts and the tail in order, each `[segments, heads, 64, dim]`."""
        for part in self.parts:
            yield part.keys, part.values
        if tail := self.tail_segments():
            yield tail

    def tail_segments(self) -> tuple[mx.array, mx.array] | None:
        """Keys and values of the tail's segments in which there are tokens; None if there are none."""
        used = -(-self.tail_tokens // SEGMENT_TOKENS)
        if not used or self.tail_keys is None or self.tail_values is None:
            return None
        return self.tail_keys[:used], self.tail_values[:used]

    def take_over(self, keys: mx.array, values: mx.array, token_count: int) -> None:
        """Become the first tokens of `[1, heads, capacity, dim]`. Whole segments are seen where they lie; another
        cache may go on in that memory, for MLX copies what is referred to before it writes."""
        whole = token_count // SEGMENT_TOKENS
        self.parts, self.tail_keys, self.tail_values = (), None, None
        if whole:
            run = Run.of(_cut(keys, whole), _cut(values, whole), (keys, values))
            self.parts = (Part(run, whole),)
        self.offset = whole * SEGMENT_TOKENS
        if rest := token_count - self.offset:
            at = slice(self.offset, self.offset + rest)
            self.append(keys[:, :, at], values[:, :, at])

    def fork(self, empty: SharedKVCache) -> None:
        """Make an empty cache equal to this one. The tail's whole segments become a run of both."""
        self._close_segments()
        empty.parts, empty.offset = self.parts, self.offset
        if self.tail_keys is not None and self.tail_values is not None:
            # other array objects: what is assigned into one shows in all that refer to the very object
            empty.tail_keys, empty.tail_values = mx.array(self.tail_keys), mx.array(self.tail_values)

    def adopt(self, source: SharedKVCache) -> None:
        """Refer to the source's runs, as far as the segments have the same bits from the first on. What is behind them
        is copied, so that the memory in which it lay is freed."""
        source._close_segments()
        self._close_segments()
        if not self.parts:
            return
        keys = mx.concatenate([part.keys for part in self.parts])
        values = mx.concatenate([part.values for part in self.parts])
        parts, taken = [], 0
        for part in source.parts:
            behind = keys[taken : taken + part.segments], values[taken : taken + part.segments]
            alike = min(map(_count_alike, (part.keys, part.values), behind))
            parts += [Part(part.run, alike)] if alike else []
            taken += alike
            if alike < part.segments:
                break
        if taken:
            keys, values = copied(keys[taken:]), copied(values[taken:])
            rest = [Part(Run.of(keys, values, (keys, values)), keys.shape[0])] if keys.shape[0] else []
            self.parts = (*parts, *rest)

    def _close_segments(self) -> None:
        whole, rest = divmod(self.tail_tokens, SEGMENT_TOKENS)
        if not whole or self.tail_keys is None or self.tail_values is None:
            return
        keys, values = self.tail_keys, self.tail_values
        run = Run.of(keys[:whole], values[:whole], (keys, values))
        self.parts += (Part(run, whole),)
        self.tail_keys = copied(keys[whole : whole + 1]) if rest else None
        self.tail_values = copied(values[whole : whole + 1]) if rest else None
        mx.eval(self.tail())

    def truncate(self, token_count: int) -> None:
        """Drop all behind the first tokens. Rows without a token become zero: a failed call may have left NaN there."""
        if token_count >= self.offset:
            return
        parts, left = [], token_count // SEGMENT_TOKENS
        for part in self.parts:
            if left < part.segments:
                at = slice(left, left + 1)
                self.tail_keys, self.tail_values = part.run.keys[at], part.run.values[at]
                parts += [Part(part.run, left)] if left else []
                break
            parts.append(part)
            left -= part.segments
        self.parts, self.offset = tuple(parts), token_count
        rows = self.tail_tokens
        self.tail_keys, self.tail_values = _zero_behind(self.tail_keys, rows), _zero_behind(self.tail_values, rows)

    def trim(self, count: int) -> int:
        """Drop the last tokens; gives how many there were to drop."""
        count = min(count, self.offset)
        self.truncate(self.offset - count)
        return count

    def kept(self) -> Callable[[], None]:
        """A function that puts the cache back to what it is now, where it lies now."""
        parts, offset = self.parts, self.offset
        tails = [None if tail is None else mx.array(tail) for tail in (self.tail_keys, self.tail_values)]

        def put_back() -> None:
            self.parts, self.offset = parts, offset
            self.tail_keys, self.tail_values = [None if tail is None else mx.array(tail) for tail in tails]

        return put_back

    def is_trimmable(self) -> bool:
        return True

    def make_mask(self, count: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of a model call for so many tokens, as mlx-lm's plain cache makes it."""
        return create_attention_mask(count, self.offset, return_array, window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def tail(self) -> list[mx.array]:
        """The arrays of the tail, which a model call changes."""
        return [array for array in (self.tail_keys, self.tail_values) if array is not None]

    @property
    def state(self) -> list[mx.array]:
        return self.tail()

    @property
    def nbytes(self) -> int:
        """The memory of the tail, and of all that the runs keep."""
        runs = {id(part.run): part.run.held_bytes for part in self.parts}
        return sum(int(array.nbytes) for array in self.tail()) + sum(runs.values())


def _appended(tail: mx.array | None, held: int, rows: mx.array) -> mx.array:
    """A tail of `held` tokens with rows `[1, heads, tokens, dim]` behind them. One row is written in place."""
    _, heads, count, dim = rows.shape
    at, row = divmod(held, SEGMENT_TOKENS)
    if count == 1:
        if tail is None or at == tail.shape[0]:
            more = mx.zeros((1 + at // _GROWTH, heads, SEGMENT_TOKENS, dim), dtype=rows.dtype)
            tail = more if tail is None else mx.concatenate([tail, more])
        tail[at : at + 1, :, row : row + 1] = rows
        return tail
    if tail is not None and row:
        rows = mx.concatenate([tail[at : at + 1, :, :row], rows], axis=2)
    segments = -(-rows.shape[2] // SEGMENT_TOKENS)
    room = mx.zeros((1, heads, segments * SEGMENT_TOKENS - rows.shape[2], dim), dtype=rows.dtype)
    behind = _cut(mx.concatenate([rows, room], axis=2), segments)
    return mx.contiguous(mx.concatenate([tail[:at], behind]) if tail is not None and at else behind)


def _count_alike(one: mx.array, other: mx.array) -> int:
    """How many segments have the same bits, from the first on."""
    count = min(one.shape[0], other.shape[0])
    if not count:
        return 0
    bits = {2: mx.uint16, 4: mx.uint32}[one.itemsize]
    differ = (one[:count].view(bits) != other[:count].view(bits)).any(axis=(1, 2, 3))
    return int(np.argmax(np.append(np.array(differ), True)))


def _cut(rows: mx.array, segments: int) -> mx.array:
    """The first whole segments of `[1, heads, tokens, dim]` as `[segments, heads, 64, dim]`, not copied."""
    _, heads, _, dim = rows.shape
    first = rows[0, :, : segments * SEGMENT_TOKENS]
    return first.reshape(heads, segments, SEGMENT_TOKENS, dim).swapaxes(0, 1)


def _in_a_row(segments: Sequence[mx.array], token_count: int) -> mx.array:
    """Segments `[segments, heads, 64, dim]` as `[1, heads, tokens, dim]`."""
    rows = [each.swapaxes(0, 1).reshape(1, each.shape[1], -1, each.shape[3]) for each in segments]
    return mx.concatenate(rows, axis=2)[:, :, :token_count]


def _zero_behind(tail: mx.array | None, rows: int) -> mx.array | None:
    if tail is None or not rows:
        return None
    segments = -(-rows // SEGMENT_TOKENS)
    at = mx.arange(segments * SEGMENT_TOKENS).reshape(segments, 1, SEGMENT_TOKENS, 1)
    return mx.where(at < rows, tail[:segments], mx.zeros((), dtype=tail.dtype))
