"""Seals on what the index says: each row's own, over all its columns, references and blocks, and one over all rows.

Owns what is sealed and the check of a whole index. Knows nothing of what rows mean.

- A row of `bundles` carries `storage`, over its refs and blocks, and `seal`, over every column and `storage`: it is
  compared whenever the row is read.
- `meta` carries how many things are sealed and the xor of all seals, so that none is lost, hidden or added. The bytes
  written each day and the count of rewrites are sealed there too.
- SQLite's own check ties each table to its indexes, by which rows are found.

They tell what a damaged disk did. Who can write in the store's folder can seal what he
likes, as he can replace bundles.
"""

from __future__ import annotations

import itertools
import operator
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgpack
from blake3 import blake3

_SEAL_BYTES: Final = 16

Seals = tuple[int, int]
"""How many things are sealed, and the xor of their seals."""

NO_SEALS: Final[Seals] = (0, 0)

ALL_SEALS_KEY: Final = "seals"
FILE_KEY: Final = "file"
"""The keys of `meta` under which no sealed thing stands: the seals on all, and the file that the log goes with."""


class BrokenSeal(Exception):
    """The index does not say what was written into it; the message says where."""


def seal_of(values: tuple[Any, ...]) -> bytes:
    """The seal on a row's values, or on another thing that begins with its name."""
    return blake3(msgpack.packb(values)).digest(_SEAL_BYTES)


def storage_of(refs: Sequence[bytes], keys: Sequence[int]) -> bytes:
    """The seal on a row's references and the keys of its blocks, each sorted and without doubles."""
    return seal_of((refs, keys))


def with_seals(seals: Seals, added: Iterable[bytes], taken: Iterable[bytes] = ()) -> Seals:
    """The seals on everything once these have come and gone."""
    count, mixed = seals
    for seal in added:
        count, mixed = count + 1, mixed ^ int.from_bytes(seal, "big")
    for seal in taken:
        count, mixed = count - 1, mixed ^ int.from_bytes(seal, "big")
    return count, mixed


def encode_seals(seals: Seals) -> str:
    return f"{seals[0]}.{seals[1]:032x}"


def decode_seals(text: object) -> Seals:
    """Raises BrokenSeal."""
    try:
        count, mixed = str(text).split(".")
        seals = int(count), int(mixed, 16)
    except ValueError as error:
        raise BrokenSeal("the seal on all rows is not valid") from error
    if encode_seals(seals) != text:
        raise BrokenSeal("the seal on all rows is not valid")
    return seals


def require_sealed(connection: sqlite3.Connection, sealed_columns: str) -> None:
    """Check everything that an index says. 1.9 s for 100,000 versions.

    Raises:
        BrokenSeal, sqlite3.Error
    """
    if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        raise BrokenSeal("it is damaged")
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (ALL_SEALS_KEY,)).fetchone()
    expected = decode_seals(found[0] if found else None)
    try:
        seals = with_seals(NO_SEALS, itertools.chain(_rows(connection, sealed_columns), _others(connection)))
    except (TypeError, ValueError) as error:
        raise BrokenSeal(f"it holds a value of another type ({error})") from error
    if seals != expected:
        raise BrokenSeal("a row was lost, added or put back")


def _rows(connection: sqlite3.Connection, sealed_columns: str) -> Iterator[bytes]:
    refs = _Side(connection, "SELECT number, refers_to FROM refs ORDER BY number, refers_to")
    keys = _Side(connection, "SELECT number, block FROM blocks ORDER BY number, block")
    for number, seal, *values in connection.execute(
        f"SELECT number, seal, {sealed_columns} FROM bundles ORDER BY number"  # noqa: S608 - constants of `index`
    ):
        if values[-1] != storage_of(refs.take(number), keys.take(number)) or seal != seal_of(tuple(values)):
            raise BrokenSeal(f"row {number} is not what was written")
        yield seal
    if refs.left or keys.left:
        raise BrokenSeal("it has references or blocks of no row")


def _others(connection: sqlite3.Connection) -> Iterator[bytes]:
    for day, size_bytes in connection.execute("SELECT day, size_bytes FROM written"):
        yield seal_of(("written", day, size_bytes))
    unsealed = (ALL_SEALS_KEY, FILE_KEY)
    for key, value in connection.execute("SELECT key, value FROM meta WHERE key NOT IN (?, ?)", unsealed):
        yield seal_of(("meta", key, value))


class _Side:
    """A table of values that belong to rows, read along with these."""

    def __init__(self, connection: sqlite3.Connection, statement: str) -> None:
        self._groups = itertools.groupby(connection.execute(statement), operator.itemgetter(0))
        self._next = next(self._groups, None)

    def take(self, number: int) -> list[Any]:
        if self._next is None or self._next[0] != number:
            return []
        values = [value for _, value in self._next[1]]
        self._next = next(self._groups, None)
        return values

    @property
    def left(self) -> bool:
        return self._next is not None
