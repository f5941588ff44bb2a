"""Kinds of cache that hold the last tokens alone, as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from .kind import Arrays, Kind, Record, RecordShape, Undo, make_empty, set_all


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
        set_all(cache, **dict(zip(self.numbers, record.numbers, strict=True)))

    def problem(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        if list(stored.shapes) != ["k", "v"]:
            return "it does not hold keys and values"
        return self._problem_of_rows(settings, position, stored)

    def _live(self, cache: Any) -> int:
        raise NotImplementedError

    def _problem_of_rows(self, settings: Mapping[str, int], position: int, stored: RecordShape) -> str | None:
        raise NotImplementedError


class Rotating(_OfLastRows):
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
            return lambda: make_empty(cache, _idx=0), []
        offset, at, rows = int(cache.offset), int(cache._idx), cache.keys.shape[-2]
        if one_token and offset < rows:  # the token goes behind what is live
            return lambda: set_all(cache, offset=offset, _idx=at), []
        if one_token and rows == cache.max_size:
            return self._keep_row(cache, offset, at)
        keys, values = mx.array(cache.keys), mx.array(cache.values)
        return lambda: set_all(cache, keys=keys, values=values, offset=offset, _idx=at), []

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
            set_all(batch, _idx=at, _offset=offset, rotated=rotated, offset=offsets, left_padding=padding)

        if offset < batch.keys.shape[-2] or batch.keys.shape[-2] < batch.max_size:
            return undo_numbers, [offsets, padding]  # the token goes behind what is live
        row = 0 if at == batch.max_size else at
        where = slice(row, row + 1)
        key, value = mx.contiguous(batch.keys[..., where, :]), mx.contiguous(batch.values[..., where, :])

        def undo() -> None:
            batch.keys[..., where, :], batch.values[..., where, :] = key, value
            undo_numbers()

        return undo, [offsets, padding, key, value]


class Chunked(_OfLastRows):
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
            return lambda: make_empty(cache, start_position=0), []
        offset, begin = int(cache.offset), int(cache.start_position)
        live = offset - begin
        if one_token and live < cache.keys.shape[-2] and live <= cache.chunk_size:
            return lambda: set_all(cache, offset=offset), []
        keys, values = mx.array(cache.keys), mx.array(cache.values)
        return lambda: set_all(cache, keys=keys, values=values, offset=offset, start_position=begin), []
