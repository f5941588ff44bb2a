"""The connection to the index: one statement or transaction at a time, page sums kept with each."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any, Final

from ..disk.paths import Closing, Stamp
from ..errors import IndexFailed, StoreError, StoreIoError
from .absent import AbsentNotes
from .index_file import FAILURES, REFUSED, translated
from .page_sums import PAGE_BYTES, PageSums
from .rows import id_of
from .schema import FILE_KEY

_CHECKPOINT_BYTES: Final = 1000 * PAGE_BYTES


class IndexConnection(Closing):
    """An index that is open. Safe from several threads."""

    def __init__(self, connection: sqlite3.Connection, path: str, root_fd: int | None) -> None:
        """`root_fd` is the store's folder, borrowed; None for a private copy, whose rewrites are not counted and which
        notes nothing."""
        self._connection = connection
        self._root_fd = root_fd
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._sums: PageSums | None = None
        self.path = path
        self.notes = None if root_fd is None else AbsentNotes(root_fd, os.path.dirname(path))
        self.not_in_file: set[bytes] = set()
        """In a private copy: the bundles whose rows were made from their files, for the index file has none of them."""
        self.read_at: tuple[Stamp | None, ...] = ()
        """In a private copy: the stamps of the index's files just before they were copied."""
        self.file_is_behind = False
        """Whether the file still has rows of what was dropped since, because it takes no change."""
        self.notes_left: dict[bytes, StoreError] = {}
        """Of versions that are gone: why their notes could not be removed."""

    @property
    def has_file(self) -> bool:
        """Whether what is written goes into the index's file: not in a private copy, nor while it goes on in memory."""
        return self._sums is not None

    def close(self) -> None:
        with self._lock:
            if self._sums is not None and os.getpid() == self._pid:  # the file is not a forked child's to write
                with contextlib.suppress(*FAILURES):  # SQLite would make it in closing, unseen by the sums
                    self._checkpoint()
            self._connection.close()

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

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translated(), self._committed():
            yield

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """One transaction, the lock being held."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            changes = self._connection.total_changes
            yield
            names_file = self._connection.total_changes != changes and self._name_file()
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        if self._sums is not None and names_file:
            self._sums.in_log = True
        if self._sums is not None and self._sums.wal_bytes() >= _CHECKPOINT_BYTES:
            with contextlib.suppress(*FAILURES):  # what was committed stays so: the next one tries again
                self._checkpoint()

    def _name_file(self) -> bool:
        """Let the log say which file it goes with; whether it was this transaction that said so."""
        if self._sums is None or self._sums.in_log:
            return False
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (FILE_KEY, self._sums.file_id))
        return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What a damaged index does, in the store's words; the next opening then makes it anew."""
        try:
            with translated(self.path):
                yield
        except IndexFailed as error:
            refused = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF in REFUSED
            if self._sums is not None and not refused:
                self._sums.forget()
            raise

    def _select(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._connection.execute(statement, values).fetchall()

    def _ids(self, statement: str, values: tuple[Any, ...]) -> list[bytes]:
        return [id_of(value, self.path) for (value,) in self._select(statement, values)]
