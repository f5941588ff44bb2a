"""The index: from a session's URI and version to its bundle, who holds which block, and facts for listings.

A derived SQLite table. Owns the schema, and what makes an index missing, foreign or damaged. Nothing here is truth:
every row can be made again from a bundle, and a wake compares the row with the bundle before it believes either.

How it works: a store that may write keeps STORE/index.sqlite in WAL mode, and no other process opens it by SQLite.
SQLite is told so, and keeps its map of the log in its own memory. Else that would be a -shm file, which is mapped into
memory: a full disk has no room for it, and a page of it for which there is no block ends the process (SIGBUS). A store
that may only read copies what file and log hold into memory, so it writes nothing, not even a -wal file.
synchronous=NORMAL is enough: a row lost in a power cut is found missing at the next open and made from its bundle.
What must not be lost or come back (`drop`, `begin_rewrite`) is brought into the file itself and flushed.

What a row says of a bundle is of two kinds. What the bundle is (its owner, version, tokens) never changes, for the
bundle's id is over it. Where its bytes lie (`refs`, `blocks`, `bundle_bytes`) changes when its file is rewritten.
A removal believes `refs`, so they must at every moment cover what the file needs, before a rewrite and after:

- `begin_rewrite` makes them cover both and marks the bundle unsettled, durably, before the file is replaced.
- `finish_rewrite` says what the file holds now. Where it did not happen, the next open reads the file again.
- Each row has the stamp of the file that it was read from, or written with (inode, length, times). The next open reads
  again what is another file now: a backup was put back, or the store copied while it was written.
- STORE/rewrites.<count>, an empty file, has the number of rewrites begun in its name. An index that has counted fewer
  was put back from a backup: its refs may be those of files that are no more, and it is made anew.

Blocks are found by the first 8 bytes of their ids: a row of `blocks` takes 30 bytes instead of 150, and who asks
proves the answer in the file's own directory anyway.

A flipped bit must not hide a version, so an index is believed only if each page of its file is what was last written
(`page_sums`) and its log was written over that very file, or else, after a crash in a checkpoint or a change by
others, if every row is (`index_seals`). A row's
own seal is compared each time it is read; one that is broken makes the next opening check them all. Checkpoints are
made here and not by SQLite, for the sums must know of each.
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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final

from ..disk.durable import TempFile, rename, sync_folder, write_error
from ..disk.paths import Stamp, io_error, list_names, open_folder, require_own_regular, stamp_of, stat_name
from ..errors import CorruptBundle, IndexFailed, LimitExceeded, NoSpace, StoreError, StoreIoError
from ..folder.folder import BUNDLES
from ..format.bundle import BundleFile
from ..format.ledger_tail import unread_of
from ..format.lossy import Lossy, lossy_of
from ..format.manifest import Manifest
from ..format.records import IndexRow
from ..format.salvaged import Salvaged, salvaged_of
from ..limits import MAX_INDEX_BYTES, MAX_NAME_CHARS, MAX_VERSION
from ..uri import SessionUri
from .index_image import JOURNAL_MODES, WAL_SUFFIX, WITH_LOG, IndexImage, read_image
from .index_seals import (
    ALL_SEALS_KEY,
    FILE_KEY,
    NO_SEALS,
    BrokenSeal,
    decode_seals,
    encode_seals,
    require_sealed,
    seal_of,
    storage_of,
    with_seals,
)
from .page_sums import PAGE_BYTES, PageSums

INDEX_FILE: Final = "index.sqlite"
INDEX_FILES: Final = (INDEX_FILE, INDEX_FILE + WAL_SUFFIX, f"{INDEX_FILE}-shm")
SCHEMA_VERSION: Final = 8
LIVE: Final = "live"
UNREADABLE: Final = "unreadable"
"""A bundle whose file cannot be read, and that no row told of before. Whose version it is stands in its row where its
manifest, or a mark, still tells."""
SHADOWED: Final = "shadowed"
MISSED: Final = "missed"
"""A version that only its marks tell of: the index was made anew without its file, or was behind. Of its row only
owner, number and bundle are facts."""
ASIDE: Final = "aside"
"""A version that repair has set aside: no version at present, but its number is given to no other, and what it needs
stays, so that it can come back."""
_STATUSES: Final = ", ".join(f"'{status}'" for status in (LIVE, UNREADABLE, SHADOWED, MISSED, ASIDE))

_SIDE_FILES: Final = ("", WAL_SUFFIX, "-shm", "-journal")
_REFUSED: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
"""What SQLite says of a file that it cannot write, on a full disk for example: nothing of what is in the file."""
_APPLICATION_ID: Final = 0x54505249  # "TPRI"
_CHECKPOINT_BYTES: Final = 1000 * PAGE_BYTES
_CACHE_KIB: Final = 64 * 1024
_PAGE_ROWS: Final = 100
_ASKED_AT_ONCE: Final = 500
_NEAR: Final = 200
_COPY_TRIES: Final = 10
_WRITTEN_DAYS: Final = 400
_COUNT_NAME: Final = re.compile(r"rewrites\.([0-9]{1,15})", re.ASCII)
_MAX_COUNT: Final = 10**15 - 1
"""Rewrites that a name can count. No store comes near it: a thousand a second take thirty thousand years."""
_BLOCK_KEY: Final = struct.Struct(">q")
_STAMP: Final = struct.Struct(">QQqq")  # inode, length, modification and change time
_COVERED: Final = 1
_UNPROVEN: Final = 2
"""Of a row that is unsettled: its references cover what the file needs, or that is unknown."""
_UNSEEN_KEY: Final = "marks_unseen"
_UNSEEN: Final = "yes"
_META: Final = "SELECT value FROM meta WHERE key = ?"
_SCHEMA: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE bundles (
    number INTEGER PRIMARY KEY, status TEXT NOT NULL, unsettled INTEGER NOT NULL, namespace TEXT, name TEXT,
    version INTEGER, bundle_id BLOB NOT NULL UNIQUE, parent BLOB, identity_digest BLOB, token_count INTEGER,
    bundle_bytes INTEGER, logical_bytes INTEGER, created_ns INTEGER, model TEXT, labels TEXT,
    salvaged_tokens INTEGER, salvaged_of INTEGER, unread_tokens INTEGER, lossy_bits INTEGER, lossy_tokens INTEGER,
    stamp BLOB, storage BLOB NOT NULL,
    seal BLOB NOT NULL
);
CREATE UNIQUE INDEX one_live_version ON bundles (namespace, name, version) WHERE status = '{LIVE}';
CREATE INDEX by_name ON bundles (name, status);
CREATE INDEX by_status ON bundles (status) WHERE status <> '{LIVE}';
CREATE INDEX by_unsettled ON bundles (bundle_id) WHERE unsettled <> 0;
CREATE TABLE refs (number INTEGER NOT NULL, refers_to BLOB NOT NULL, PRIMARY KEY (number, refers_to)) WITHOUT ROWID;
CREATE INDEX referrers ON refs (refers_to);
CREATE TABLE blocks (block INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (block, number)) WITHOUT ROWID;
CREATE INDEX blocks_of ON blocks (number);
CREATE TABLE written (day INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL);
"""
_COLUMNS: Final = (
    "namespace, name, version, bundle_id, parent, identity_digest, token_count, bundle_bytes, logical_bytes, "
    "created_ns, model, labels, salvaged_tokens, salvaged_of, unread_tokens, lossy_bits, lossy_tokens"
)
_SEALED: Final = f"status, unsettled, {_COLUMNS}, stamp, storage"
_READ: Final = f"{_SEALED}, seal"
_INTEGERS: Final = ("version", "token_count", "bundle_bytes", "logical_bytes", "created_ns", "unread_tokens")
_INTEGERS_OR_NOTHING: Final = ("salvaged_tokens", "salvaged_of", "lossy_bits", "lossy_tokens")
_NO_ID: Final = "typeof({0}) <> 'blob' OR length({0}) <> 32"
_NO_NAME: Final = (
    f"typeof({{0}}) <> 'text' OR length({{0}}) NOT BETWEEN 1 AND {MAX_NAME_CHARS} "
    "OR {0} GLOB '*[^A-Za-z0-9._-]*' OR {0} GLOB '[._-]*'"
)
_NONSENSE: Final = (
    f"SELECT 1 FROM bundles WHERE {_NO_ID.format('bundle_id')} "
    f"OR status NOT IN ({_STATUSES}) OR (status <> '{UNREADABLE}' OR namespace IS NOT NULL) AND ("
    + " OR ".join(
        [
            *(f"typeof({column}) <> 'integer'" for column in _INTEGERS),
            *(f"typeof({column}) NOT IN ('integer', 'null')" for column in _INTEGERS_OR_NOTHING),
            *(_NO_NAME.format(column) for column in ("namespace", "name")),
            f"parent IS NOT NULL AND ({_NO_ID.format('parent')})",
            _NO_ID.format("identity_digest"),
            "typeof(model) <> 'text'",
            "typeof(labels) <> 'text' OR labels <> '[]' AND labels NOT GLOB '[[]\"*\"]'",
        ]
    )
    + ") LIMIT 1",
    f"SELECT 1 FROM refs WHERE {_NO_ID.format('refers_to')} LIMIT 1",
    f"SELECT 1 FROM bundles WHERE typeof(stamp) <> 'null' AND ({_NO_ID.format('stamp')}) LIMIT 1",
)
"""What no index of ours holds; what `_row` and `_id` refuse when they meet it, asked of all rows at once."""

_FAILURES: Final = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What reading a damaged file makes of SQLite and of Python's own part of it."""


class IndexUnusable(Exception):
    """The index cannot be believed; the message says why. Never leaves memvid: the store builds a new one."""


class IndexContradicted(IndexUnusable):
    """What a whole index says cannot be brought into agreement with the bundles."""


@dataclass(frozen=True, slots=True)
class IndexedBundle:
    """What goes into the index for one bundle file; `row` is None for one of unknown owner.

    `refs` are the other bundles that hold blocks of this one, `blocks` the ids of all frames in its file. Of the ids
    the index keeps the first 8 bytes, and `Index.stored` gives no more of them back. `stamp` tells the file that this
    was read from, or that was written so; None for no file, which the next opening then reads.
    """

    bundle_id: bytes
    status: str
    row: IndexRow | None
    refs: tuple[bytes, ...]
    blocks: tuple[bytes, ...]
    stamp: Stamp | None = field(default=None, compare=False)

    @property
    def storage(self) -> bytes:
        """A digest of its references and blocks, as far as an index keeps these."""
        return storage_of(sorted(set(self.refs)), sorted({_block_key(block) for block in self.blocks}))


def indexed(file: BundleFile) -> IndexedBundle:
    """What the index is told of a live bundle that can be read. The one place that knows where a file says it.

    Raises:
        CorruptBundle: the file only holds blocks for others, which no version does.
    """
    if file.manifest is None:
        raise CorruptBundle(
            f"{file.path} has the ending of a version, but no manifest.", path=file.path, part="manifest"
        )
    row = row_of(file.manifest, file.bundle_id, file.file_bytes)
    return IndexedBundle(file.bundle_id, LIVE, row, file.directory.holders, tuple(file.frames), file.stamp())


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
        salvaged=salvaged_of(manifest),
        unread_tokens=unread_of(manifest),
        lossy=lossy_of(manifest),
    )


class Index:
    """An open index. Safe from several threads: one statement or transaction at a time."""

    def __init__(self, connection: sqlite3.Connection, path: str, root_fd: int | None) -> None:
        """`root_fd` is the store's folder, borrowed; None for a private copy, whose rewrites are not counted."""
        self._connection = connection
        self._root_fd = root_fd
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._sums: PageSums | None = None
        self._entered: list[bytes] = []
        self._left: list[bytes] = []
        self.path = path
        self.not_in_file: set[bytes] = set()
        """In a private copy: the bundles whose rows were made from their files, for the index file has none of them."""
        self.read_at: tuple[Stamp | None, ...] = ()
        """In a private copy: the stamps of the index's files just before they were copied."""
        self.file_is_behind = False
        """Whether the file still has rows of what was dropped since, because it takes no change."""

    # --- opening and making

    @classmethod
    def open(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """Open the index file for writing. Raises IndexUnusable if it is missing, foreign, damaged or older than the
        last rewrite of a bundle; UnsafePath."""
        path = _require_index_file(store_path, root_fd)
        begun = _rewrites_begun(root_fd, store_path)
        sums = None if _has_journal(root_fd, path) else PageSums.stored(root_fd, store_path, INDEX_FILE)
        has_log = _has_log(root_fd, path)
        with _translated(path):
            connection = _connect(path)
        try:
            sums = _require_ours(connection, store_uuid, sums, has_log=has_log)
            if _count_of(connection) < begun:
                raise IndexUnusable("it is older than the last rewrite of a bundle")
            _configure(connection)
            if sums is None:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")  # a flipped bit may forbid writing
                connection.execute("ROLLBACK")
                sums = PageSums.taken(root_fd, store_path, INDEX_FILE)
        except _FAILURES as error:
            connection.close()
            refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED
            raise IndexUnusable(f"it {'takes no change now' if refused else 'is damaged'} ({error})") from error
        except IndexUnusable:
            connection.close()
            raise
        index = cls(connection, path, root_fd)
        index._sums = sums
        return index

    @classmethod
    def copy_to_memory(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """A private copy of what the index says now, for a store that may not write. Raises IndexUnusable if it is
        missing, foreign or damaged; UnsafePath.

        One that is older than the last rewrite will do: nothing is removed by it, and its rows name the same bundles.
        """
        path = _require_index_file(store_path, root_fd)
        read_at = _stamps(root_fd, path)
        image = _image(root_fd, store_path)
        sums = PageSums.of_data(root_fd, store_path, INDEX_FILE, image.file_data)
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            memory.deserialize(image.data)
            _require_ours(memory, store_uuid, sums, has_log=image.has_log)
        except _FAILURES as error:
            memory.close()
            raise IndexUnusable(f"it is damaged ({error})") from error
        except IndexUnusable:
            memory.close()
            raise
        index = cls(memory, path, None)
        index.read_at = read_at
        return index

    @classmethod
    def copy_before_replacing(cls, store_path: str, root_fd: int, store_uuid: str) -> tuple[Index, bool] | None:
        """A private copy of an index that is going to be replaced, and whether it has seen each rewrite of a bundle
        begin; None for one that is missing, foreign or damaged.

        Raises:
            UnsafePath
            StoreIoError: the system refused to read it, twice. Only a disk that has lost bytes of it is damage: of
                anything else its content is unknown, so it must not be replaced.
        """
        index = cls._copied(store_path, root_fd, store_uuid, tries=2)
        if index is None:
            return None
        try:
            begun = _rewrites_begun(root_fd, store_path)
        except BaseException:
            index.close()
            raise
        try:
            return index, _count_of(index._connection) >= begun
        except (*_FAILURES, IndexUnusable):
            return index, False

    @classmethod
    def _copied(cls, store_path: str, root_fd: int, store_uuid: str, tries: int) -> Index | None:
        try:
            return cls.copy_to_memory(store_path, root_fd, store_uuid)
        except IndexUnusable:
            return None
        except StoreIoError as error:
            if tries > 1:
                return cls._copied(store_path, root_fd, store_uuid, tries - 1)
            if error.details.get("errno") == errno.EIO:
                return None
            raise

    @classmethod
    def uuid_in(cls, root_fd: int, store_path: str) -> str | None:
        """The uuid of the store whose index lies in a folder; None where there is none that can be believed. Raises
        UnsafePath, StoreIoError."""
        try:
            _require_index_file(store_path, root_fd)
            image = _image(root_fd, store_path)
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
                memory.deserialize(image.data)
                _require_schema(memory)
                (said,) = memory.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone()
            found = str(uuid.UUID(said))
            cls.copy_to_memory(store_path, root_fd, found).close()
        except (*_FAILURES, IndexUnusable, ValueError, TypeError, AttributeError):
            return None
        return found

    @classmethod
    def create_in_memory(
        cls,
        store_path: str,
        store_uuid: str,
        bundles: Iterable[IndexedBundle],
        *,
        root_fd: int | None = None,
        unsettled: Iterable[bytes] = (),
        written: Mapping[int, int] | None = None,
        marks_unseen: bool = False,
    ) -> Index:
        """An index without a file, until `return_to_file`; `root_fd` is the store's folder where it may get one, and
        where rewrites are counted all the same. A file that is there is behind from now on.

        `unsettled` are those of the bundles whose files are to be read again, `written` the bytes written each day;
        for `marks_unseen` see there. Raises StoreIoError, DurabilityLost.
        """
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        index = cls(connection, f"{store_path}/{INDEX_FILE}", root_fd)
        index._fill(store_path, store_uuid, bundles, unsettled, written, marks_unseen)
        if root_fd is not None:
            index.file_is_behind = INDEX_FILE in list_names(root_fd, store_path)
            if not index.file_is_behind:
                sync_folder(root_fd, store_path)  # one that was removed must not come back: it would be behind
        return index

    def _fill(
        self,
        store_path: str,
        store_uuid: str,
        bundles: Iterable[IndexedBundle],
        unsettled: Iterable[bytes],
        written: Mapping[int, int] | None,
        marks_unseen: bool,
    ) -> None:
        begun = 0 if self._root_fd is None else _rewrites_begun(self._root_fd, store_path)
        self._connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._connection.execute("INSERT INTO meta VALUES ('seals', ?)", (encode_seals(NO_SEALS),))
            for bundle in bundles:
                self._insert(bundle)
                self._note_not_in_file(bundle)
            self._mark(unsettled)
            self._connection.executemany("INSERT INTO written VALUES (?, ?)", (written or {}).items())
            self._entered += [seal_of(("written", day, size_bytes)) for day, size_bytes in (written or {}).items()]
            unseen = ((_UNSEEN_KEY, _UNSEEN),) if marks_unseen else ()
            for key, value in (("rewrites", str(begun)), ("store_uuid", store_uuid), *unseen):
                self._connection.execute("INSERT INTO meta VALUES (?, ?)", (key, value))
                self._entered.append(seal_of(("meta", key, value)))

    @contextlib.contextmanager
    def replaced(self) -> Iterator[Callable[[Index], None]]:
        """Close the file so that a new index can be made in its place, and go on with what is handed to the callable.

        Other callers wait meanwhile. Without a new one, on disk or in memory, this object answers nothing any more.
        """
        with self._lock:
            self._connection.close()
            self._sums = None

            def go_on_with(fresh: Index) -> None:
                self._connection, self._sums = fresh._connection, fresh._sums
                self.file_is_behind = fresh.file_is_behind

            yield go_on_with

    def go_on_in_memory(self) -> None:
        """Leave the file as it is, and go on with a copy of it: for a file that does not take the smallest change.

        The next opening brings the file in line with the bundles, or makes it anew where bundles were written anew
        meanwhile, which the folder counts. Until then no file whose row may stand there is removed (`file_is_behind`):
        a row without a file is a loss. `return_to_file` ends that earlier. Raises StoreIoError, changing nothing.
        """
        with self._lock:
            memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            with _translated(self.path):
                self._connection.backup(memory, progress=_require_step)
            with contextlib.suppress(*_FAILURES):
                self._connection.close()
            self._connection, self._sums, self.file_is_behind = memory, None, True

    def return_to_file(self) -> None:
        """Make the file anew from an index that went on in memory; one that has its file is left as it is.

        Raises:
            NoSpace, StoreIoError, UnsafePath: the index stays in memory.
            DurabilityLost: it does too, and what the disk holds of the file is unknown.
        """
        with self._lock:
            if self._sums is not None or self._root_fd is None:
                return
            store_path = os.path.dirname(self.path)
            with _new_file(self._root_fd, store_path) as temp:
                with _translated(self.path):
                    self._connection.execute("VACUUM INTO ?", (temp.path,))  # which is not said to flush
                _begin_log(temp)
                temp.sync()
                self.file_is_behind = True  # until it is certain what is there
                _put_in_place(temp, self._root_fd, store_path)
            with _translated(self.path):
                connection = _connect(self.path)
            try:
                with _translated(self.path):
                    _configure(connection)
                    connection.execute(_META, ("seals",)).fetchone()  # not before it is asked does SQLite open its log
                sums = PageSums.taken(self._root_fd, store_path, INDEX_FILE)
            except BaseException:
                connection.close()
                raise
            self._connection.close()
            self._connection, self._sums, self.file_is_behind = connection, sums, False

    @property
    def has_file(self) -> bool:
        """Whether what is written goes into the index's file: not in a private copy, nor while it goes on in memory."""
        return self._sums is not None

    def close(self) -> None:
        with self._lock:
            if self._sums is not None and os.getpid() == self._pid:  # the file is not a forked child's to write
                with contextlib.suppress(*_FAILURES):  # SQLite would make it in closing, unseen by the sums
                    self._checkpoint()
            self._connection.close()

    # --- writing

    def add(self, bundle: IndexedBundle) -> None:
        """Add one bundle's row, references and blocks; a version that was missed or set aside comes back so. Raises
        NoSpace, StoreIoError; nothing is added then."""
        with self._transaction():
            if bundle.bundle_id in {*self.with_status(MISSED), *self.with_status(ASIDE)}:
                self._delete(bundle.bundle_id)
            self._insert(bundle)

    def reconcile(
        self,
        added: Iterable[IndexedBundle],
        dropped: Iterable[bytes],
        *,
        shadowed: Iterable[bytes] = (),
        aside: Iterable[bytes] = (),
        settled: Iterable[IndexedBundle] = (),
        unsettled: Iterable[bytes] = (),
        unproven: Iterable[bytes] = (),
        marks_seen: bool = False,
    ) -> None:
        """Bring the index in line with the bundle files. `unproven` are those whose needs are unknown.
        Raises IndexUnusable where rows contradict each other."""
        try:
            with self._lock:
                with self._committed():
                    for bundle_id in dropped:
                        self._delete(bundle_id)
                    for bundle_id in shadowed:
                        self._set(bundle_id, "status", SHADOWED)
                    for bundle_id in aside:
                        self._set(bundle_id, "status", ASIDE)
                    for bundle in added:
                        self._insert(bundle)
                        self._note_not_in_file(bundle)
                    for bundle in settled:
                        self._replace_storage(bundle)
                    self._mark(unsettled)
                    self._mark(unproven, _UNPROVEN)
                    if marks_seen and self.marks_unseen():
                        self._connection.execute("DELETE FROM meta WHERE key = ?", (_UNSEEN_KEY,))
                        self._left.append(seal_of(("meta", _UNSEEN_KEY, _UNSEEN)))
                self._checkpoint()  # as in `drop`
        except (*_FAILURES, BrokenSeal) as error:
            raise IndexContradicted(f"it contradicts the bundles ({error})") from error

    def drop(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably remove rows, references and blocks of these bundles, all or none."""
        with self._transaction():
            for bundle_id in bundle_ids:
                self._delete(bundle_id)
        self._settle()

    def set_aside(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably let versions be none at present: see ASIDE."""
        with self._transaction():
            for bundle_id in bundle_ids:
                self._set(bundle_id, "status", ASIDE)
        self._settle()

    def begin_rewrite(self, bundle_id: bytes, refs: Iterable[bytes]) -> None:
        """A bundle's file is about to be replaced by one that needs `refs`. On disk when this returns.

        From now on its references are the old ones and these, and it counts as unsettled: until `finish_rewrite` each
        opening reads its file again. For a bundle without a row, a retired one, only the rewrite is counted.

        Raises:
            NoSpace, StoreIoError, DurabilityLost: the file must stay as it is.
            LimitExceeded: it must too; somebody else has made a file that counts rewrites by the quadrillion.
        """
        with self._lock:
            with self._transaction():
                count = _count_of(self._connection) + 1
                if count > _MAX_COUNT:
                    raise _counted_too_far(self.path)
                self._connection.execute("UPDATE meta SET value = ? WHERE key = 'rewrites'", (str(count),))
                self._left.append(seal_of(("meta", "rewrites", str(count - 1))))
                self._entered.append(seal_of(("meta", "rewrites", str(count))))
                if (number := self._number(bundle_id)) is not None:
                    self._insert_refs(number, refs)
                    self._mark([bundle_id])
            self._settle()
            self._count_on_disk(count)

    def finish_rewrite(self, bundle: IndexedBundle) -> None:
        """A bundle's file was replaced, durably: its storage is now this. Need not survive a crash itself."""
        with self._transaction():
            self._replace_storage(bundle)

    def add_written(self, day: int, size_bytes: int) -> None:
        """Count bytes that were written on a day (days since 1970, UTC). For budgets; a power cut may lose the last."""
        with self._transaction():
            old = self._connection.execute(
                "SELECT day, size_bytes FROM written WHERE day = ? OR day < ?", (day, day - _WRITTEN_DAYS)
            ).fetchall()
            total = size_bytes + dict(old).get(day, 0)
            self._connection.executemany("DELETE FROM written WHERE day = ?", [(gone,) for gone, _ in old])
            self._connection.execute("INSERT INTO written VALUES (?, ?)", (day, total))
            self._left += [seal_of(("written", *gone)) for gone in old]
            self._entered.append(seal_of(("written", day, total)))

    def erase_dropped(self) -> None:
        """Leave nothing of dropped rows in the file: all that is left is written anew, into pages that held nothing.

        `drop` alone overwrites what it frees (secure_delete), but what SQLite moved about in a page before may remain
        there. Needs room for a second copy of the index. Raises NoSpace, StoreIoError; the rows are then as they were.
        """
        with self._lock:
            if self._sums is None:
                self.return_to_file()
                return
            with self._translated():
                self._connection.execute("VACUUM")
            self._settle()

    def _settle(self) -> None:
        """Bring what was committed into the file itself, flushed: a power cut must not bring a dropped row back, and
        read-only stores must not see it."""
        with self._lock, self._translated():
            if not self._checkpoint():
                raise StoreIoError(
                    f"The index {self.path} is being read by another program and could not be brought up to date. "
                    "End that program and try again.",
                    path=self.path,
                )

    def _checkpoint(self) -> bool:
        """Bring what was committed into the file itself; False if another program reads the file."""
        if self._sums is not None:
            self._sums.expect_checkpoint()
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy and self._sums is not None:
            self._sums.checkpointed()
        return not busy

    def _count_on_disk(self, count: int) -> None:
        if self._root_fd is None:
            return
        store_path, root_fd = os.path.dirname(self.path), self._root_fd
        name = f"rewrites.{count}"
        old = [found for found in list_names(root_fd, store_path) if _COUNT_NAME.fullmatch(found)]
        if old:
            rename(root_fd, max(old, key=_count_in), name, store_path)
        else:
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root_fd))
            except OSError as error:
                raise write_error(error, "create", f"{store_path}/{name}") from error
        sync_folder(root_fd, store_path)

    def _insert(self, bundle: IndexedBundle) -> None:
        row = bundle.row
        facts: tuple[Any, ...] = (None,) * 16
        if row is not None:
            facts = (
                row.uri.namespace, row.uri.name, row.version, row.parent, row.identity_digest, row.token_count,
                row.bundle_bytes, row.logical_bytes, row.created_ns, row.model, json.dumps(row.labels),
                *((row.salvaged.tokens, row.salvaged.of) if row.salvaged else (None, None)), row.unread_tokens,
                *((row.lossy.bits, row.lossy.tokens) if row.lossy else (None, None)),
            )  # fmt: skip
        refs, keys = sorted(set(bundle.refs)), sorted({_block_key(block) for block in bundle.blocks})
        sealed = (
            bundle.status,
            0,
            *facts[:3],
            bundle.bundle_id,
            *facts[3:],
            _stamped(bundle.stamp),
            storage_of(refs, keys),
        )
        seal = seal_of(sealed)
        inserted = self._connection.execute(
            f"INSERT INTO bundles (number, {_READ}) VALUES (NULL, {', '.join('?' * len(sealed))}, ?)", (*sealed, seal)
        )
        number = inserted.lastrowid
        assert number is not None
        self._insert_refs(number, refs)
        self._insert_keys(number, keys)
        self._entered.append(seal)

    def _note_not_in_file(self, bundle: IndexedBundle) -> None:
        if self._root_fd is None:
            self.not_in_file.add(bundle.bundle_id)

    def _replace_storage(self, bundle: IndexedBundle) -> None:
        number = self._number(bundle.bundle_id)
        if number is None:
            return
        if bundle.row is not None:
            self._connection.execute(
                "UPDATE bundles SET bundle_bytes = ?, unsettled = 0, stamp = ? WHERE number = ?",
                (bundle.row.bundle_bytes, _stamped(bundle.stamp), number),
            )
        self._delete_storage(number)
        self._insert_refs(number, bundle.refs)
        self._insert_keys(number, sorted(_block_key(block) for block in bundle.blocks))
        self._seal(number)

    def _insert_refs(self, number: int, refs: Iterable[bytes]) -> None:
        self._connection.executemany("INSERT OR IGNORE INTO refs VALUES (?, ?)", [(number, other) for other in refs])

    def _insert_keys(self, number: int, keys: Iterable[int]) -> None:
        self._connection.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?)", [(key, number) for key in keys])

    def _mark(self, bundle_ids: Iterable[bytes], how: int = _COVERED) -> None:
        for bundle_id in bundle_ids:
            self._set(bundle_id, "unsettled", how)

    def _set(self, bundle_id: bytes, column: str, value: object) -> None:
        if (number := self._number(bundle_id)) is not None:
            self._connection.execute(f"UPDATE bundles SET {column} = ? WHERE number = ?", (value, number))
            self._seal(number)

    def _seal(self, number: int) -> None:
        """Seal a row anew whose columns, references or blocks were changed."""
        *values, _, old = self._connection.execute(
            f"SELECT {_READ} FROM bundles WHERE number = ?", (number,)
        ).fetchone()
        sealed = (*values, self._storage_of(number))
        seal = seal_of(sealed)
        self._connection.execute(
            "UPDATE bundles SET storage = ?, seal = ? WHERE number = ?", (sealed[-1], seal, number)
        )
        self._left.append(old)
        self._entered.append(seal)

    def _storage_of(self, number: int) -> bytes:
        refs, keys = (
            [one for (one,) in self._connection.execute(statement, (number,)).fetchall()]  # one left open is a reader
            for statement in (
                "SELECT refers_to FROM refs WHERE number = ? ORDER BY refers_to",
                "SELECT block FROM blocks WHERE number = ? ORDER BY block",
            )
        )
        return storage_of(refs, keys)

    def _delete(self, bundle_id: bytes) -> None:
        if (number := self._number(bundle_id)) is not None:
            self._delete_storage(number)
            (seal,) = self._connection.execute("SELECT seal FROM bundles WHERE number = ?", (number,)).fetchone()
            self._connection.execute("DELETE FROM bundles WHERE number = ?", (number,))
            self._left.append(seal)

    def _delete_storage(self, number: int) -> None:
        self._connection.execute("DELETE FROM refs WHERE number = ?", (number,))
        self._connection.execute("DELETE FROM blocks WHERE number = ?", (number,))

    def _number(self, bundle_id: bytes) -> int | None:
        found = self._connection.execute("SELECT number FROM bundles WHERE bundle_id = ?", (bundle_id,)).fetchone()
        return None if found is None else int(found[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translated(), self._committed():
            yield

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """One transaction, the lock being held."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._entered, self._left = [], []
        try:
            yield
            names_file = self._seal_all()
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        if self._sums is not None and names_file:
            self._sums.in_log = True
        if self._sums is not None and self._sums.wal_bytes() >= _CHECKPOINT_BYTES:
            with contextlib.suppress(*_FAILURES):  # what was committed stays so: the next one tries again
                self._checkpoint()

    def _seal_all(self) -> bool:
        """Bring the seal on all rows up to date with those that came and went in this transaction, and let the log say
        which file it goes with; whether it was this transaction that said so."""
        if not self._entered and not self._left:
            return False
        found = self._connection.execute(_META, (ALL_SEALS_KEY,)).fetchone()
        old = decode_seals(found[0] if found else None)
        new = encode_seals(with_seals(old, self._entered, self._left))
        self._connection.execute("UPDATE meta SET value = ? WHERE key = ?", (new, ALL_SEALS_KEY))
        if self._sums is None or self._sums.in_log:
            return False
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (FILE_KEY, self._sums.file_id))
        return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What a damaged index does, in the store's words; the next opening then checks every row."""
        try:
            with _translated(self.path):
                yield
        except StoreIoError:
            if self._sums is not None:
                self._sums.forget()
            raise

    # --- asking for sessions

    def find(self, uri: SessionUri, version: int | None = None) -> IndexRow | None:
        """A version of a session, the latest if none is named; None if there is none."""
        where = f"status = '{LIVE}' AND namespace = ? AND name = ?"
        values: tuple[Any, ...] = (uri.namespace, uri.name)
        if version is not None:
            if not 1 <= version <= MAX_VERSION:
                return None  # nor does SQLite take every number
            where, values = where + " AND version = ?", (*values, version)
        rows = self._rows(f"WHERE {where} ORDER BY version DESC LIMIT 1", values)
        return rows[0] if rows else None

    def versions(self, uri: SessionUri) -> list[IndexRow]:
        """All versions of a session, oldest first."""
        return self._rows(
            f"WHERE status = '{LIVE}' AND namespace = ? AND name = ? ORDER BY version", (uri.namespace, uri.name)
        )

    def iter_latest(self) -> Iterator[IndexRow]:
        """The latest version of each session, in the order of their URIs. What comes or goes meanwhile: as of
        `iter_listed`."""
        for page in self.iter_listed(None, _PAGE_ROWS):
            yield from (row for row, _ in page)

    def iter_listed(self, namespace: str | None, page_rows: int) -> Iterator[list[tuple[IndexRow, int]]]:
        """The latest version of each session of a namespace, or of all, with the bytes of the files of all its
        versions, in the order of their URIs: page by page, each fetched when it is asked for.

        A session that comes or goes meanwhile is seen or not; no other one is missed or told twice.
        """
        within, after = ("", ()) if namespace is None else ("namespace = ? AND ", (namespace,)), ("", "")
        while True:
            found = self._select(  # with max(), the columns of its row
                f"SELECT {_READ}, max(version), sum(bundle_bytes) FROM bundles WHERE status = '{LIVE}' AND {within[0]}"
                "(namespace, name) > (?, ?) GROUP BY namespace, name ORDER BY namespace, name LIMIT ?",
                (*within[1], *after, page_rows),
            )
            rows = self._as_rows(columns[:-2] for columns in found)
            yield list(zip(rows, (int(columns[-1]) for columns in found), strict=True))
            if len(rows) < page_rows:
                return
            after = (rows[-1].uri.namespace, rows[-1].uri.name)

    def latest(self) -> list[IndexRow]:
        """The latest version of each session, in the order of their URIs."""
        return list(self.iter_latest())

    def uris(self) -> list[SessionUri]:
        """All sessions, in order: for suggestions."""
        return [uri for page in self.iter_uris(_PAGE_ROWS) for uri in page]

    def iter_uris(self, page_rows: int) -> Iterator[list[SessionUri]]:
        """All sessions, in order, in pages: as `iter_listed`, and much less work than their rows."""
        after = ("", "")
        while True:
            found = self._select(
                f"SELECT DISTINCT namespace, name FROM bundles WHERE status = '{LIVE}' AND (namespace, name) > (?, ?) "
                "ORDER BY namespace, name LIMIT ?",
                (*after, page_rows),
            )
            yield [SessionUri(namespace, name) for namespace, name in found]
            if len(found) < page_rows:
                return
            after = found[-1]

    def near(self, name: str) -> list[SessionUri]:
        """Sessions whose names stand beside this one in the order of names, some hundred: for suggestions."""
        found: list[tuple[str, str]] = []
        for side, order in (("<", "DESC"), (">=", "ASC")):
            found += self._select(
                f"SELECT DISTINCT namespace, name FROM bundles WHERE name {side} ? AND status = '{LIVE}' "
                f"ORDER BY name {order} LIMIT {_NEAR}",
                (name,),
            )
        return [SessionUri(namespace, name) for namespace, name in found]

    def count_sessions(self) -> int:
        """How many sessions there are."""
        ((count,),) = self._select(
            f"SELECT count(*) FROM (SELECT DISTINCT namespace, name FROM bundles WHERE status = '{LIVE}')", ()
        )
        return int(count)

    def all_rows(self) -> list[IndexRow]:
        return self._rows(f"WHERE status = '{LIVE}' ORDER BY namespace, name, version", ())

    def rows_of(self, bundle_ids: Iterable[bytes]) -> dict[bytes, IndexRow]:
        """The rows of those of the bundles that are versions of a session."""
        found: dict[bytes, IndexRow] = {}
        wanted = list(bundle_ids)
        for at in range(0, len(wanted), _ASKED_AT_ONCE):
            some = wanted[at : at + _ASKED_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self._rows(f"WHERE status = '{LIVE}' AND bundle_id IN ({marks})", tuple(some))
            found.update((row.bundle_id, row) for row in rows)
        return found

    def missed(self) -> dict[bytes, IndexRow]:
        """The versions that only their marks tell of, by bundle: see MISSED."""
        return self._rows_no_versions(MISSED)

    def given_up(self) -> dict[bytes, IndexRow]:
        """The versions that were set aside, by bundle: see ASIDE."""
        return self._rows_no_versions(ASIDE)

    def unreadable(self) -> dict[bytes, IndexRow]:
        """The bundles that cannot be read but whose owner is known: see UNREADABLE."""
        return self._rows_no_versions(UNREADABLE)

    def _rows_no_versions(self, status: str) -> dict[bytes, IndexRow]:
        rows = self._rows(f"WHERE status <> '{LIVE}' AND status = ? AND namespace IS NOT NULL", (status,))
        return {row.bundle_id: row for row in rows}

    def last_number(self, uri: SessionUri) -> int:
        """The highest version number that a session has given, also to what is no version at present; 0 for none."""
        found = [
            self._select(
                f"SELECT max(version) FROM bundles WHERE {which} AND namespace = ? AND name = ?",
                (uri.namespace, uri.name),
            )
            for which in (f"status = '{LIVE}'", f"status <> '{LIVE}'")  # each by an index of its own
        ]
        return max(int(number or 0) for ((number,),) in found)

    def bundles_numbered(self, uri: SessionUri, version: int) -> set[bytes]:
        """The bundles that a session has given a version number to, whatever became of them."""
        return set(
            self._ids(
                "SELECT bundle_id FROM bundles WHERE namespace = ? AND name = ? AND version = ?",
                (uri.namespace, uri.name, version),
            )
        )

    def totals(self) -> tuple[int, int, int]:
        """How many sessions, how many versions, and the bytes of the versions' files."""
        ((versions, file_bytes),) = self._select(
            f"SELECT count(*), ifnull(sum(bundle_bytes), 0) FROM bundles WHERE status = '{LIVE}'", ()
        )
        return self.count_sessions(), int(versions), int(file_bytes)

    # --- asking for bundles

    def bundle_ids(self) -> set[bytes]:
        """Every bundle that the index knows of, readable or not."""
        return set(self._ids("SELECT bundle_id FROM bundles", ()))

    def marks_unseen(self) -> bool:
        """Whether this index was made while the marks could not be read, and they have not been asked since: they may
        name versions that it lacks."""
        return bool(self._select("SELECT 1 FROM meta WHERE key = ?", (_UNSEEN_KEY,)))

    def bundles_of(self, uri: SessionUri) -> list[bytes]:
        """Every bundle of a session whatever its status, oldest version first, a version's rivals before it."""
        return self._ids(
            "SELECT bundle_id FROM bundles WHERE namespace = ? AND name = ? ORDER BY version, status DESC, bundle_id",
            (uri.namespace, uri.name),
        )

    def numbers_of(self, uri: SessionUri) -> list[int]:
        """The version numbers that a session has given to what it still has, set aside or missed ones included."""
        found = self._select(
            "SELECT DISTINCT version FROM bundles WHERE namespace = ? AND name = ? ORDER BY version",
            (uri.namespace, uri.name),
        )
        return [int(number) for (number,) in found]

    def knows(self, bundle_id: bytes) -> bool:
        return bool(self._select("SELECT 1 FROM bundles WHERE bundle_id = ?", (bundle_id,)))

    def refs_of(self, bundle_id: bytes) -> tuple[bytes, ...]:
        """The other bundles that a bundle's file needs. Never fewer, though it may be more while it is unsettled."""
        return tuple(
            self._ids(
                "SELECT refers_to FROM refs JOIN bundles USING (number) WHERE bundle_id = ? ORDER BY refers_to",
                (bundle_id,),
            )
        )

    def users_of(self, bundle_id: bytes) -> list[bytes]:
        """The bundles whose files need this one."""
        return self._ids(
            "SELECT bundle_id FROM refs JOIN bundles USING (number) WHERE refers_to = ? ORDER BY bundle_id",
            (bundle_id,),
        )

    def referenced(self, but_for: Iterable[bytes] = ()) -> set[bytes]:
        """Every bundle that another bundle's file needs, the bundles `but_for` not counted."""
        if others := set(but_for):
            with self._lock, self._translated():
                pairs = self._connection.execute("SELECT bundle_id, refers_to FROM refs JOIN bundles USING (number)")
                return {_id(named, self.path) for user, named in pairs if user not in others}
        return set(self._ids("SELECT DISTINCT refers_to FROM refs", ()))

    def holders_of(self, block_id: bytes) -> list[bytes]:
        """Versions of sessions whose files may hold this block: the caller proves it in the file's own directory."""
        return self._ids(
            f"SELECT bundle_id FROM blocks JOIN bundles USING (number) WHERE block = ? AND status = '{LIVE}' "
            "ORDER BY number",
            (_block_key(block_id),),
        )

    def unsettled(self) -> set[bytes]:
        """The bundles whose files the index does not know as they are now; it covers whatever they may need."""
        return set(self._ids("SELECT bundle_id FROM bundles WHERE unsettled <> 0", ()))

    def unproven(self) -> list[bytes]:
        """The versions whose files are others than those that their rows were made from, and cannot be read."""
        return self._ids(
            f"SELECT bundle_id FROM bundles WHERE unsettled <> 0 AND unsettled = ? AND status = '{LIVE}'", (_UNPROVEN,)
        )

    def storages(self) -> dict[bytes, bytes]:
        """What `IndexedBundle.storage` is by the rows of all versions, but for those that are unsettled."""
        return dict(
            self._select(f"SELECT bundle_id, storage FROM bundles WHERE status = '{LIVE}' AND unsettled = 0", ())
        )

    def of_other_files(self, stamps: Mapping[bytes, Stamp]) -> set[bytes]:
        """Those of the bundles, each given with the stamp of its file, whose rows were made from another file."""
        known = dict(self._select("SELECT bundle_id, stamp FROM bundles", ()))
        return {one for one, stamp in stamps.items() if known.get(one) != _stamped(stamp)}

    def with_status(self, status: str) -> list[bytes]:
        """The bundles of a status other than LIVE: few, and asked for at every sleep."""
        return self._ids(f"SELECT bundle_id FROM bundles WHERE status <> '{LIVE}' AND status = ?", (status,))

    def unnumbered(self) -> int:
        """How many bundles there are that cannot be read and may have any number of any session."""
        ((count,),) = self._select(
            f"SELECT count(*) FROM bundles WHERE status <> '{LIVE}' AND status = ? AND namespace IS NULL", (UNREADABLE,)
        )
        return int(count)

    def needs_unknown(self) -> list[bytes]:
        """The bundles whose needs are unknown: they cannot be read, are missed, or were set aside so.
        While there is one, no file is removed for not being needed."""
        return [*self.unreadable_now(), *self.with_status(MISSED), *self.aside_untold()]

    def unreadable_now(self) -> list[bytes]:
        """The bundles whose files cannot be read, and no row tells what they need."""
        return [*self.with_status(UNREADABLE), *self.unproven()]

    def aside_untold(self) -> list[bytes]:
        """The versions that were set aside whose needs are unknown: only a manifest or a mark told of
        them, for every version that was read holds blocks or needs others."""
        return self._ids(
            f"SELECT bundle_id FROM bundles WHERE status <> '{LIVE}' AND status = ? "
            "AND NOT EXISTS (SELECT 1 FROM refs WHERE refs.number = bundles.number) "
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE blocks.number = bundles.number)",
            (ASIDE,),
        )

    def stored(self, bundle_id: bytes) -> IndexedBundle | None:
        """What the index says of a bundle, of its blocks only the first 8 bytes of each id, in order."""
        with self._lock:
            found = self._select(f"SELECT number, {_READ} FROM bundles WHERE bundle_id = ?", (bundle_id,))
            if not found:
                return None
            number, *columns = found[0]
            refs = self.refs_of(bundle_id)
            found = self._select("SELECT block FROM blocks WHERE number = ? ORDER BY block", (number,))
        keys = [key for (key,) in found]
        with self._translated():
            _require_seal(tuple(columns), self.path)
            if columns[-2] != storage_of(refs, keys):
                raise _failed(self.path, "its references or blocks are not what was written")
            row = None if columns[2] is None else _row(tuple(columns), self.path)
        return IndexedBundle(bundle_id, columns[0], row, refs, tuple(_BLOCK_KEY.pack(key) for key in keys))

    def written_on(self, day: int) -> int:
        """Bytes written on that day."""
        return self.written().get(day, 0)

    def written(self) -> dict[int, int]:
        """Bytes written on each day that is still remembered."""
        return {int(day): int(size) for day, size in self._select("SELECT day, size_bytes FROM written", ())}

    def _rows(self, tail: str, values: tuple[Any, ...]) -> list[IndexRow]:
        return self._as_rows(self._select(f"SELECT {_READ} FROM bundles {tail}", values))

    def _as_rows(self, found: Iterable[tuple[Any, ...]]) -> list[IndexRow]:
        with self._translated():
            return [_row(columns, self.path) for columns in found]

    def _ids(self, statement: str, values: tuple[Any, ...]) -> list[bytes]:
        return [_id(value, self.path) for (value,) in self._select(statement, values)]

    def _select(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._connection.execute(statement, values).fetchall()


def _block_key(block_id: bytes) -> int:
    (key,) = _BLOCK_KEY.unpack_from(block_id)
    return int(key)


def _stamped(stamp: Stamp | None) -> bytes | None:
    """A stamp as a row keeps it: without the device, whose number may be another after a restart."""
    return None if stamp is None else _STAMP.pack(*stamp[1:])


def _id(value: Any, path: str) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise _failed(path, "it holds a row that is not valid: an id has the wrong form")
    return value


def _require_seal(columns: tuple[Any, ...], path: str) -> None:
    if seal_of(columns[:-1]) != columns[-1]:
        raise _failed(path, "it holds a row that is not valid: it is not what was written")


def _row(columns: tuple[Any, ...], path: str) -> IndexRow:
    """A row that was read, as a value. Written out, for a listing does it for every session."""
    _require_seal(columns, path)
    namespace, name, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created = columns[2:12]
    model, labels, saved, saved_of, unread, bits, lossy_tokens = columns[12:-3]
    try:
        numbers = (version, tokens, file_bytes, raw_bytes, created, unread)
        if not all(type(number) is int for number in numbers):
            raise TypeError("a number is none")
        if not (type(bundle_id) is type(identity) is bytes and len(bundle_id) == len(identity) == 32):
            raise TypeError("an id has the wrong form")
        if parent is not None and not (type(parent) is bytes and len(parent) == 32):
            raise TypeError("the parent's id has the wrong form")
        if not (type(model) is type(labels) is str):
            raise TypeError("a text is none")
        if not all(type(number) in (int, NoneType) for number in (saved, saved_of, bits, lossy_tokens)):
            raise TypeError("a number is none")
        names = () if labels == "[]" else _labels(labels)
        uri = SessionUri(namespace, name)
        salvaged = None if saved is None else Salvaged(saved, saved_of)
        lossy = None if bits is None or lossy_tokens is None else Lossy(bits, lossy_tokens)
    except (StoreError, TypeError, ValueError, RecursionError) as error:
        raise _failed(path, f"it holds a row that is not valid: {error}") from error
    return IndexRow(
        uri, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created, model, names, salvaged,
        unread, lossy,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _labels(encoded: str) -> tuple[str, ...]:
    return tuple(str(label) for label in json.loads(encoded))


def _failed(path: str, why: str) -> IndexFailed:
    return IndexFailed(
        f"The index {path} failed: {why}. Where the disk has room and takes writes, `torpor rebuild-index` makes it "
        "anew from the bundles.",
        path=path,
        reason=why,
    )


def _counted_too_far(path: str) -> LimitExceeded:
    name = f"{os.path.dirname(path)}/rewrites.{_MAX_COUNT}"
    return LimitExceeded(
        f"{name} says that more files were written anew than any store can have, so it is not the store's own, and no "
        f"file is written anew beside it. Stop the daemon, and remove that file and {path}: the index is made anew.",
        path=name,
        limit=_MAX_COUNT,
    )


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before its log is looked at: so there is no -shm file
    return connection


def _configure(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA fullfsync = ON")  # fsync on macOS stops at the drive's cache; no effect elsewhere
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute("PRAGMA secure_delete = ON")  # a dropped row's name is overwritten, not only let go
    connection.execute("PRAGMA temp_store = MEMORY")  # nothing of an index in a temporary file outside the store
    connection.execute("PRAGMA trusted_schema = OFF")


def _require_index_file(store_path: str, root_fd: int) -> str:
    """The index's path, once each of its files is known to be a regular file of our own, for SQLite would follow a
    link, and not longer than what is read of an index."""
    path = f"{store_path}/{INDEX_FILE}"
    for suffix in _SIDE_FILES:
        try:
            status = stat_name(root_fd, INDEX_FILE + suffix, path + suffix)
        except FileNotFoundError as error:
            if not suffix:
                raise IndexUnusable("it is missing") from error
            continue
        require_own_regular(status, path + suffix)
        if status.st_size > MAX_INDEX_BYTES:
            raise IndexUnusable(f"{path + suffix} has more than {MAX_INDEX_BYTES} bytes")
    return path


@contextlib.contextmanager
def _new_file(root_fd: int, store_path: str) -> Iterator[TempFile]:
    """An empty file that may become the index. Raises NoSpace, StoreIoError, UnsafePath."""
    path = f"{store_path}/{BUNDLES}"
    try:
        fd = open_folder(root_fd, BUNDLES, path)
    except FileNotFoundError as error:
        raise io_error(error, "open", path) from error
    try:
        with contextlib.closing(TempFile(fd, path)) as temp:
            yield temp
    finally:
        os.close(fd)


def _begin_log(temp: TempFile) -> None:
    """Say in an index's first page that it has a log. SQLite would do so once the file is in its place, and write a
    journal of it first, for which a full disk has no room. Raises NoSpace, StoreIoError."""
    try:
        first = bytearray(os.pread(temp.fd, PAGE_BYTES, 0))
    except OSError as error:
        raise io_error(error, "read", temp.path) from error
    first[JOURNAL_MODES] = WITH_LOG
    temp.rewrite_start(bytes(first))


def _put_in_place(temp: TempFile, root_fd: int, store_path: str) -> None:
    """Let a whole, flushed file be the index, durably. Raises StoreIoError, DurabilityLost.

    The old one's log goes first, for SQLite would read it into the new one. A crash in between leaves the old file as
    it was at its last checkpoint: an index that is behind, which the next opening brings in line with the bundles.
    """
    for suffix in _SIDE_FILES[1:]:
        try:
            os.unlink(INDEX_FILE + suffix, dir_fd=root_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise write_error(error, "remove", f"{store_path}/{INDEX_FILE}{suffix}") from error
    sync_folder(root_fd, store_path)
    temp.publish(root_fd, INDEX_FILE, store_path, replacing=True)


def _has_journal(root_fd: int, path: str) -> bool:
    """Whether there is a journal that SQLite may take for its own and roll back into the file."""
    try:
        stat_name(root_fd, f"{INDEX_FILE}-journal", f"{path}-journal")
    except FileNotFoundError:
        return False
    return True


def _has_log(root_fd: int, path: str) -> bool:
    """Whether there is anything in the write-ahead log."""
    try:
        return stat_name(root_fd, INDEX_FILE + WAL_SUFFIX, path + WAL_SUFFIX).st_size > 0
    except FileNotFoundError:
        return False


def _stamps(root_fd: int, path: str) -> tuple[Stamp | None, ...]:
    """What tells whether somebody has written to the index, or to its log, since."""
    found: list[Stamp | None] = []
    for suffix in ("", WAL_SUFFIX):
        try:
            found.append(stamp_of(stat_name(root_fd, INDEX_FILE + suffix, path + suffix)))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


def _image(root_fd: int, store_path: str) -> IndexImage:
    """The index file with its log, as of one moment. Raises IndexUnusable."""
    for _ in range(_COPY_TRIES):
        try:
            image = read_image(root_fd, store_path, INDEX_FILE, page_bytes=PAGE_BYTES, max_bytes=MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise IndexUnusable("it is missing") from error
        except OverflowError as error:
            raise IndexUnusable(str(error)) from error
        if image is not None:
            return image
    raise IndexUnusable("it changes faster than it can be copied")


def _rewrites_begun(root_fd: int, store_path: str) -> int:
    """How many rewrites were ever begun in a store, as its folder says."""
    return max((_count_in(name) for name in list_names(root_fd, store_path) if _COUNT_NAME.fullmatch(name)), default=0)


def _count_in(name: str) -> int:
    return int(name.rpartition(".")[2])


def _count_of(connection: sqlite3.Connection) -> int:
    """How many rewrites an index has seen begin."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'rewrites'").fetchone()
    if found is None or not _COUNT_NAME.fullmatch(f"rewrites.{found[0]}"):
        raise IndexUnusable("it does not say how many rewrites it has seen")
    return int(found[0])


def _require_ours(
    connection: sqlite3.Connection, store_uuid: str, sums: PageSums | None, *, has_log: bool
) -> PageSums | None:
    """Refuse an index that is not ours, or not what was written.

    `sums` are those of its file, if they are right; given back if they are enough to believe it with its log.
    """
    if connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
        raise IndexUnusable("it is not an index of Torpor")
    if connection.execute("PRAGMA user_version").fetchone() != (SCHEMA_VERSION,):
        raise IndexUnusable("it has another schema version")
    if connection.execute("PRAGMA page_size").fetchone() != (PAGE_BYTES,):
        raise IndexUnusable("it has pages of another size")
    if connection.execute("PRAGMA page_count").fetchone() > (MAX_INDEX_BYTES // PAGE_BYTES,):
        raise IndexUnusable(f"it says that it has more than {MAX_INDEX_BYTES} bytes")
    _require_schema(connection)
    if connection.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone() != (store_uuid,):
        raise IndexUnusable("it belongs to another store")
    if sums is not None and (not has_log or connection.execute(_META, (FILE_KEY,)).fetchone() == (sums.file_id,)):
        return sums
    try:
        require_sealed(connection, _SEALED)
    except BrokenSeal as broken:
        raise IndexUnusable(str(broken)) from broken
    if any(connection.execute(question).fetchone() for question in _NONSENSE):
        raise IndexUnusable("it holds a row that is not valid")
    return None


def _require_schema(connection: sqlite3.Connection) -> None:
    """Refuse other tables than ours before any of them is asked: a view in a table's place may compute for ever."""
    if _schema_of(connection) != _expected_schema():
        raise IndexUnusable("it has other tables than an index of Torpor")


def _schema_of(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    found = connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master LIMIT 64")
    return sorted(found, key=repr)  # in a damaged one there may be bytes instead of text


@functools.cache
def _expected_schema() -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        return _schema_of(connection)


def _require_step(status: int, _remaining: int, _total: int) -> None:
    """To be asked after each step of a copy: one that is refused, by a transaction that could not even be rolled back,
    is not tried for ever. Raises IndexUnusable."""
    if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        raise IndexUnusable("it cannot be copied, because a change of it did not come to an end")


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """SQLite's failures in the store's words."""
    try:
        yield
    except (*_FAILURES, BrokenSeal, IndexUnusable) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpace(f"No room for the index {path}. Free some space and try again.", path=path) from error
        raise _failed(path, str(error)) from error
