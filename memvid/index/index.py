"""The index: from a session's URI and version to its bundle, who holds which block, and facts for listings.

A derived SQLite table. Owns the schema, and the tests for a missing, foreign or damaged index. Nothing here is primary
data: every row can be rebuilt from a bundle, and a wake compares the row with the bundle before it trusts either.

How it works: a store that may write keeps STORE/index.sqlite in WAL mode, and no other process opens it by SQLite.
SQLite is told so, and keeps its map of the log in its own memory. Else the map is a -shm file, mapped into memory: a
full disk has no room for it, and a page of it without a disk block ends the process (SIGBUS). A read-only store copies
file and log into memory, so it writes nothing, not even a -wal file. synchronous=NORMAL is enough: the next open finds
a row lost in a power cut and rebuilds it from its bundle. Changes that must not be lost or undone (`drop`,
`begin_rewrite`) are written into the file itself and flushed.

A row holds two kinds of facts about a bundle. Its identity (owner, version, tokens) never changes, because the bundle
id covers it. The place of its bytes (`refs`, `blocks`, `bundle_bytes`) changes when its file is rewritten. A removal
trusts `refs`, so they must at every moment cover the needs of the file, before a rewrite and after:

- `begin_rewrite` makes them cover both and marks the bundle unsettled, durably, before the file is replaced.
- `finish_rewrite` stores the new content of the file. If it did not happen, the next open reads the file again.
- Each row has the stamp of the file that it was read from, or written with (inode, length, times). The next open reads
  again what is another file now: a backup was put back, or the store copied while it was written.
- STORE/rewrites.<count>, an empty file, has the number of rewrites begun in its name. An index that has counted fewer
  was put back from a backup: its refs may be those of files that are no more, and it is made anew.

Blocks are found by the first 8 bytes of their ids: a row of `blocks` takes 30 bytes instead of 150, and the caller
checks the answer in the file's own directory anyway.

A flipped bit must not hide a version, so an index is believed only if each page of its file is what was last written
(`page_sums`) and its log was written over that very file. Any other is made anew. Checkpoints are made here and not by
SQLite, for the sums must know of each.
"""
# ruff: noqa: S608 - every statement is put together from constants of this module

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from ..disk.durable import rename, sync_folder, write_error
from ..disk.paths import list_names, undoing
from ..errors import StoreIoError, UnsafePath
from .bundle_queries import BundleQueries
from .index_file import (
    COPY_TRIES,
    FAILURES,
    MAX_COUNT,
    REFUSED,
    begin_log,
    configure,
    connect,
    count_in,
    counted_too_far,
    has_journal,
    image_of,
    new_file,
    put_in_place,
    require_index_file,
    require_step,
    rewrites_begun,
    stamps_of_files,
    translated,
)
from .page_sums import INDEX_FILE, PAGE_BYTES, PageSums
from .rows import ASIDE, COLUMNS, MISSED, SHADOWED, IndexedBundle, block_key, facts_of, stamped
from .schema import (
    APPLICATION_ID,
    COUNT_NAME,
    COVERED,
    FILE_KEY,
    META,
    OLD_VERSION,
    SCHEMA,
    SCHEMA_VERSION,
    UNPROVEN,
    UNSEEN,
    UNSEEN_KEY,
    IndexContradicted,
    IndexUnusable,
    count_of,
    require_ours,
    require_schema,
    version_of,
)
from .session_queries import SessionQueries

_WRITTEN_DAYS: Final = 400


class Index(SessionQueries, BundleQueries):
    """An open index. Safe from several threads: one statement or transaction at a time."""

    # --- opening and making

    @classmethod
    def open(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """Open the index file for writing. Raises IndexUnusable if it is missing, foreign, damaged or older than the
        last rewrite of a bundle; UnsafePath."""
        path = require_index_file(store_path, root_fd)
        begun = rewrites_begun(root_fd, store_path)
        sums = None if has_journal(root_fd, path) else PageSums.stored(root_fd, store_path)
        with translated(path):
            connection = connect(path)
        index = cls(connection, path, root_fd)
        with undoing(index.close):
            try:
                require_ours(connection, store_uuid, sums)
                index._sums = sums  # from now on a close brings the log into the file: it goes with it
                if version_of(connection) != SCHEMA_VERSION:
                    raise IndexUnusable("it has another schema version")
                if count_of(connection) < begun:
                    raise IndexUnusable("it is older than the last rewrite of a bundle")
                configure(connection)
            except FAILURES as error:
                refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in REFUSED
                raise IndexUnusable(f"it {'takes no change now' if refused else 'is damaged'} ({error})") from error
        return index

    @classmethod
    def copy_to_memory(cls, store_path: str, root_fd: int, store_uuid: str) -> Index:
        """A private copy of what the index says now, for a store that may not write. Raises IndexUnusable if it is
        missing, foreign or damaged; UnsafePath.

        One that is older than the last rewrite will do: nothing is removed by it, and its rows name the same bundles.
        """
        path = require_index_file(store_path, root_fd)
        for _ in range(COPY_TRIES):  # a daemon writes the sums after the file that they are of
            read_at = stamps_of_files(root_fd, path)
            image = image_of(root_fd, store_path)
            sums = PageSums.of_data(root_fd, store_path, image.file_data, image.in_log)
            if sums is not None:
                break
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        with undoing(memory.close):
            try:
                memory.deserialize(image.data)
                require_ours(memory, store_uuid, sums)
                if version_of(memory) == OLD_VERSION:
                    memory.execute("ALTER TABLE bundles DROP COLUMN seal")
            except FAILURES as error:
                raise IndexUnusable(f"it is damaged ({error})") from error
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
        for last in (False, True):
            try:
                index = cls.copy_to_memory(store_path, root_fd, store_uuid)
                break
            except IndexUnusable:
                return None
            except StoreIoError as error:
                if last and error.details.get("errno") == errno.EIO:
                    return None
                if last:
                    raise
        with undoing(index.close):
            begun = rewrites_begun(root_fd, store_path)
        try:
            return index, count_of(index._connection) >= begun
        except (*FAILURES, IndexUnusable):
            return index, False

    @classmethod
    def uuid_in(cls, root_fd: int, store_path: str) -> str | None:
        """The uuid of the store whose index lies in a folder; None where there is none that can be believed. Raises
        UnsafePath, StoreIoError."""
        try:
            require_index_file(store_path, root_fd)
            image = image_of(root_fd, store_path)
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
                memory.deserialize(image.data)
                require_schema(memory)
                (said,) = memory.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone()
            found = str(uuid.UUID(said))
            cls.copy_to_memory(store_path, root_fd, found).close()
        except (*FAILURES, IndexUnusable, ValueError, TypeError, AttributeError):
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
        with undoing(index.close):
            begun = 0 if root_fd is None else rewrites_begun(root_fd, store_path)
            index._connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            with index._transaction():
                for statement in SCHEMA.split(";"):
                    index._connection.execute(statement)
                index._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                index._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                for bundle in bundles:
                    index._insert(bundle)
                    index._note_not_in_file(bundle)
                index._mark(unsettled)
                index._connection.executemany("INSERT INTO written VALUES (?, ?)", (written or {}).items())
                unseen = ((UNSEEN_KEY, UNSEEN),) if marks_unseen else ()
                said = (("rewrites", str(begun)), ("store_uuid", store_uuid), *unseen)
                index._connection.executemany("INSERT INTO meta VALUES (?, ?)", said)
            if root_fd is not None:
                index.file_is_behind = INDEX_FILE in list_names(root_fd, store_path)
                if not index.file_is_behind:
                    sync_folder(root_fd, store_path)  # one that was removed must not come back: it would be behind
        return index

    @contextlib.contextmanager
    def replaced(self) -> Iterator[Callable[[Index], None]]:
        """Close the file so that a new index can be made in its place, and go on with what is handed to the callable.

        Other callers wait meanwhile. Without a new one, on disk or in memory, this object answers nothing any more.
        """
        with self._lock:
            self.close()
            self._sums = None

            def go_on_with(fresh: Index) -> None:
                self._connection, self._sums = fresh._connection, fresh._sums
                self.file_is_behind, self.notes_left = fresh.file_is_behind, fresh.notes_left

            yield go_on_with

    def go_on_in_memory(self) -> None:
        """Leave the file as it is, and go on with a copy of it: for a file that does not take the smallest change.

        The next opening brings the file in line with the bundles, or makes it anew where bundles were written anew
        meanwhile, which the folder counts. Until then no file whose row may stand there is removed (`file_is_behind`):
        a row without a file is a loss. `return_to_file` ends that earlier. Raises StoreIoError, changing nothing.
        """
        with self._lock:
            memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            with undoing(memory.close), translated(self.path):
                self._connection.backup(memory, progress=require_step)
            with contextlib.suppress(*FAILURES):
                self.close()
            self._connection, self._sums, self.file_is_behind = memory, None, True

    def return_to_file(self) -> None:
        """Make the file anew from an index that went on in memory; one that has its file is left as it is. First the
        notes go that could not be removed: the file that is behind may be all that tells of their versions' end.

        Raises:
            NoSpace, StoreIoError, UnsafePath: the index stays in memory.
            DurabilityLost: it does too, and what the disk holds of the file is unknown.
        """
        with self._lock:
            if self._sums is not None or self._root_fd is None:
                return
            if self.notes is not None and self.notes_left:
                self.notes.drop(sorted(self.notes_left.keys() - self.bundle_ids()))
                self.notes_left.clear()
            store_path = os.path.dirname(self.path)
            with new_file(self._root_fd, store_path) as temp:
                with translated(self.path):
                    self._connection.execute("VACUUM INTO ?", (temp.path,))  # which is not said to flush
                begin_log(temp)
                temp.sync()
                self.file_is_behind = True  # until it is certain what is there
                put_in_place(temp, self._root_fd, store_path)
            sums = PageSums.taken(self._root_fd, store_path)
            with translated(self.path):
                connection = connect(self.path)
            with undoing(connection.close), translated(self.path):
                configure(connection)
                connection.execute(META, (FILE_KEY,)).fetchone()  # not before it is asked does SQLite open its log
            self._connection.close()
            self._connection, self._sums, self.file_is_behind = connection, sums, False

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
                    self._mark(unproven, UNPROVEN)
                    if marks_seen and self.marks_unseen():
                        self._connection.execute("DELETE FROM meta WHERE key = ?", (UNSEEN_KEY,))
                self._checkpoint()  # as in `drop`
        except FAILURES as error:
            raise IndexContradicted(f"it contradicts the bundles ({error})") from error

    def drop(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably remove rows, references and blocks of these bundles, all or none, and their notes."""
        gone = list(bundle_ids)
        self.drop_notes(gone)
        with self._transaction():
            for bundle_id in gone:
                self._delete(bundle_id)
        self._settle()

    def drop_notes(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably remove the notes of versions that are gone. `notes_left` has those that stay: in a folder that is
        open to others, and while the index is in memory, until it returns to its file.

        Raises:
            StoreIoError: one could not be removed, and the index has its file: the row must stay too.
            DurabilityLost
        """
        gone = sorted(bundle_ids)
        if self.notes is None or not gone:
            return
        try:
            self.notes.drop(gone)
        except (UnsafePath, StoreIoError) as error:
            if self.has_file and isinstance(error, StoreIoError):
                raise
            self.notes_left.update(dict.fromkeys(gone, error))
        else:
            for bundle_id in gone:
                self.notes_left.pop(bundle_id, None)

    def set_aside(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably let versions be none at present: see ASIDE. Raises NoSpace, StoreIoError, DurabilityLost: no file of
        theirs may move."""
        leaving = list(bundle_ids)
        if self.notes is not None:
            known = filter(None, map(self.stored, leaving))
            self.notes.keep(dataclasses.replace(one, status=ASIDE) for one in known if one.row is not None)
        with self._transaction():
            for bundle_id in leaving:
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
                count = count_of(self._connection) + 1
                if count > MAX_COUNT:
                    raise counted_too_far(self.path)
                self._connection.execute("UPDATE meta SET value = ? WHERE key = 'rewrites'", (str(count),))
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

    def _count_on_disk(self, count: int) -> None:
        if self._root_fd is None:
            return
        store_path, root_fd = os.path.dirname(self.path), self._root_fd
        name = f"rewrites.{count}"
        old = [found for found in list_names(root_fd, store_path) if COUNT_NAME.fullmatch(found)]
        if old:
            rename(root_fd, max(old, key=count_in), name, store_path)
        else:
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root_fd))
            except OSError as error:
                raise write_error(error, "create", f"{store_path}/{name}") from error
        sync_folder(root_fd, store_path)

    def _insert(self, bundle: IndexedBundle) -> None:
        facts = facts_of(bundle.row)
        values = (*facts[:3], bundle.bundle_id, *facts[3:], stamped(bundle.stamp), bundle.storage)
        inserted = self._connection.execute(
            f"INSERT INTO bundles (status, unsettled, {COLUMNS}, stamp, storage) "
            f"VALUES (?, 0, {', '.join('?' * len(values))})",
            (bundle.status, *values),
        )
        number = inserted.lastrowid
        assert number is not None
        self._insert_storage(number, bundle)

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
                (bundle.row.bundle_bytes, stamped(bundle.stamp), number),
            )
        self._connection.execute("UPDATE bundles SET storage = ? WHERE number = ?", (bundle.storage, number))
        self._delete_storage(number)
        self._insert_storage(number, bundle)

    def _insert_storage(self, number: int, bundle: IndexedBundle) -> None:
        self._insert_refs(number, bundle.refs)
        keys = sorted({block_key(block) for block in bundle.blocks})
        self._connection.executemany("INSERT INTO blocks VALUES (?, ?)", [(key, number) for key in keys])

    def _insert_refs(self, number: int, refs: Iterable[bytes]) -> None:
        self._connection.executemany("INSERT OR IGNORE INTO refs VALUES (?, ?)", [(number, other) for other in refs])

    def _mark(self, bundle_ids: Iterable[bytes], how: int = COVERED) -> None:
        for bundle_id in bundle_ids:
            self._set(bundle_id, "unsettled", how)

    def _set(self, bundle_id: bytes, column: str, value: object) -> None:
        self._connection.execute(f"UPDATE bundles SET {column} = ? WHERE bundle_id = ?", (value, bundle_id))

    def _delete(self, bundle_id: bytes) -> None:
        if (number := self._number(bundle_id)) is not None:
            self._delete_storage(number)
            self._connection.execute("DELETE FROM bundles WHERE number = ?", (number,))

    def _delete_storage(self, number: int) -> None:
        self._connection.execute("DELETE FROM refs WHERE number = ?", (number,))
        self._connection.execute("DELETE FROM blocks WHERE number = ?", (number,))

    def _number(self, bundle_id: bytes) -> int | None:
        found = self._connection.execute("SELECT number FROM bundles WHERE bundle_id = ?", (bundle_id,)).fetchone()
        return None if found is None else int(found[0])
