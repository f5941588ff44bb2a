"""Changes to an index file, written as a short program of bytes; the same program fits an index of any schema.

A program is a list of steps, each a byte that says what and some bytes of arguments; what is missing counts as zero.
Steps on tables come first and work through SQLite, so that the file stays a sound database with wrong content; steps
on bytes then change pages and header as they lie.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from torpor.tests.memvid.fuzz.mutation import INTERESTING, TEXTS

STEPS: Final = 11
LIKELY: Final = ("namespace", "name", "version", "bundle_id", "token_count", "unread_tokens")
SCHEMA_CHANGES: Final = (
    "DROP INDEX by_session",
    "DROP TABLE blocks",
    "DROP TABLE packs",
    "DROP TABLE versions",
    "ALTER TABLE versions ADD COLUMN more TEXT",
    "ALTER TABLE versions RENAME TO sessions",
    "CREATE VIEW seen AS SELECT * FROM versions",
    "CREATE TRIGGER grow AFTER INSERT ON versions BEGIN DELETE FROM versions; END",
    "CREATE TRIGGER shrink AFTER DELETE ON versions BEGIN SELECT raise(FAIL, 'no'); END",
    "CREATE TABLE extra (a, b, c)",
    "DELETE FROM versions",
    "DELETE FROM packs",
    "DELETE FROM blocks",
    "UPDATE blocks SET stripped = 1 - stripped",
    "UPDATE blocks SET pack = pack % 3 + 1",
    "UPDATE packs SET size_bytes = 0",
)


class Reader:
    """Takes arguments off a program; zeros when it has ended."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        self._at += size
        return data + bytes(size - len(data))

    def number(self, size: int = 1) -> int:
        return int.from_bytes(self.take(size), "little")


def _steps(program: bytes) -> list[tuple[int, bytes]]:
    reader = Reader(program)
    steps: list[tuple[int, bytes]] = []
    while not reader.ended and len(steps) < 64:
        step = reader.number() % STEPS
        steps.append((step, reader.take(16 if step != 6 else 40)))
    return steps


def apply(image: bytes, program: bytes) -> bytes:
    """The body of an index file after a program was run on the one of `image`."""
    steps = _steps(program)
    tables = [(step, arguments) for step, arguments in steps if step < 5]
    if tables:
        image = _with_tables_changed(image, tables)
    return _with_bytes_changed(image, [(step, arguments) for step, arguments in steps if step >= 5])


def _with_tables_changed(image: bytes, steps: Sequence[tuple[int, bytes]]) -> bytes:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with contextlib.closing(connection):
        connection.deserialize(image)
        for step, arguments in steps:
            with contextlib.suppress(sqlite3.Error, OverflowError, IndexError, ValueError, UnicodeError):
                _table_step(connection, step, Reader(arguments))
        return connection.serialize()


def _table_step(connection: sqlite3.Connection, step: int, reader: Reader) -> None:
    if step == 4:
        connection.execute(SCHEMA_CHANGES[reader.number() % len(SCHEMA_CHANGES)])
        return
    names = sorted(name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
    table = (["versions"] * 3 + names)[reader.number() % (3 + len(names))]
    rows = (found := connection.execute(f"SELECT * FROM {table}")).fetchall()
    columns = [column for column, *_ in found.description]
    if not rows:
        return
    row = rows[reader.number() % len(rows)]
    at = reader.number()
    at = columns.index(LIKELY[at % len(LIKELY)]) if at >= 128 and LIKELY[0] in columns else at % len(columns)
    same = " AND ".join(f"{column} IS ?" for column in columns)
    if step == 3:
        connection.execute(f"DELETE FROM {table} WHERE {same}", row)
        return
    value = _value(reader, row[at], rows[reader.number() % len(rows)][at])
    if step == 2:
        changed = [*row[:at], value, *row[at + 1 :]]
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", changed)
        return
    connection.execute(f"UPDATE {table} SET {columns[at]} = ? WHERE {same}", (value, *row))


def _value(reader: Reader, now: Any, other: Any) -> Any:
    kind = reader.number() % 10
    if kind == 0:
        return None
    if kind == 1:
        return INTERESTING[reader.number() % len(INTERESTING)] - (1 << 63 if reader.number() % 4 == 3 else 0)
    if kind == 2:
        return TEXTS[reader.number() % len(TEXTS)]
    if kind == 3:
        return reader.take(reader.number() % 34)
    if kind == 4:
        return struct.unpack("<d", reader.take(8))[0]
    if kind == 5 and isinstance(now, int):
        return now + reader.number() % 5 - 2
    if kind == 6 and isinstance(now, bytes):
        flipped = bytearray(now)
        if flipped:
            flipped[reader.number() % len(flipped)] ^= 1 << reader.number() % 8
        return bytes(flipped)
    if kind == 7 and isinstance(now, str):
        return now[:-1] + chr(reader.number(2) % 0xD800)
    if kind == 8:
        return ("[" * 2000, '["a", 5, null]', "{}", '"', "[1e999]", str(now) * 3)[reader.number() % 6]
    return other


def _with_bytes_changed(image: bytes, steps: Sequence[tuple[int, bytes]]) -> bytes:
    data = bytearray(image)
    for step, arguments in steps:
        reader = Reader(arguments)
        at = reader.number(4) % len(data) if data else 0
        if step == 5:
            data[at : at + 1] = reader.take(1)
        elif step == 6:
            size = reader.number() % 33
            data[at : at + size] = reader.take(size)[: len(data) - at]
        elif step == 7:
            del data[at:]
        elif step == 8:
            page = at // 4096 * 4096
            data[page : page + 4096] = bytes(len(data[page : page + 4096]))
        elif step == 9:
            data[at % 100 : at % 100 + 4] = reader.take(4)[: len(data)]  # the file's header
        elif data:
            data[at] ^= 1 << reader.number() % 8
    return bytes(data)


def change(program: bytes, rng: Random) -> bytes:
    """Another program: a step more, a step less, other arguments."""
    choice = rng.randrange(6)
    buffer = bytearray(program)
    if choice < 3 or not buffer:
        step = rng.randrange(STEPS)
        arguments = rng.randbytes(rng.choice((4, 8, 16)))
        if rng.random() < 0.4:  # a value of a version's row: whose it is, which version, or any other
            step = rng.randrange(3)
            arguments = bytes(
                [0, rng.randrange(8), rng.randrange(256), rng.randrange(8), rng.choice((1, 5, 5, 6, 7, 9, 9))]
            )
            arguments += rng.randbytes(8)
        if step in (5, 6, 10):  # where there is something
            arguments = (rng.randrange(rng.choice((100, 4096, 1 << 16)))).to_bytes(4, "little") + arguments
        buffer += bytes([step]) + arguments.ljust(40 if step == 6 else 16, b"\x00")[: 40 if step == 6 else 16]
    elif choice == 3:
        at = rng.randrange(len(buffer))
        del buffer[at : at + 17]
    else:
        buffer[rng.randrange(len(buffer))] = rng.randrange(256)
    return bytes(buffer)
