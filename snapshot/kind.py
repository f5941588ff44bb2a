"""The interface of a kind of cache: all that a sleep and a wake need of a cache object. And the stored names of element
types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from .errors import UnsupportedCache
from .memory import SegmentSource, SpanSource, span_source

_DTYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8",
    mx.int8: "int8",
    mx.uint16: "uint16",
    mx.int16: "int16",
    mx.uint32: "uint32",
    mx.int32: "int32",
    mx.uint64: "uint64",
    mx.int64: "int64",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.float32: "float32",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

MOST_LATE_ROWS = 64
"""How many of the last tokens a recurrent cache may keep; models look back a handful."""

Undo = Callable[[], None]
Arrays = Mapping[str, mx.array]


def dtype_named(name: str) -> mx.Dtype:
    return _DTYPES[name]


def is_storable(dtype: str) -> bool:
    """Whether arrays of this stored type can be held in a cache."""
    return dtype in _DTYPES


def name_of_dtype(array: mx.array) -> str:
    """The stored name of an array's element type. Raises UnsupportedCache: it has none."""
    name = _DTYPE_NAMES.get(array.dtype)
    if name is None:
        raise UnsupportedCache(
            f"A cache holds {array.dtype}, which cannot be stored; the types that can are {', '.join(_DTYPES)}.",
            dtype=str(array.dtype),
        )
    return name


@dataclass(frozen=True, slots=True)
class Record:
    """The whole state of one cache at one position. arrays: by name, exactly the live part, in stored order."""

    numbers: tuple[int, ...]
    arrays: dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The head of a stored record, read before its arrays: numbers, and the shape of each array."""

    numbers: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]


class Kind:
    """The adapter of one class of cache. Every method takes a cache of exactly that class."""

    name: ClassVar[str]
    by_token: ClassVar[bool]
    """Whether its whole state is cut by token."""
    row_axes: ClassVar[tuple[int, ...]] = ()
    """The axes of its record's arrays that count rows, and so differ from position to position."""
    late_axes: ClassVar[tuple[int, ...]] = ()
    """The axes that may count rows: one element after one token may become `MOST_LATE_ROWS` later."""
    has_places: ClassVar[bool] = False
    """Whether another cache can take over a row of a batch of them where it lies."""
    late_arrays: ClassVar[bool] = False
    """Whether its record may have arrays that are missing after one token."""

    def is_empty(self, cache: Any) -> bool:
        """Whether it has never been filled; a model may have caches that it does not use."""
        return cache.keys is None

    def offset(self, cache: Any) -> int | None:
        """Tokens that it has read; None where it does not count them."""
        return int(cache.offset)

    def settings(self, cache: Any) -> dict[str, int]:
        """Its parameters, and the numbers that decide how its arrays are read."""
        return {}

    def spans(self, cache: Any) -> dict[str, mx.array]:
        """Its span arrays, padding behind the offset included, in stored order."""
        return {}

    def arrays(self, cache: Any) -> list[mx.array]:
        """What must be evaluated after a model call, of a cache that is not empty."""
        record = self.record(cache) if not self.by_token else None
        return [*self.spans(cache).values(), *(record.arrays.values() if record else ())]

    def shared(self, cache: Any) -> dict[int, int]:
        """The bytes of its memory that another cache may have, too, by the place of each piece. Evaluated."""
        return {}

    def own_bytes(self, cache: Any) -> int:
        """The rest of its memory."""
        return int(cache.nbytes)

    def sources(self, cache: Any) -> Sequence[SpanSource | SegmentSource]:
        """The memory of its span arrays, in stored order."""
        return [span_source(whole) for whole in self.spans(cache).values()]

    def capacity(self, token_count: int) -> int:
        """Rows of a span array made for that many tokens."""
        return token_count

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        """The most rows of its arrays after that many tokens, padding included, with at most `at_once` read in one
        call. A cache without rows: how many times the content after one token."""
        return 1

    def make_room(self, cache: Any, count: int) -> None:
        """Before a call with so many tokens: drop rows behind the tokens that are too few for them.

        mlx-lm does so, but not if the tokens end with a step. It then keeps those rows for good and adds as many as the
        call needs, so that an array may have more than `most_capacity`.
        """

    def record(self, cache: Any) -> Record | None:
        """Its whole state, None if all of it is in span arrays."""
        return None

    def most_rows(self, settings: Mapping[str, int]) -> int:
        """The most rows of its record's arrays, apart from those read at once."""
        return 1

    def number_count(self, settings: Mapping[str, int]) -> int:
        """The count of numbers in its record."""
        return 0

    def problem(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        """The fault of a stored record of a session of `position` tokens, found before memory is taken for it."""
        return None

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        """Fill an empty cache with the content of another."""
        raise NotImplementedError

    def reaches_back(self, settings: Mapping[str, int], numbers: Sequence[int]) -> bool:
        """Whether a record with these numbers still has every row of any earlier state."""
        return False

    def can_truncate(self, cache: Any, token_count: int) -> bool:
        """Whether `truncate` leaves exactly what the cache held after its first `token_count` tokens."""
        if self.by_token or token_count >= (self.offset(cache) or 0):
            return self.by_token or self.offset(cache) is not None
        record = self.record(cache)
        return record is not None and self.reaches_back(self.settings(cache), record.numbers)

    def truncate(self, cache: Any, token_count: int) -> None:
        """Drop all after the first `token_count` tokens, if `can_truncate`."""
        if token_count < cache.offset:
            cache.offset = token_count

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        """A function that restores the cache as it is now, and the arrays to evaluate before it goes on.

        one_token: no more than one token will be read before.
        """
        raise NotImplementedError

    def last_row(self, cache: Any) -> dict[str, mx.array]:
        """The last token's row of each span array, not evaluated, as arrays of their own."""
        at = slice((self.offset(cache) or 0) - 1, self.offset(cache))
        return {name: mx.contiguous(array[..., at, :]) for name, array in self.spans(cache).items()}

    def put_last_row(self, cache: Any, row: Arrays) -> None:
        """Put back the row from `last_row` as that of the last token."""
        spans, at = self.spans(cache), (self.offset(cache) or 0) - 1
        for name, each in row.items():
            spans[name][..., at : at + 1, :] = each

    def batches(self, cache: Any) -> bool:
        """Whether mlx-lm can decode the cache as a row of one batch with others of its kind, and give it back whole."""
        return False

    def keep_batch(self, batch: Any) -> tuple[Undo, list[mx.array]]:
        """As `keep` with `one_token`, for mlx-lm's batch of caches that it `batches`."""
        raise NotImplementedError

    def room(self, cache: Any) -> int:
        """Rows of its span arrays, those behind its tokens included, if a batch gives it back without these."""
        return 0

    def own_row(self, cache: Any, batch: Any, row: int, room: int) -> None:
        """Move a cache that mlx-lm extracted from that row of a batch into memory of its own, not evaluated, with at
        least `room` rows if it has rows behind its tokens. A mere slice would keep all rows of the batch alive."""
        if hasattr(cache, "cache"):
            cache.cache = [copied(array) for array in cache.cache]
        elif batch.keys.shape[2:] == cache.keys.shape[2:]:
            cache.keys, cache.values = copied(cache.keys), copied(cache.values)

    def fits_place(self, batch: Any, cache: Any) -> bool:
        """Whether the cache is no longer than the rows of the batch, if it `has_places`."""
        return True

    def place(self, batch: Any, row: int, cache: Any) -> None:
        """Give a row of the batch to a cache that fits; the row's old content is gone."""
        raise NotImplementedError


def copied(array: mx.array) -> mx.array:
    return mx.where(mx.array(True), array, array)


def with_room(array: mx.array, token_count: int, capacity: int) -> mx.array:
    """Copy the first rows of a span array into new memory with room for `capacity` rows."""
    room = mx.zeros((*array.shape[:-2], capacity, array.shape[-1]), dtype=array.dtype)
    room[..., :token_count, :] = array[..., :token_count, :]
    return room


def set_all(cache: Any, /, **attributes: Any) -> None:
    """Set attributes of a cache."""
    for name, value in attributes.items():
        setattr(cache, name, value)


def make_empty(cache: Any, **also: int) -> None:
    """Make a cache of keys and values as if it had never been filled. also: what else it then has."""
    set_all(cache, keys=None, values=None, offset=0, **also)
