"""The index: from a session's URI and version to its bundle, and facts for listings. A derived SQLite table.

Owns the schema, and what makes an index missing, foreign or damaged. Nothing here is truth: every row can be made
again from a bundle, and a wake compares the row with the bundle before it believes either.

How it works: a store that may write keeps STORE/index.sqlite in WAL mode. A store that may only read copies what the
file holds into memory, so it writes nothing, not even the -wal and -shm files that a reader would leave.
synchronous=NORMAL is enough: a row lost in a power cut is found missing at the next open and made from its bundle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from .durable import sync_folder, write_error
from .errors import NoSpace, StoreError, StoreIoError
from .limits import MAX_INDEX_BYTES
from .manifest import Manifest
from .paths import require_own_regular, stat_name
from .records import IndexRow
from .uri import SessionUri

INDEX_FILE: Final = "index.sqlite"
SCHEMA_VERSION: Final = 2
LIVE: Final = "live"
UNREADABLE: Final = "unreadable"
SHADOWED: Final = "shadowed"

_SIDE_FILES: Final = ("", "-wal", "-shm", "-journal")
_APPLICATION_ID: Final = 0x54505249  # "TPRI"
_CHECKPOINT_PAGES: Final = 64
_SCHEMA: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE bundles (
    bundle_id BLOB PRIMARY KEY, status TEXT NOT NULL, namespace TEXT, name TEXT, version INTEGER, parent BLOB,
    identity_digest BLOB, token_count INTEGER, bundle_bytes INTEGER, logical_bytes INTEGER, created_ns INTEGER,
    model TEXT, labels TEXT
) WITHOUT ROWID;
CREATE UNIQUE INDEX one_live_version ON bundles (namespace, name, version) WHERE status = '{LIVE}';
CREATE INDEX by_name ON bundles (name, status);
CREATE INDEX by_status ON bundles (status) WHERE status <> '{LIVE}';
CREATE TABLE refs (bundle_id BLOB NOT NULL, refers_to BLOB NOT NULL, PRIMARY KEY (bundle_id, refers_to)) WITHOUT ROWID;
CREATE INDEX referrers ON refs (refers_to);
"""
_COLUMNS: Final = (
    "namespace, name, version, bundle_id, parent, identity_digest, token_count, bundle_bytes, logical_bytes, "
    "created_ns, model, labels"
)


class IndexUnusable(Exception):
    """The index cannot be believed; the message says why. Never leaves memvid: the store builds a new one."""


@dataclass(frozen=True, slots=True)
class IndexedBundle:
    """What goes into the index for one bundle file; `row` is None for a bundle whose manifest cannot be read."""

    bundle_id: bytes
    status: str
    row: IndexRow | None
    refs: tuple[bytes, ...]


def row_of(manifest: Manifest, bundle_id: bytes, bundle_bytes: int) -> IndexRow:
    """The row that a bundle deserves."""
    return IndexRow(
        uri=manifest.uri,
        version=manifest.version,
        bundle_id=bundle_id,
        parent=manifest.parent,
        identity_digest=manifest.identity.digest,
        token_count=manifest.token_count,
        bundle_bytes=bundle_bytes,
        logical_bytes=manifest.logical_bytes,
        created_ns=manifest.created_ns,
        model=manifest.model,
        labels=manifest.labels,
    )


class Index:
    """An open index. Safe from several threads: one statement or transaction at a time."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self.path = path

    # --- opening and making

    @classmethod
    def open(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """Open the index file for writing. Raises IndexUnusable if it is missing, foreign or damaged, UnsafePath."""
        path = _require_index_file(store_path, root_fd)
        connection = _connect(path)
        try:
            _require_ours(connection, store_uuid)
            _configure(connection)
        except sqlite3.Error as error:
            connection.close()
            raise IndexUnusable(f"it is damaged ({error})") from error
        except IndexUnusable:
            connection.close()
            raise
        return cls(connection, path)

    @classmethod
    def copy_to_memory(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """A private copy of the index file as it is, for a store that may not write. Raises as `open` does."""
        path = _require_index_file(store_path, root_fd)
        if stat_name(root_fd, INDEX_FILE, path).st_size > MAX_INDEX_BYTES:
            raise IndexUnusable(f"it has more than {MAX_INDEX_BYTES} bytes")
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            # immutable: rows still in a live daemon's -wal are not seen; the store finds them by their bundles
            source = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
            with contextlib.closing(source):
                _require_schema(source)
                source.backup(memory)
            _require_ours(memory, store_uuid)
        except sqlite3.Error as error:
            memory.close()
            raise IndexUnusable(f"it is damaged ({error})") from error
        except IndexUnusable:
            memory.close()
            raise
        return cls(memory, path)

    @classmethod
    def create(cls, store_path: str, root_fd: int, store_uuid: str, bundles: Iterable[IndexedBundle]) -> Index:
        """Make the index file anew. One transaction: a crash leaves a file that is not ours, so it is made again."""
        path = f"{store_path}/{INDEX_FILE}"
        try:
            for suffix in _SIDE_FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(INDEX_FILE + suffix, dir_fd=root_fd)
            sync_folder(root_fd, store_path)  # the rows of what is deleted from now on must not come back
            os.close(os.open(INDEX_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root_fd))
        except OSError as error:
            raise write_error(error, "create", path) from error
        with _translated(path):
            connection = _connect(path)
            try:
                _configure(connection)
                index = cls._filled(connection, path, store_uuid, bundles)
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # so that read-only stores find the schema
                return index
            except BaseException:
                connection.close()
                raise

    @classmethod
    def create_in_memory(cls, store_path: str, store_uuid: str, bundles: Iterable[IndexedBundle]) -> Index:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        return cls._filled(connection, f"{store_path}/{INDEX_FILE}", store_uuid, bundles)

    @classmethod
    def _filled(
        cls, connection: sqlite3.Connection, path: str, store_uuid: str, bundles: Iterable[IndexedBundle]
    ) -> Index:
        index = cls(connection, path)
        with index._transaction():
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for bundle in bundles:
                index._insert(bundle)
            connection.execute("INSERT INTO meta VALUES ('store_uuid', ?)", (store_uuid,))
        return index

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # --- writing

    def add(self, bundle: IndexedBundle) -> None:
        """Add one bundle's row and references. Raises NoSpace, StoreIoError; nothing is added then."""
        with self._transaction():
            self._insert(bundle)

    def reconcile(self, added: Iterable[IndexedBundle], dropped: Iterable[bytes]) -> None:
        """Bring the index in line with the bundle files. Raises IndexUnusable where rows contradict each other."""
        try:
            with self._lock:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    for bundle_id in dropped:
                        self._delete(bundle_id)
                    for bundle in added:
                        self._insert(bundle)
                    self._connection.execute("COMMIT")
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # as in `drop`
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            raise IndexUnusable(f"it contradicts the bundles ({error})") from error

    def drop(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably remove rows and references of these bundles, all or none."""
        with self._transaction():
            for bundle_id in bundle_ids:
                self._delete(bundle_id)
        self._settle()

    def _settle(self) -> None:
        """Bring what was committed into the file itself, flushed: a power cut must not bring a dropped row back, and
        read-only stores must not see it."""
        with self._lock, _translated(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _insert(self, bundle: IndexedBundle) -> None:
        row = bundle.row
        values: tuple[Any, ...] = (bundle.bundle_id, bundle.status, *(None,) * 11)
        if row is not None:
            values = (
                bundle.bundle_id, bundle.status, row.uri.namespace, row.uri.name, row.version, row.parent,
                row.identity_digest, row.token_count, row.bundle_bytes, row.logical_bytes, row.created_ns, row.model,
                json.dumps(row.labels),
            )  # fmt: skip
        self._connection.execute(f"INSERT INTO bundles VALUES ({', '.join('?' * 13)})", values)  # noqa: S608
        self._connection.executemany(
            "INSERT INTO refs VALUES (?, ?)", [(bundle.bundle_id, other) for other in bundle.refs]
        )

    def _delete(self, bundle_id: bytes) -> None:
        self._connection.execute("DELETE FROM bundles WHERE bundle_id = ?", (bundle_id,))
        self._connection.execute("DELETE FROM refs WHERE bundle_id = ?", (bundle_id,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    # --- asking

    def find(self, uri: SessionUri, version: int | None = None) -> IndexRow | None:
        """A version of a session, the latest if none is named; None if there is none."""
        where = "status = ? AND namespace = ? AND name = ?"
        values: tuple[Any, ...] = (LIVE, uri.namespace, uri.name)
        if version is not None:
            where, values = where + " AND version = ?", (*values, version)
        rows = self._rows(f"WHERE {where} ORDER BY version DESC LIMIT 1", values)
        return rows[0] if rows else None

    def versions(self, uri: SessionUri) -> list[IndexRow]:
        """All versions of a session, oldest first."""
        return self._rows(
            "WHERE status = ? AND namespace = ? AND name = ? ORDER BY version", (LIVE, uri.namespace, uri.name)
        )

    def latest(self) -> list[IndexRow]:
        """The latest version of each session, in the order of their URIs."""
        return self._rows(
            "AS row WHERE status = ? AND version = (SELECT max(version) FROM bundles AS other WHERE other.status = ? "
            "AND other.namespace = row.namespace AND other.name = row.name) ORDER BY namespace, name",
            (LIVE, LIVE),
        )

    def find_by_name(self, name: str) -> list[SessionUri]:
        """The sessions of this name in any namespace, in the order of their URIs. By an index: lists nothing else."""
        found = self._select(
            "SELECT DISTINCT namespace FROM bundles WHERE name = ? AND status = ? ORDER BY namespace", (name, LIVE)
        )
        return [SessionUri(namespace, name) for (namespace,) in found]

    def all_rows(self) -> list[IndexRow]:
        return self._rows("WHERE status = ? ORDER BY namespace, name, version", (LIVE,))

    def bundle_ids(self) -> set[bytes]:
        """Every bundle that the index knows of, readable or not."""
        return {bytes(value) for (value,) in self._select("SELECT bundle_id FROM bundles", ())}

    def bundles_of(self, uri: SessionUri) -> list[bytes]:
        """Every bundle of a session whatever its status, oldest version first, a version's rivals before it."""
        found = self._select(
            "SELECT bundle_id FROM bundles WHERE namespace = ? AND name = ? ORDER BY version, status DESC, bundle_id",
            (uri.namespace, uri.name),
        )
        return [bytes(value) for (value,) in found]

    def knows(self, bundle_id: bytes) -> bool:
        return bool(self._select("SELECT 1 FROM bundles WHERE bundle_id = ?", (bundle_id,)))

    def refs_of(self, bundle_id: bytes) -> tuple[bytes, ...]:
        found = self._select("SELECT refers_to FROM refs WHERE bundle_id = ?", (bundle_id,))
        return tuple(bytes(value) for (value,) in found)

    def referenced(self, but_for: Iterable[bytes] = ()) -> set[bytes]:
        """Every bundle that another bundle's manifest names, the manifests `but_for` not counted."""
        if others := set(but_for):
            pairs = self._select("SELECT bundle_id, refers_to FROM refs", ())
            return {bytes(named) for user, named in pairs if bytes(user) not in others}
        return {bytes(value) for (value,) in self._select("SELECT DISTINCT refers_to FROM refs", ())}

    def with_status(self, status: str) -> list[bytes]:
        return [bytes(value) for (value,) in self._select("SELECT bundle_id FROM bundles WHERE status = ?", (status,))]

    def _rows(self, tail: str, values: tuple[Any, ...]) -> list[IndexRow]:
        return [_row(columns, self.path) for columns in self._select(f"SELECT {_COLUMNS} FROM bundles {tail}", values)]  # noqa: S608

    def _select(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock, _translated(self.path):
            return self._connection.execute(statement, values).fetchall()


def _row(columns: tuple[Any, ...], path: str) -> IndexRow:
    namespace, name, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created, model, labels = (
        columns
    )
    numbers = (version, tokens, file_bytes, raw_bytes, created)
    blobs = (bundle_id, identity, *(() if parent is None else (parent,)))
    try:
        if not all(isinstance(number, int) for number in numbers) or not isinstance(model, str):
            raise TypeError("a column has the wrong type")
        if not all(isinstance(blob, bytes) and len(blob) == 32 for blob in blobs):
            raise TypeError("an id has the wrong form")
        names = tuple(str(label) for label in json.loads(labels))
        uri = SessionUri(namespace, name)
    except (StoreError, TypeError, ValueError, RecursionError) as error:
        raise StoreIoError(
            f"{path} holds a row that is not valid: {error}. Stop the daemon and remove the file: it is made anew "
            "from the bundles.",
            path=path,
        ) from error
    return IndexRow(uri, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created, model, names)


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)


def _configure(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute("PRAGMA trusted_schema = OFF")


def _require_index_file(store_path: str, root_fd: int) -> str:
    """The index's path, once each of its files is known to be a regular file of our own: SQLite would follow a link."""
    path = f"{store_path}/{INDEX_FILE}"
    for suffix in _SIDE_FILES:
        try:
            status = stat_name(root_fd, INDEX_FILE + suffix, path + suffix)
        except FileNotFoundError as error:
            if not suffix:
                raise IndexUnusable("it is missing") from error
            continue
        require_own_regular(status, path + suffix)
    return path


def _require_ours(connection: sqlite3.Connection, store_uuid: str) -> None:
    if connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
        raise IndexUnusable("it is not an index of Torpor")
    if connection.execute("PRAGMA user_version").fetchone() != (SCHEMA_VERSION,):
        raise IndexUnusable("it has another schema version")
    _require_schema(connection)
    if connection.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone() != (store_uuid,):
        raise IndexUnusable("it belongs to another store")
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise IndexUnusable("it is damaged")


def _require_schema(connection: sqlite3.Connection) -> None:
    """Refuse other tables than ours before any of them is asked: a view in a table's place may compute for ever."""
    if _schema_of(connection) != _expected_schema():
        raise IndexUnusable("it has other tables than an index of Torpor")


def _schema_of(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return sorted(connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master LIMIT 64"))


@functools.cache
def _expected_schema() -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        return _schema_of(connection)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """SQLite's failures in the store's words."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpace(f"No room for the index {path}. Free some space and try again.", path=path) from error
        raise StoreIoError(
            f"The index {path} failed: {error}. Stop the daemon and remove the file: it is made anew from the bundles.",
            path=path,
            reason=str(error),
        ) from error
