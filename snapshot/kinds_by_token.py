"""Kinds of cache that are cut by token: all that they hold are span arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .kind import Arrays, Kind, Record, Undo, make_empty, set_all, with_room
from .memory import SegmentSource, address_of, segment_source


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
            return lambda: make_empty(cache), []
        held = int(cache.offset)
        return lambda: set_all(cache, offset=held), []  # also where it was cut since: the rows are there


class Plain(_OfKeysAndValues):
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
        return lambda: set_all(batch, _idx=at, offset=offset), [offset]

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


class Shared(_OfKeysAndValues):
    """Keys and values that states share: the stored kind of a plain cache, held in another way. Its span arrays are
    copies, made when they are evaluated."""

    name = Plain.name
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


class Concatenating(_OfKeysAndValues):
    """Arrays of exactly as many rows as tokens; its own `trim` forgets to cut them."""

    name = "kvcat/1"

    def truncate(self, cache: Any, token_count: int) -> None:
        if token_count < cache.keys.shape[-2]:
            cache.keys, cache.values = cache.keys[..., :token_count, :], cache.values[..., :token_count, :]
        cache.offset = min(cache.offset, token_count)

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        if self.is_empty(cache):
            return lambda: make_empty(cache), []
        held = {"keys": cache.keys, "values": cache.values, "offset": int(cache.offset)}
        return lambda: set_all(cache, **held), []


_QUANTIZED_PARTS = ("", ".scales", ".biases")


class Quantized(_OfKeysAndValues):
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
