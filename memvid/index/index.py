"""The index: from a session's URI and version to its bundle, from a block to the packs that have it, and facts for
listings.

Derived, and never asked whether something may be removed. It lies in memory, in SQLite. STORE/index.sqlite is a copy of
it, written whole now and then and at the end, with a digest at its end. An opening believes the copy if the digest is
right, brings it in line with the names in the store's folder, and reads what the copy lacks. So it may be missing, of
another moment, or another store's: each row says what a file of immutable content holds, by the file's name.

Two rules for the copy:
- What is going to be deleted leaves it before its file goes: the copy is removed, durably. Else an opening would take
  the version for one whose manifest is missing. The name of an empty file, STORE/deletes.<count>, counts these
  removals, and each copy's digest covers that count: so one of an earlier moment that is put back is not believed.
- A row whose manifest is missing stays. No pack is removed while there is one.
"""
# ruff: noqa: S608 - every statement is put together from constants of this module

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import sqlite3
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

from blake3 import blake3

from ..answers import Lossy, VersionInfo
from ..disk import durable
from ..disk.paths import FILE_MODE, Closing, list_names, read_small
from ..errors import IndexFailed, StoreClosed, StoreError, StoreIoError
from ..folder.folder import StoreFolder
from ..format.manifest import Manifest
from ..format.records import VersionKey
from ..limits import MAX_INDEX_BYTES, MAX_VERSION
from ..uri import SessionUri

INDEX_FILE: Final = "index.sqlite"
COUNT_NAME: Final = re.compile(r"deletes\.[0-9]{1,15}", re.ASCII)
WRITTEN_BYTES: Final = "written_bytes"
"""The entry of a manifest's environment that tells the bytes of the pack that was written with it."""
_TAIL_MAGIC: Final = b"TORPIDX2"
_TAIL_BYTES: Final = len(_TAIL_MAGIC) + 32
_FEWEST_CHANGES: Final = 16
_SHARE_CHANGED: Final = 50
"""The file is written after 16 changes, or once one row in so many has changed: so each change costs few bytes."""
_WRITTEN_DAYS: Final = 400
_ASKED_AT_ONCE: Final = 500
_NEAR: Final = 200
_KEY: Final = struct.Struct(">q")
_COLUMNS: Final = (
    "namespace, name, version, bundle_id, parent, identity_digest, token_count, bundle_bytes, logical_bytes, "
    "created_ns, model, labels, unread_tokens, lossy_bits, lossy_tokens, unnamed, used_ns"
)
_EXCLUDED: Final = ", ".join(f"excluded.{column}" for column in _COLUMNS.split(", "))
_ANY_NUMBER: Final = (1 << 63) - 1
_FAILURES: Final = (sqlite3.Error, UnicodeError, OverflowError, MemoryError, ValueError, TypeError)

_SCHEMA: Final = """
CREATE TABLE versions (
    number INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    bundle_id BLOB NOT NULL UNIQUE, parent BLOB, identity_digest BLOB NOT NULL, token_count INTEGER NOT NULL,
    bundle_bytes INTEGER NOT NULL, logical_bytes INTEGER NOT NULL, created_ns INTEGER NOT NULL, model TEXT NOT NULL,
    labels TEXT NOT NULL, unread_tokens INTEGER NOT NULL, lossy_bits INTEGER, lossy_tokens INTEGER,
    unnamed INTEGER NOT NULL, used_ns INTEGER NOT NULL) STRICT;
CREATE INDEX by_session ON versions (namespace, name, version);
CREATE TABLE packs (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size_bytes INTEGER NOT NULL) STRICT;
CREATE TABLE blocks (
    block INTEGER NOT NULL, pack INTEGER NOT NULL, stripped INTEGER NOT NULL, PRIMARY KEY (block, pack)
) WITHOUT ROWID, STRICT;
CREATE INDEX by_pack ON blocks (pack);
CREATE TABLE written (day INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack as the index knows it: its name, the bytes of its file, and the ids of its blocks; `stripped` are those of
    which it has a header alone."""

    name: str
    size_bytes: int
    blocks: tuple[bytes, ...]
    stripped: tuple[bytes, ...] = ()


def row_of(manifest: Manifest, bundle_id: str, manifest_bytes: int) -> VersionInfo:
    """The row of a version. manifest_bytes: the size of its manifest's file."""
    return VersionInfo(
        session=str(manifest.uri),
        version=manifest.version,
        bundle_id=bundle_id,
        parent=manifest.parent,
        identity=manifest.identity.digest.hex(),
        token_count=manifest.token_count,
        unread_tokens=manifest.unread_tokens,
        bundle_bytes=manifest_bytes + _written_with(manifest),
        logical_bytes=manifest.logical_bytes,
        created_ns=manifest.created_ns,
        model=manifest.model,
        labels=manifest.labels,
        lossy=manifest.lossy,
        unnamed=manifest.unnamed,
        used_ns=0,
    )


def _written_with(manifest: Manifest) -> int:
    text = manifest.environment.get(WRITTEN_BYTES, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0


class Index(Closing):
    """The index of one open store, in memory. Safe from several threads."""

    def __init__(self, path: str) -> None:
        self.path = f"{path}/{INDEX_FILE}"
        self._lock = threading.RLock()
        try:
            self._connection = _empty()
        except _FAILURES as error:
            raise _failed(self.path, str(error)) from error
        self._changes = 0
        self._in_file = _ANY_NUMBER  # rows with numbers up to this may stand in the file
        self._has_file = True  # or it was removed by hand, which may not be on the disk yet
        self._closed = False

    @classmethod
    def load(cls, folder: StoreFolder) -> tuple[Index, str | None]:
        """The index as its file tells it; an empty one, and why, where the file cannot be used. Raises UnsafePath."""
        index = cls(folder.path)
        try:
            data = read_small(folder.root_fd, INDEX_FILE, MAX_INDEX_BYTES, index.path)
        except FileNotFoundError:
            return index, "it is missing"
        except StoreIoError as error:
            return index, error.message
        index._changes = 1  # what cannot be used is written anew, though nothing else should change
        body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
        if tail != _tail_of(body, folder):
            return index, "it is damaged, or another store's"
        try:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.deserialize(body)
            if _schema_of(connection) != _schema_of(index._connection):
                return index, "it has another schema"
            ((fault,),) = connection.execute("PRAGMA quick_check(1)")  # also of types: the schema is only a text
            if fault != "ok":
                return index, f"it is damaged ({fault})"
            (index._in_file,) = connection.execute("SELECT ifnull(max(number), 0) FROM versions").fetchone()
        except _FAILURES as error:
            return index, f"it cannot be used ({error})"
        index._connection.close()
        index._connection, index._changes = connection, 0
        return index, None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._connection.close()

    # --- the file

    def save(self, folder: StoreFolder, *, always: bool = False) -> None:
        """Write the copy, if enough has changed since the last time. Not flushed: a torn one is not believed. A disk
        that does not take it is no failure of what was done."""
        with self._lock, contextlib.suppress(StoreError), self._translated():
            if self._changes < (1 if always else _FEWEST_CHANGES):
                return
            if always or self._changes >= int(self.select("SELECT count(*) FROM versions", ())[0][0]) // _SHARE_CHANGED:
                body = self._connection.serialize()
                if len(body) + _TAIL_BYTES > MAX_INDEX_BYTES:
                    return
                last = int(self.select("SELECT ifnull(max(number), 0) FROM versions", ())[0][0])
                self._has_file, self._in_file = True, max(self._in_file, last)
                data = body + _tail_of(body, folder)
                durable.write_unflushed(folder.root_fd, INDEX_FILE, data, folder.path)
                self._changes = 0

    def forget_in_file(self, folder: StoreFolder, bundle_ids: Iterable[str]) -> None:
        """Before these versions are deleted: the copy does not tell of them any more, durably. Needs no room. Raises
        StoreIoError, DurabilityLost."""
        with self._lock:
            if not self._has_file:
                return
            numbers = [
                int(number)
                for bundle_id in bundle_ids
                for (number,) in self.select("SELECT number FROM versions WHERE bundle_id = ?", (_blob(bundle_id),))
            ]
            if numbers and min(numbers) > self._in_file:
                return
            self.remove_file(folder)

    def remove_file(self, folder: StoreFolder, *, erasing: bool = False) -> None:
        """Remove the copy, durably. erasing: leave no byte of what was dropped in memory either, from which the next
        copy is written. Raises StoreIoError, DurabilityLost."""
        with self._lock:
            if erasing:
                with self._translated():
                    self._connection.execute("VACUUM")
            try:
                os.unlink(INDEX_FILE, dir_fd=folder.root_fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise durable.write_error(error, "remove", self.path) from error
            _count_removal(folder)
            durable.sync_folder(folder.root_fd, folder.path)
            self._has_file, self._in_file = False, 0
            self._changes += _FEWEST_CHANGES

    # --- changes

    def add(self, row: VersionInfo) -> None:
        """Enter a version, or replace what is said of it."""
        self.add_all([row])

    def add_all(self, rows: Iterable[VersionInfo]) -> None:
        marks = ", ".join("?" * len(_COLUMNS.split(", ")))
        with self._transaction():
            for row in rows:
                self._connection.execute(  # it keeps its number: by that `forget_in_file` knows what the file tells
                    f"INSERT INTO versions ({_COLUMNS}) VALUES ({marks}) ON CONFLICT (bundle_id) DO UPDATE SET "
                    f"({_COLUMNS}) = ({_EXCLUDED})",
                    _columns_of(row),
                )
                self._changes += 1

    def drop(self, bundle_ids: Iterable[str]) -> None:
        """Let versions go."""
        with self._transaction():
            for bundle_id in bundle_ids:
                self._connection.execute("DELETE FROM versions WHERE bundle_id = ?", (_blob(bundle_id),))
                self._changes += 1

    def add_pack(self, pack: PackRow) -> None:
        """Enter a pack, or replace what is said of it."""
        with self._transaction():
            _drop_pack(self._connection, pack.name)
            cursor = self._connection.execute(
                "INSERT INTO packs (name, size_bytes) VALUES (?, ?)", (pack.name, pack.size_bytes)
            )
            lines = [(block_key(block), cursor.lastrowid, 0) for block in pack.blocks]
            lines += [(block_key(block), cursor.lastrowid, 1) for block in pack.stripped]
            self._connection.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)", lines)
            self._changes += 1

    def drop_packs(self, names: Iterable[str]) -> None:
        """Let packs go."""
        with self._transaction():
            for name in names:
                _drop_pack(self._connection, name)
                self._changes += 1

    def add_written(self, day: int, size_bytes: int) -> None:
        """Count bytes written on a day (from 1970)."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO written VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET size_bytes = size_bytes + ?",
                (day, size_bytes, size_bytes),
            )
            self._connection.execute("DELETE FROM written WHERE day < ?", (day - _WRITTEN_DAYS,))
            self._changes = max(self._changes, 1)

    def note_use(self, bundle_id: str, at_ns: int) -> None:
        """A version is used, and no new one tells of it. A clock that is behind takes no later use back."""
        with self._transaction():
            values = at_ns, _blob(bundle_id)
            self._connection.execute("UPDATE versions SET used_ns = max(used_ns, ?) WHERE bundle_id = ?", values)
            self._changes = max(self._changes, 1)

    # --- blocks and packs

    def packs_of(self, block_id: bytes, *, stripped: bool = False) -> list[str]:
        """The packs that may have a block, the newest first: the caller proves it in the pack. stripped: also those
        with its header alone, behind the others."""
        return list(self.packs_with([block_id], stripped=stripped))

    def packs_with(self, block_ids: Collection[bytes], *, stripped: bool = False) -> dict[str, list[bytes]]:
        """The packs that may have all of some of these blocks, or (stripped) their headers at least, the newest first
        and behind them those with headers alone, each with these of its blocks."""
        by_key: dict[int, list[bytes]] = {}
        for block_id in block_ids:
            by_key.setdefault(block_key(block_id), []).append(block_id)
        keys, packs = list(by_key), dict[str, list[bytes]]()
        for at in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[at : at + _ASKED_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self.select(
                f"SELECT name, block FROM blocks JOIN packs ON pack = number WHERE block IN ({marks}) "
                "AND stripped <= ? ORDER BY stripped, number DESC",
                (*some, int(stripped)),
            )
            for name, key in rows:
                packs.setdefault(name, []).extend(by_key[key])
        return packs

    def pack_sizes(self) -> dict[str, int]:
        """The bytes of each pack's file, by name."""
        return {str(name): int(size) for name, size in self.select("SELECT name, size_bytes FROM packs", ())}

    # --- versions

    def bundle_ids(self, beginning: str = "") -> set[str]:
        """The versions, or those whose ids begin with these hex digits."""
        where = " WHERE bundle_id BETWEEN ? AND ?" if beginning else ""
        ends = tuple(_blob(beginning.ljust(64, digit)) for digit in "0f") if beginning else ()
        return {one.hex() for (one,) in self.select(f"SELECT bundle_id FROM versions{where}", ends)}

    def knows(self, bundle_id: str) -> bool:
        return bool(self.select("SELECT 1 FROM versions WHERE bundle_id = ?", (_blob(bundle_id),)))

    def find(self, uri: SessionUri, version: VersionKey | None = None) -> VersionInfo | None:
        """A version of a session, the latest if none is named; None if there is none. By a number that two have, as a
        file that is put back after the index was lost can make them, the younger one."""
        where = "namespace = ? AND name = ?"
        values: tuple[Any, ...] = (uri.namespace, uri.name)
        if isinstance(version, str):
            rows = self.rows(f"WHERE {where} AND bundle_id = ?", (*values, _blob(version)))
        elif version is not None:
            if not 1 <= version <= MAX_VERSION:
                return None  # nor does SQLite take every number
            rows = self.rows(
                f"WHERE {where} AND version = ? ORDER BY created_ns DESC, bundle_id DESC LIMIT 1", (*values, version)
            )
        else:
            rows = self.rows(f"WHERE {where} ORDER BY version DESC, created_ns DESC, bundle_id DESC LIMIT 1", values)
        return rows[0] if rows else None

    def versions(self, uri: SessionUri) -> list[VersionInfo]:
        """All versions of a session, oldest first."""
        return self.rows(
            "WHERE namespace = ? AND name = ? ORDER BY version, created_ns, bundle_id", (uri.namespace, uri.name)
        )

    def iter_listed(self, namespace: str | None, page_rows: int) -> Iterator[list[tuple[VersionInfo, int]]]:
        """The latest version of each session of a namespace, or of all, with the bytes that all its versions wrote, in
        the order of their URIs: page by page, each fetched when it is asked for.

        A session that comes or goes meanwhile is seen or not; no other one is missed or told twice.
        """
        asked = f"{_COLUMNS}, max(version), sum(bundle_bytes)"  # with max(), the columns of its row
        for page in self._pages(asked, namespace, page_rows):
            yield [(_row_in(columns[:-2], self.path), int(columns[-1])) for columns in page]

    def iter_uris(self, page_rows: int) -> Iterator[list[SessionUri]]:
        """All sessions, in order, in pages: as `iter_listed`, and much less work than their rows."""
        for page in self._pages("namespace, name", None, page_rows):
            yield [SessionUri(namespace, name) for namespace, name in page]

    def _pages(self, columns: str, namespace: str | None, page_rows: int) -> Iterator[list[tuple[Any, ...]]]:
        """These columns of each session, page by page. The first two are its namespace and name."""
        within, values = ("", ()) if namespace is None else ("namespace = ? AND ", (namespace,))
        after: tuple[Any, ...] = ("", "")
        while True:
            page = self.select(
                f"SELECT {columns} FROM versions WHERE {within}(namespace, name) > (?, ?) "
                "GROUP BY namespace, name ORDER BY namespace, name LIMIT ?",
                (*values, *after, page_rows),
            )
            yield page
            if len(page) < page_rows:
                return
            after = page[-1][:2]

    def near(self, uri: SessionUri) -> list[SessionUri]:
        """Sessions of its namespace whose names stand beside this one in the order of names, some hundred: for
        suggestions."""
        names: list[tuple[str]] = []
        for side, order in (("<", "DESC"), (">=", "ASC")):
            names += self.select(
                f"SELECT DISTINCT name FROM versions WHERE namespace = ? AND name {side} ? "
                f"ORDER BY name {order} LIMIT {_NEAR}",
                (uri.namespace, uri.name),
            )
        return [SessionUri(uri.namespace, name) for (name,) in names]

    def all_rows(self) -> list[VersionInfo]:
        """All versions, by session, oldest first."""
        return self.rows("ORDER BY namespace, name, version, created_ns, bundle_id", ())

    def rows_of(self, bundle_ids: Iterable[str]) -> dict[str, VersionInfo]:
        """The rows of those of the bundles that are versions."""
        rows: dict[str, VersionInfo] = {}
        ids = list(map(_blob, bundle_ids))
        for at in range(0, len(ids), _ASKED_AT_ONCE):
            some = ids[at : at + _ASKED_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows.update((row.bundle_id, row) for row in self.rows(f"WHERE bundle_id IN ({marks})", tuple(some)))
        return rows

    def written(self) -> dict[int, int]:
        """The bytes that were written, by day (from 1970), as far as the index's file was not lost since."""
        return {int(day): int(size_bytes) for day, size_bytes in self.select("SELECT day, size_bytes FROM written", ())}

    # --- SQLite

    def rows(self, tail: str, values: tuple[Any, ...]) -> list[VersionInfo]:
        """The versions that the end of a statement means."""
        rows = self.select(f"SELECT {_COLUMNS} FROM versions {tail}", values)
        return [_row_in(columns, self.path) for columns in rows]

    def select(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What a statement finds that only reads: for modules of this folder."""
        with self._lock, self._translated():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, MemoryError) as error:
            if self._closed:
                raise StoreClosed(f"The store with {self.path} was closed.", path=self.path) from error
            raise _failed(self.path, str(error)) from error


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(_SCHEMA)
    return connection


def _tail_of(body: bytes, folder: StoreFolder) -> bytes:
    """The end of the copy: a digest over it, the store's uuid and the count of removals, so that another store's is not
    believed, nor one that still tells of what was deleted since."""
    of = f"{folder.uuid} {_removals(folder)}"
    return _TAIL_MAGIC + blake3(body).update(of.encode()).digest()


def _removals(folder: StoreFolder) -> int:
    """How often the copy was removed for a delete. Raises StoreIoError."""
    names = filter(COUNT_NAME.fullmatch, list_names(folder.root_fd, folder.path))
    return max((int(name.rpartition(".")[2]) for name in names), default=0)


def _count_removal(folder: StoreFolder) -> None:
    """Count one more, where the disk takes it: without the count only a copy of an earlier moment is believed too
    long."""
    count = _removals(folder)
    old, new = f"deletes.{count}", f"deletes.{count + 1}"
    with contextlib.suppress(OSError):
        try:
            os.rename(old, new, src_dir_fd=folder.root_fd, dst_dir_fd=folder.root_fd)
        except FileNotFoundError:
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder.root_fd))


def _schema_of(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def _drop_pack(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM blocks WHERE pack IN (SELECT number FROM packs WHERE name = ?)", (name,))
    connection.execute("DELETE FROM packs WHERE name = ?", (name,))


def block_key(block_id: bytes) -> int:
    """The first 8 bytes of a block's id, as the index keeps it."""
    (key,) = _KEY.unpack_from(block_id)
    return int(key)


_blob: Final = bytes.fromhex
"""A digest as the database has it."""


def _columns_of(row: VersionInfo) -> tuple[Any, ...]:
    uri, lossy = row.uri, (row.lossy.bits, row.lossy.tokens) if row.lossy else (None, None)
    parent = None if row.parent is None else _blob(row.parent)
    return (
        uri.namespace, uri.name, row.version, _blob(row.bundle_id), parent, _blob(row.identity), row.block_tokens,
        row.bundle_bytes, row.logical_bytes, row.created_ns, row.model, json.dumps(row.labels), row.unread_tokens,
        *lossy, int(row.unnamed), row.used_ns,
    )  # fmt: skip


def _row_in(columns: tuple[Any, ...], path: str) -> VersionInfo:
    """A row that was read (_COLUMNS), as a value. Written out, for a listing does it for every session."""
    namespace, name, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created = columns[:10]
    model, labels, unread, bits, lossy_tokens, unnamed, used = columns[10:]
    try:
        if not all(type(number) in (int, NoneType) for number in (bits, lossy_tokens)):
            raise TypeError("a number is none")
        if not len(bundle_id) == len(identity) == 32 or (parent is not None and len(parent) != 32):
            raise TypeError("an id has the wrong form")
        own, of, before = bytes(bundle_id).hex(), bytes(identity).hex(), None if parent is None else bytes(parent).hex()
        names = () if labels == "[]" else _labels(labels)
        lossy = None if bits is None or lossy_tokens is None else Lossy(bits, lossy_tokens)
        session = str(SessionUri(namespace, name))
        return VersionInfo(
            session, version, own, before, of, tokens + unread, unread, file_bytes, raw_bytes, created, model, names,
            lossy, bool(unnamed), used,
        )  # fmt: skip
    except (StoreError, TypeError, ValueError, RecursionError) as error:
        raise _failed(path, f"it holds a row that is not valid: {error}") from error


@functools.lru_cache(maxsize=256)
def _labels(encoded: str) -> tuple[str, ...]:
    return tuple(str(label) for label in json.loads(encoded))


def _failed(path: str, why: str) -> IndexFailed:
    return IndexFailed(
        f"The index {path} failed: {why}. Stop the daemon and remove that file: it is made anew from the manifests.",
        path=path,
        reason=why,
        errno=errno.EIO,
    )
