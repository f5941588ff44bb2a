"""Kinds of cache that hold arrays of any shape, as a record: the next token may change all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .errors import UnsupportedCache
from .kind import Arrays, Kind, Record, RecordShape, Undo, set_all


class Recurrent(Kind):
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
        return lambda: set_all(cache, cache=list(held)), []

    def batches(self, cache: Any) -> bool:
        return all(array is not None for array in cache.cache)

    def keep_batch(self, batch: Any) -> tuple[Undo, list[mx.array]]:
        return self.keep(batch, one_token=True)

    def place(self, batch: Any, row: int, cache: Any) -> None:
        for into, array in zip(batch.cache, cache.cache, strict=True):
            into[row : row + 1] = array


_POOLED_FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class Pooled(Kind):
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
        return lambda: set_all(cache, offset=offset, **kept), []
