"""The caches of several states as one, in mlx-lm's batch caches: one model call decodes them all.

A state's caches come out with the same keys, values and arrays that went in, bit for bit; only their memory and the
room behind them may differ. A batch has the caches' form: one a layer, lists of caches included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import mlx.core as mx

from .caches import arrays_of, putting_back
from .kinds import kind_of, leaves

Batch = list[Any]

Rooms = Sequence[Sequence[int]]
"""For each layer of a state's caches, the rows of its arrays, with those behind its tokens. Without them mlx-lm gives
arrays back that end at their tokens, and grow in memory that was not reserved."""


def can_batch(caches: Sequence[Any]) -> bool:
    """Whether the caches can be rows of a batch: each has been filled, and is of a kind that mlx-lm batches."""
    return all(kind_of(cache).batches(cache) for _, cache in leaves(caches))


def merge(rows: list[list[Any]]) -> Batch:
    """One batch of the caches of several states, `rows[state][layer]`; the states let go of them layer by layer, so
    only one layer is there twice.

    Raises:
        MLX's error if there is no memory; the rows have their caches again, but None for those that could not be given
        back.
    """
    batch: Batch = []
    rooms = [rooms_of(caches) for caches in rows]
    try:
        for layer in range(len(rows[0])):
            merged = type(rows[0][layer]).merge([caches[layer] for caches in rows])
            mx.eval(_arrays(merged))
            for caches in rows:
                caches[layer] = None
            batch.append(merged)
    except BaseException:
        for caches, mine in zip(rows, take_apart(batch, range(len(rows)), rooms), strict=True):
            caches[: len(mine)] = mine
        raise
    return batch


def extend(batch: Batch, more: Batch) -> None:
    """Put the rows of another batch behind those of a batch, layer by layer. The other one has None for each moved
    layer, even if MLX raises on the way."""
    for layer, cache in enumerate(batch):
        cache.extend(more[layer])
        mx.eval(_arrays(cache))
        more[layer] = None


def take_apart(
    batch: Batch, rows: Sequence[int], rooms: Sequence[Rooms], more: Batch | None = None, more_rows: Sequence[int] = ()
) -> list[list[Any]]:
    """The caches of these rows, each in memory of its own, with the rooms that they had; the batch is let go of layer
    by layer, so only one layer is there twice.

    more, more_rows: another batch to be taken apart too; `extend` has put some of its layers behind this one's. rooms:
    of the states of both.
    """
    found: list[list[Any]] = [[] for _ in (*rows, *more_rows)]
    for layer in range(len(batch)):
        places = [(batch[layer], row) for row in rows]
        if more is not None:
            source = batch[layer] if more[layer] is None else more[layer]
            behind = _row_count(batch[layer]) - len(more_rows) if more[layer] is None else 0
            places += [(source, behind + row) for row in more_rows]
            del source
        parts = [_extracted(part, row, each[layer]) for (part, row), each in zip(places, rooms, strict=True)]
        mx.eval(arrays_of(parts))
        for mine, part in zip(found, parts, strict=True):
            mine.append(part)
        del places
        batch[layer] = None
        if more is not None:
            more[layer] = None
    return found


def has_places(like: Sequence[Any]) -> bool:
    """Whether another state can take over a row of a batch of such caches where it lies."""
    return all(kind_of(cache).has_places for _, cache in leaves(like))


def fits_place(batch: Batch, caches: Sequence[Any]) -> bool:
    """Whether `place` can give a row of the batch, which `has_places`, to a state's caches."""
    return all(
        kind_of(cache).fits_place(part, cache)
        for (_, part), (_, cache) in zip(leaves(batch), leaves(caches), strict=True)
    )


def place(batch: Batch, row: int, caches: list[Any]) -> None:
    """Write a state's caches over a free row of the batch; the other rows are not copied. The state lets go of them
    layer by layer.

    Raises:
        As `merge`; the row is still free.
    """
    rooms = rooms_of(caches)
    try:
        for layer, part in enumerate(batch):
            for (_, into), (_, cache) in zip(leaves([part]), leaves([caches[layer]]), strict=True):
                kind_of(cache).place(into, row, cache)
            mx.eval(_arrays(part))
            caches[layer] = None
    except BaseException:
        for layer, part in enumerate(batch):
            if caches[layer] is None:
                caches[layer] = _extracted(part, row, rooms[layer])
                mx.eval(arrays_of([caches[layer]]))
        raise


def extract(batch: Batch, row: int, rooms: Rooms | None = None) -> list[Any]:
    """The caches of one row, in memory of their own, with the rooms they had, evaluated; the batch still has the
    row."""
    of_layers = repeat(repeat(0)) if rooms is None else rooms
    caches = [_extracted(cache, row, room) for cache, room in zip(batch, of_layers, strict=False)]
    mx.eval(arrays_of(caches))
    return caches


def rooms_of(caches: Sequence[Any]) -> Rooms:
    """The rooms that `extract` and `take_apart` need for a state."""
    return [[kind_of(part).room(part) for _, part in leaves([cache])] for cache in caches]


def retain(batch: Batch, rows: Sequence[int]) -> None:
    """Drop all rows but these, layer by layer."""
    for cache in batch:
        cache.filter(mx.array(list(rows)))
        mx.eval(_arrays(cache))


def keep(batch: Batch, like: Sequence[Any]) -> Callable[[], None]:
    """Remember the batch's content. The result restores it, if no more than one token was read since. like: empty
    caches of the same model, which tell the kinds."""
    parts = zip(leaves(batch), leaves(like), strict=True)
    return putting_back(kind_of(cache).keep_batch(part) for (_, part), (_, cache) in parts)


def arrays(batch: Batch) -> list[mx.array]:
    """Every array of a batch: what must be evaluated after a model call."""
    return [array for cache in batch for array in _arrays(cache)]


def _arrays(cache: Any) -> list[mx.array]:
    found: list[mx.array] = []
    for _, part in leaves([cache]):
        held = part.cache if hasattr(part, "cache") else (part.keys, part.values, part.offset, part.left_padding)
        found += [array for array in held if array is not None]
    return found


def _extracted(cache: Any, row: int, rooms: Iterable[int]) -> Any:
    own = cache.extract(row)
    for (_, part), (_, mine), room in zip(leaves([cache]), leaves([own]), rooms, strict=False):
        kind_of(mine).own_row(mine, part, row, room)
    return own


def _row_count(cache: Any) -> int:
    return int(next(iter(_arrays(cache))).shape[0])
