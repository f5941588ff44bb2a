"""A model's caches as one: their length, their cut, their memory.

Knows no single kind (`kinds.py`), and not how states are stored (`layout.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from .errors import InconsistentState
from .kind import Undo
from .kinds import kind_of, leaves
from .layout import CacheLayout

Rows = list[dict[str, mx.array]]


def length(caches: Sequence[Any]) -> int | None:
    """Tokens that the caches hold; None if no cache in use counts them.

    Raises:
        UnsupportedCache: a cache is of a kind without adapter.
        InconsistentState: caches hold different numbers of tokens.
    """
    lengths = set()
    for _, cache in leaves(caches):
        kind = kind_of(cache)
        if not kind.is_empty(cache) and (offset := kind.offset(cache)) is not None:
            lengths.add(offset)
    if len(lengths) > 1:
        raise InconsistentState(f"Caches hold different numbers of tokens: {sorted(lengths)}.", lengths=sorted(lengths))
    return lengths.pop() if lengths else None


def is_empty(caches: Sequence[Any]) -> bool:
    """Whether nothing has ever been read into the caches."""
    return all(kind_of(cache).is_empty(cache) for _, cache in leaves(caches))


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that the caches hold: what must be evaluated after a model call."""
    found: list[mx.array] = []
    for _, cache in leaves(caches):
        kind = kind_of(cache)
        found += [] if kind.is_empty(cache) else kind.arrays(cache)
    return found


def make_room(caches: Sequence[Any], count: int) -> None:
    """Before a model call that reads that many tokens: the caches then grow by no more than the layout says."""
    for _, cache in leaves(caches):
        kind_of(cache).make_room(cache, count)


def resident_bytes(caches: Sequence[Any]) -> int:
    """Memory that the caches' arrays take, padding behind the tokens included."""
    return sum(int(cache.nbytes) for _, cache in leaves(caches) if not kind_of(cache).is_empty(cache))


def growth_of(caches: Sequence[Any], layout: CacheLayout, at_once: int) -> Callable[[int], int]:
    """A function of a number of tokens: the memory that the caches need at most beyond the present, to read and hold so
    many; none for rows that exist. It holds none of the caches. at_once: tokens of one model call, at most."""
    held = []
    for entry, (_, cache) in zip(layout.entries, leaves(caches), strict=True):
        kind = kind_of(cache)
        spans = {} if kind.is_empty(cache) else kind.spans(cache)
        rows = min((each.shape[-2] for each in spans.values()), default=0) if kind.by_token else 0
        held.append((entry, 0 if kind.is_empty(cache) else int(cache.nbytes), rows))

    def growth(token_count: int) -> int:
        beyond = (
            0 if rows >= token_count else max(0, entry.most_bytes(token_count, at_once) - size)
            for entry, size, rows in held
        )
        return sum(beyond)

    return growth


def can_truncate(caches: Sequence[Any], token_count: int) -> bool:
    """Whether `truncate` leaves exactly what the caches held after their first `token_count` tokens."""
    return all(
        kind.is_empty(cache) or kind.can_truncate(cache, token_count)
        for _, cache in leaves(caches)
        for kind in (kind_of(cache),)
    )


def truncate(caches: Sequence[Any], token_count: int) -> None:
    """Drop all that was appended after the first `token_count` tokens, cache by cache. Raises InconsistentState: a
    cache cannot go back that far; none has been touched."""
    if not can_truncate(caches, token_count):
        raise InconsistentState(
            f"The caches cannot go back to token {token_count}: a window or a recurrence has gone past it.",
            token_count=token_count,
        )
    for _, cache in leaves(caches):
        kind = kind_of(cache)
        if not kind.is_empty(cache):
            kind.truncate(cache, token_count)


def keep(caches: Sequence[Any], *, one_token: bool = False) -> Undo:
    """Remember the caches' content. The result restores it, after any number of tokens. It also mends a model call that
    failed half-way, when only some layers had grown. It holds on only to arrays that the next tokens overwrite.

    one_token: at most one token will be read in between, which is far cheaper for windows.
    """
    return putting_back(kind_of(cache).keep(cache, one_token=one_token) for _, cache in leaves(caches))


def putting_back(kept: Iterable[tuple[Undo, list[mx.array]]]) -> Undo:
    """One way back for what was kept of each layer: how to put it back, and the arrays that this needs."""
    undos, needed = [], []
    for undo, arrays in kept:
        undos.append(undo)
        needed += arrays
    mx.eval(needed)

    def put_back() -> None:
        for undo in undos:
            undo()

    return put_back


def last_rows(caches: Sequence[Any]) -> Rows:
    """The last token's row of each span array, evaluated, as arrays of their own."""
    rows = [
        {} if kind.is_empty(cache) else kind.last_row(cache)
        for _, cache in leaves(caches)
        for kind in (kind_of(cache),)
    ]
    mx.eval(rows)
    return rows


def put_last_rows(caches: Sequence[Any], rows: Rows) -> None:
    """Put back the rows from `last_rows` as those of the last token."""
    for (_, cache), kept in zip(leaves(caches), rows, strict=True):
        if kept:
            kind_of(cache).put_last_row(cache, kept)
    mx.eval(arrays_of(caches))


@contextlib.contextmanager
def without_last(caches: Sequence[Any], token_count: int) -> Iterator[None]:
    """For the block, the caches as they were before the last of their `token_count` tokens; afterwards as they are, bit
    for bit: a token read alone may differ from one read in a chunk. Raises InconsistentState: they cannot go back."""
    rows, put_back = last_rows(caches), keep(caches)
    truncate(caches, token_count - 1)
    try:
        yield
    finally:
        put_back()
        put_last_rows(caches, rows)
