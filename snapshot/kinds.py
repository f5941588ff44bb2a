"""The kinds of cache that can be slept and woken, each with its adapter: the one file that names mlx-lm's classes.

A stored kind is a short string of ours with a version ("kv/1"), never a class name. An adapter translates between a
cache object and its stored arrays, by the object's attributes, never by mlx-lm's state tuples: their shape changes
between releases. A cache of any other class is refused by name.

A cache holds two sorts of state. *Span arrays* `[1, …, capacity, dim]` have a row for each token: they are cut by
token, and the rows of a token never change once it has been read. A *record* is whole state at one position: numbers
and arrays that the next token may change all over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .errors import UnsupportedCache
from .kind import Arrays, Kind, Record, RecordShape, Undo
from .memory import SegmentSource, address_of, segment_source
from .runs import SharedKVCache


class _OfKeysAndValues(Kind):
    """Cut by token, in `keys` and `values` with an `offset`."""

    by_token = True
    step: ClassVar[int] = 1
    """The step in rows by which its arrays grow."""

    def spans(self, cache: Any) -> dict[str, mx.array]:
        return {"k": cache.keys, "v": cache.values}

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        cache.keys, cache.values, cache.offset = spans["k"], spans["v"], token_count

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        # they grow behind their last row by whole steps
        return token_count + self.step - 1

    def capacity(self, token_count: int) -> int:
        # mlx-lm grows them in steps, and so do we: the next token then needs no copy of the whole array.
        return -(-token_count // self.step) * self.step

    def make_room(self, cache: Any, count: int) -> None:
        if self.is_empty(cache):
            return
        spans, held = self.spans(cache), int(cache.offset)
        if held < spans["k"].shape[-2] < held + count:
            self.fill(cache, held, {name: array[..., :held, :] for name, array in spans.items()}, None)

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        if self.is_empty(cache):
            return lambda: _emptied(cache), []
        held = int(cache.offset)
        return lambda: _set(cache, offset=held), []  # also where it was cut since: the rows are there


class _Plain(_OfKeysAndValues):
    name = "kv/1"
    has_places = True
    step = KVCache.step

    def shared(self, cache: Any) -> dict[int, int]:
        return {address_of(array): int(array.nbytes) for array in (cache.keys, cache.values)}

    def own_bytes(self, cache: Any) -> int:
        return 0

    def batches(self, cache: Any) -> bool:
        return not self.is_empty(cache)

    def keep_batch(self, batch: Any) -> tuple[Undo, list[mx.array]]:
        at, offset = int(batch._idx), mx.array(batch.offset)
        return lambda: _set(batch, _idx=at, offset=offset), [offset]

    def room(self, cache: Any) -> int:
        return int(cache.keys.shape[-2])

    def own_row(self, cache: Any, batch: Any, row: int, room: int) -> None:
        end, held = int(batch._idx), int(cache.offset)
        if room <= held:
            super().own_row(cache, batch, row, room)
            return
        # read in place: an extract by mlx-lm would be copied twice
        mine = (array[row : row + 1, :, end - held : end, :] for array in (batch.keys, batch.values))
        cache.keys, cache.values = (with_room(array, held, room) for array in mine)

    def fits_place(self, batch: Any, cache: Any) -> bool:
        return int(cache.offset) <= int(batch._idx)

    def place(self, batch: Any, row: int, cache: Any) -> None:
        end, held = int(batch._idx), int(cache.offset)
        for into, array in ((batch.keys, cache.keys), (batch.values, cache.values)):
            into[row : row + 1, :, end - held : end, :] = array[..., :held, :]
        batch.left_padding[row], batch.offset[row] = end - held, held


def with_room(array: mx.array, token_count: int, capacity: int) -> mx.array:
    """Copy the first rows of a span array into new memory with room for `capacity` rows."""
    room = mx.zeros((*array.shape[:-2], capacity, array.shape[-1]), dtype=array.dtype)
    room[..., :token_count, :] = array[..., :token_count, :]
    return room


class _Shared(_OfKeysAndValues):
    """Keys and values that states share: the stored kind of a plain cache, held in another way. Its span arrays are
    copies, made when they are evaluated."""

    name = _Plain.name
    step = KVCache.step

    def is_empty(self, cache: Any) -> bool:
        return bool(cache.empty())

    def spans(self, cache: Any) -> dict[str, mx.array]:
        return dict(zip("kv", cache.gathered(), strict=True))

    def arrays(self, cache: Any) -> list[mx.array]:
        return list(cache.tail())  # the runs are evaluated

    def shared(self, cache: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for part in cache.parts:
            found |= part.run.memory
        return found

    def own_bytes(self, cache: Any) -> int:
        return sum(int(tail.nbytes) for tail in cache.tail())

    def sources(self, cache: Any) -> list[SegmentSource]:
        return [segment_source(each) for each in zip(*cache.segments(), strict=True)]

    def make_room(self, cache: Any, count: int) -> None:
        pass  # its tail grows by itself

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        cache.take_over(spans["k"], spans["v"], token_count)

    def truncate(self, cache: Any, token_count: int) -> None:
        cache.truncate(token_count)

    def last_row(self, cache: Any) -> dict[str, mx.array]:
        return {}  # `keep` restores the very rows

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        held = int(cache.offset)
        if one_token:
            return lambda: cache.truncate(held), []
        return cache.kept(), []


class _Concatenating(_OfKeysAndValues):
    """Arrays of exactly as many rows as tokens; its own `trim` forgets to cut them."""

    name = "kvcat/1"

    def truncate(self, cache: Any, token_count: int) -> None:
        if token_count < cache.keys.shape[-2]:
            cache.keys, cache.values = cache.keys[..., :token_count, :], cache.values[..., :token_count, :]
        cache.offset = min(cache.offset, token_count)

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        if self.is_empty(cache):
            return lambda: _emptied(cache), []
        held = {"keys": cache.keys, "values": cache.values, "offset": int(cache.offset)}
        return lambda: _set(cache, **held), []


_QUANTIZED_PARTS = ("", ".scales", ".biases")


class _Quantized(_OfKeysAndValues):
    name = "kvq/1"
    step = QuantizedKVCache.step

    def settings(self, cache: Any) -> dict[str, int]:
        return {"bits": int(cache.bits), "group_size": int(cache.group_size)}

    def spans(self, cache: Any) -> dict[str, mx.array]:
        named = (("k", cache.keys), ("v", cache.values))
        return {
            side + part: array for side, arrays in named for part, array in zip(_QUANTIZED_PARTS, arrays, strict=True)
        }

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        cache.keys = tuple(spans["k" + part] for part in _QUANTIZED_PARTS)
        cache.values = tuple(spans["v" + part] for part in _QUANTIZED_PARTS)
        cache.offset = token_count


class _OfLastRows(Kind):
    """Keys and values of the last tokens, in the rows `_live` of a buffer; two numbers locate them."""

    by_token = False
    row_axes = (2,)
    numbers: ClassVar[tuple[str, str]]
    """The attributes of a cache that locate them; the first tells its tokens."""

    def record(self, cache: Any) -> Record:
        live = self._live(cache)
        return Record(
            tuple(int(getattr(cache, each)) for each in self.numbers),
            {"k": cache.keys[..., :live, :], "v": cache.values[..., :live, :]},
        )

    def number_count(self, settings: Mapping[str, int]) -> int:
        return 2

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        assert record is not None
        cache.keys, cache.values = record.arrays["k"], record.arrays["v"]
        _set(cache, **dict(zip(self.numbers, record.numbers, strict=True)))

    def problem(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        if list(stored.shapes) != ["k", "v"]:
            return "it does not hold keys and values"
        return self._problem_of_rows(settings, position, stored)

    def _live(self, cache: Any) -> int:
        raise NotImplementedError

    def _problem_of_rows(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        raise NotImplementedError


class _Rotating(_OfLastRows):
    """A window over the last tokens; the first `keep` tokens stay. Rotation changes the order of rows, and attention
    sums in that order: so they are stored in it."""

    name = "ring/1"
    numbers = ("offset", "_idx")

    def settings(self, cache: Any) -> dict[str, int]:
        return {"max_size": int(cache.max_size), "keep": int(cache.keep)}

    def most_rows(self, settings: Mapping[str, int]) -> int:
        return settings["max_size"]

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        step: int = RotatingKVCache.step
        return min(token_count + step - 1, settings["max_size"] + at_once)

    def _live(self, cache: Any) -> int:
        return int(min(cache.offset, cache.keys.shape[-2]))  # behind it are rows without a token

    def _problem_of_rows(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        offset, at = stored.numbers
        rows = stored.shapes["k"][-2]
        if offset != position or stored.shapes["v"][-2] != rows:
            return "its tokens are not those of the session"
        unwrapped = rows == offset == at
        wrapped = settings["max_size"] <= rows < offset and settings["keep"] <= at <= rows
        return None if unwrapped or wrapped else "its rows are not those of a window"

    def reaches_back(self, settings: Mapping[str, int], numbers: Sequence[int]) -> bool:
        # MS3: once the window is full, rows of an earlier state are gone.
        return numbers[0] <= settings["max_size"]

    def truncate(self, cache: Any, token_count: int) -> None:
        if token_count < cache.offset:
            cache.keys, cache.values = cache.keys[..., :token_count, :], cache.values[..., :token_count, :]
            cache.offset = cache._idx = token_count

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        if self.is_empty(cache):
            return lambda: _emptied(cache, _idx=0), []
        offset, at, rows = int(cache.offset), int(cache._idx), cache.keys.shape[-2]
        if one_token and offset < rows:  # the token goes behind what is live
            return lambda: _set(cache, offset=offset, _idx=at), []
        if one_token and rows == cache.max_size:
            return self._keep_row(cache, offset, at)
        keys, values = mx.array(cache.keys), mx.array(cache.values)
        return lambda: _set(cache, keys=keys, values=values, offset=offset, _idx=at), []

    def _keep_row(self, cache: Any, offset: int, at: int) -> tuple[Undo, list[mx.array]]:
        """Only the row that the next token overwrites: a copy of the whole window would cost more than the token."""
        row = int(cache.keep) if at == cache.max_size else at
        where = slice(row, row + 1)
        key, value = mx.contiguous(cache.keys[..., where, :]), mx.contiguous(cache.values[..., where, :])

        def undo() -> None:
            cache.keys[..., where, :], cache.values[..., where, :] = key, value
            cache.offset, cache._idx = offset, at

        return undo, [key, value]

    def batches(self, cache: Any) -> bool:
        # mlx-lm's batch of windows cannot keep first tokens.
        return not self.is_empty(cache) and int(cache.keep) == 0

    def keep_batch(self, batch: Any) -> tuple[Undo, list[mx.array]]:
        at, offset, rotated = int(batch._idx), int(batch._offset), bool(batch.rotated)
        # `-=` changes an array in place, for every holder of it.
        offsets, padding = mx.array(batch.offset), mx.array(batch.left_padding)

        def undo_numbers() -> None:
            _set(batch, _idx=at, _offset=offset, rotated=rotated, offset=offsets, left_padding=padding)

        if offset < batch.keys.shape[-2] or batch.keys.shape[-2] < batch.max_size:
            return undo_numbers, [offsets, padding]  # the token goes behind what is live
        row = 0 if at == batch.max_size else at
        where = slice(row, row + 1)
        key, value = mx.contiguous(batch.keys[..., where, :]), mx.contiguous(batch.values[..., where, :])

        def undo() -> None:
            batch.keys[..., where, :], batch.values[..., where, :] = key, value
            undo_numbers()

        return undo, [offsets, padding, key, value]


class _Chunked(_OfLastRows):
    """The tokens of the current chunk, and up to one chunk of tokens before it."""

    name = "chunk/1"
    numbers = ("offset", "start_position")

    def settings(self, cache: Any) -> dict[str, int]:
        return {"chunk_size": int(cache.chunk_size)}

    def most_rows(self, settings: Mapping[str, int]) -> int:
        return settings["chunk_size"]

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        step: int = ChunkedKVCache.step
        return min(token_count, settings["chunk_size"] + at_once) + step - 1

    def make_room(self, cache: Any, count: int) -> None:
        live = 0 if self.is_empty(cache) else self._live(cache)
        if live and live < cache.keys.shape[-2] < live + count:
            cache.keys, cache.values = cache.keys[..., :live, :], cache.values[..., :live, :]

    def _live(self, cache: Any) -> int:
        return int(cache.offset) - int(cache.start_position)

    def _problem_of_rows(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        offset, begin = stored.numbers
        if offset != position or not 0 <= begin <= offset:
            return "its tokens are not those of the session"
        rows = {shape[-2] for shape in stored.shapes.values()}
        return None if rows == {offset - begin} else "its rows are not those of its tokens"

    def reaches_back(self, settings: Mapping[str, int], numbers: Sequence[int]) -> bool:
        # An earlier state may have had the rows dropped at the front.
        return numbers[1] == 0

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        if self.is_empty(cache):
            return lambda: _emptied(cache, start_position=0), []
        offset, begin = int(cache.offset), int(cache.start_position)
        live = offset - begin
        if one_token and live < cache.keys.shape[-2] and live <= cache.chunk_size:
            return lambda: _set(cache, offset=offset), []
        keys, values = mx.array(cache.keys), mx.array(cache.values)
        return lambda: _set(cache, keys=keys, values=values, offset=offset, start_position=begin), []


class _Recurrent(Kind):
    """Arrays of any shape; each token replaces them: the state of a recurrence, the last inputs of a convolution."""

    name = "arrays/1"
    has_places = True
    by_token = False
    # Some models keep the last few tokens in one.
    late_axes = (1, 2, 3)

    def is_empty(self, cache: Any) -> bool:
        return all(array is None for array in cache.cache)

    def offset(self, cache: Any) -> int | None:
        return None

    def settings(self, cache: Any) -> dict[str, int]:
        if cache.left_padding is not None or cache.lengths is not None:
            raise UnsupportedCache(
                "A recurrent cache is part of a batch, which cannot be slept; take the session out of it first.",
                cache_kind=type(cache).__name__,
            )
        return {"size": len(cache.cache)}

    def record(self, cache: Any) -> Record:
        held = {f"a{index}": array for index, array in enumerate(cache.cache) if array is not None}
        return Record(tuple(int(array is not None) for array in cache.cache), held)

    def number_count(self, settings: Mapping[str, int]) -> int:
        return settings["size"]

    def problem(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        if any(number not in (0, 1) for number in stored.numbers):
            return "it does not say which arrays it has"
        named = [f"a{index}" for index, there in enumerate(stored.numbers) if there]
        return None if named == list(stored.shapes) else "its arrays are not those that it says it has"

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        assert record is not None
        cache.cache = [record.arrays.get(f"a{index}") for index in range(len(record.numbers))]

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        held = [None if array is None else mx.array(array) for array in cache.cache]
        return lambda: _set(cache, cache=list(held)), []

    def batches(self, cache: Any) -> bool:
        return all(array is not None for array in cache.cache)

    def keep_batch(self, batch: Any) -> tuple[Undo, list[mx.array]]:
        return self.keep(batch, one_token=True)

    def place(self, batch: Any, row: int, cache: Any) -> None:
        for into, array in zip(batch.cache, cache.cache, strict=True):
            into[row : row + 1] = array


_POOLED_FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class _Pooled(Kind):
    """DeepSeek-V4.1's cache of one layer: a window of latents, one latent per closed group of tokens, and the rows of
    the open group."""

    name = "pooled/1"
    by_token = False
    late_arrays = True  # no group is closed after one token
    row_axes = (1,)

    def is_empty(self, cache: Any) -> bool:
        return all(getattr(cache, field) is None for field in _POOLED_FIELDS)

    def settings(self, cache: Any) -> dict[str, int]:
        return {"window_size": int(cache.window_size)}

    def most_rows(self, settings: Mapping[str, int]) -> int:
        return settings["window_size"]

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        # Beside the window there is a latent per closed group: at most one per token.
        return min(token_count, settings["window_size"]) + token_count

    def record(self, cache: Any) -> Record:
        held = {field: array for field in _POOLED_FIELDS if (array := getattr(cache, field)) is not None}
        return Record((int(cache.offset), *(int(field in held) for field in _POOLED_FIELDS)), held)

    def number_count(self, settings: Mapping[str, int]) -> int:
        return 1 + len(_POOLED_FIELDS)

    def problem(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        offset, *there = stored.numbers
        if offset != position:
            return "its tokens are not those of the session"
        named = [field for field, held in zip(_POOLED_FIELDS, there, strict=True) if held == 1]
        if named != list(stored.shapes) or any(held not in (0, 1) for held in there):
            return "its arrays are not those that it says it has"
        return None

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        assert record is not None
        for field in _POOLED_FIELDS:
            setattr(cache, field, record.arrays.get(field))
        cache.offset = record.numbers[0]

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        held = {field: array for field in _POOLED_FIELDS if (array := getattr(cache, field)) is not None}
        kept = {field: mx.array(held[field]) if field in held else None for field in _POOLED_FIELDS}
        offset = int(cache.offset)
        return lambda: _set(cache, offset=offset, **kept), []


def _set(cache: Any, /, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(cache, name, value)


def _emptied(cache: Any, **also: int) -> None:
    _set(cache, keys=None, values=None, offset=0, **also)


# Exactly these classes: a subclass may keep more state than we would save.
_KIND_OF_CLASS: dict[type, Kind] = {
    SharedKVCache: _Shared(),  # before the plain one, for which its name stands
    KVCache: _Plain(),
    ConcatenateKVCache: _Concatenating(),
    QuantizedKVCache: _Quantized(),
    RotatingKVCache: _Rotating(),
    ChunkedKVCache: _Chunked(),
    ArraysCache: _Recurrent(),
}
# Classes that a model defines: by name, so that only the module of a model in use is imported.
_KIND_OF_MODEL_CLASS: dict[str, Kind] = {"mlx_lm.models.deepseek_v41.LayerCache": _Pooled()}
_KINDS = {kind.name: kind for kind in (*_KIND_OF_CLASS.values(), *_KIND_OF_MODEL_CLASS.values())}


def kind_named(name: str) -> Kind:
    """The adapter of a stored kind. Raises UnsupportedCache: this version of Torpor has no such kind."""
    kind = _KINDS.get(name)
    if kind is None:
        raise UnsupportedCache(
            f"The snapshot holds a cache of kind {name!r}, which this version of Torpor does not know. Use the version "
            f"that wrote it; this one knows {', '.join(sorted(_KINDS))}.",
            cache_kind=name,
        )
    return kind


def kind_of(cache: Any) -> Kind:
    """The adapter of a cache. Raises UnsupportedCache: its class has none."""
    known = type(cache)
    kind = _KIND_OF_CLASS.get(known) or _KIND_OF_MODEL_CLASS.get(f"{known.__module__}.{known.__qualname__}")
    if kind is None:
        raise UnsupportedCache(
            f"Caches of kind {known.__name__} cannot be slept: there is no adapter for them, and this model keeps at "
            "least one layer in one. Use another model, or a version of Torpor that knows them.",
            cache_kind=known.__name__,
        )
    return kind


def leaves(caches: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache of a model with its path, lists of caches opened: `3`, or `3.1` for the second of a list."""
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            for path, leaf in leaves(cache.caches):
                yield f"{index}.{path}", leaf
        else:
            yield str(index), cache


def shareable(cache: Any) -> Any:
    """For an empty plain cache an empty one whose content forks can share; any other cache unchanged."""
    if type(cache) is CacheList:
        return CacheList(*(shareable(each) for each in cache.caches))
    return SharedKVCache() if type(cache) is KVCache else cache


def are_plain(caches: Sequence[Any]) -> bool:
    """Whether a state keeps all of its context in plain caches."""
    return bool(caches) and all(type(cache) is KVCache for cache in caches)


def is_shared(cache: Any) -> bool:
    """Whether forks share the content of a cache, which is no list."""
    return type(cache) is SharedKVCache


def holds_shared(caches: Sequence[Any]) -> bool:
    """Whether forks share the content of any of a model's caches."""
    return any(is_shared(cache) for _, cache in leaves(caches))


def quantized(cache: Any, *, bits: int, group_size: int) -> Any:
    """For an empty plain cache an empty one with quantized keys and values; any other cache unchanged."""
    if type(cache) is CacheList:
        return CacheList(*(quantized(each, bits=bits, group_size=group_size) for each in cache.caches))
    return QuantizedKVCache(group_size=group_size, bits=bits) if type(cache) is KVCache else cache
