"""The file of the index, its log, and the file beside them that counts rewrites: as names in the store's folder.

SQLite is only told which of them to open (`connect`), and how (`configure`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Final

from ..disk.durable import TempFile, write_error
from ..disk.paths import (
    Stamp,
    closing_fd,
    io_error,
    list_names,
    open_folder,
    read_at,
    require_own_regular,
    stamp_of,
    stat_name,
)
from ..errors import LimitExceeded, NoSpace
from ..folder.store_file import BUNDLES
from ..limits import MAX_INDEX_BYTES
from .index_image import JOURNAL_MODES, WAL_SUFFIX, WITH_LOG, IndexImage, read_image
from .page_sums import INDEX_FILE, PAGE_BYTES
from .rows import failed
from .schema import COUNT_NAME, IndexUnusable

INDEX_FILES: Final = (INDEX_FILE, INDEX_FILE + WAL_SUFFIX, f"{INDEX_FILE}-shm")
_SIDE_FILES: Final = ("", WAL_SUFFIX, "-shm", "-journal")
REFUSED: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
"""What SQLite says of a file that it cannot write, on a full disk for example: nothing of what is in the file."""
_CACHE_KIB: Final = 64 * 1024
COPY_TRIES: Final = 10
MAX_COUNT: Final = 10**15 - 1
"""Rewrites that a name can count. No store comes near it: a thousand a second take thirty thousand years."""
FAILURES: Final = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What reading a damaged file makes of SQLite and of Python's own part of it."""


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before its log is looked at: so there is no -shm file
    return connection


def configure(connection: sqlite3.Connection) -> None:
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


def require_index_file(store_path: str, root_fd: int) -> str:
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
def new_file(root_fd: int, store_path: str) -> Iterator[TempFile]:
    """An empty file that may become the index. Raises NoSpace, StoreIoError, UnsafePath."""
    path = f"{store_path}/{BUNDLES}"
    try:
        fd = open_folder(root_fd, BUNDLES, path)
    except FileNotFoundError as error:
        raise io_error(error, "open", path) from error
    with closing_fd(fd), TempFile(fd, path) as temp:
        yield temp


def begin_log(temp: TempFile) -> None:
    """Say in an index's first page that it has a log. SQLite would do so once the file is in its place, and write a
    journal of it first, for which a full disk has no room. Raises NoSpace, StoreIoError."""
    first = bytearray(read_at(temp.fd, 0, PAGE_BYTES, temp.path))
    first[JOURNAL_MODES] = WITH_LOG
    temp.rewrite_start(bytes(first))


def put_in_place(temp: TempFile, root_fd: int, store_path: str) -> None:
    """Let a whole, flushed file be the index, durably. Raises StoreIoError, DurabilityLost.

    The old one's log goes first, for SQLite would read it into the new one. A crash in between leaves the old file as
    it was at its last checkpoint: an index that is behind, which the next opening brings in line with the bundles. A
    power cut may also leave the new file with the old one's log: that is not believed, and made anew.
    """
    for suffix in _SIDE_FILES[1:]:
        try:
            os.unlink(INDEX_FILE + suffix, dir_fd=root_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise write_error(error, "remove", f"{store_path}/{INDEX_FILE}{suffix}") from error
    temp.publish(root_fd, INDEX_FILE, store_path, replacing=True)


def has_journal(root_fd: int, path: str) -> bool:
    """Whether there is a journal that SQLite may take for its own and roll back into the file."""
    try:
        stat_name(root_fd, f"{INDEX_FILE}-journal", f"{path}-journal")
    except FileNotFoundError:
        return False
    return True


def stamps_of_files(root_fd: int, path: str) -> tuple[Stamp | None, ...]:
    """The stamps of the index and its log: they change with each write to either."""
    found: list[Stamp | None] = []
    for suffix in ("", WAL_SUFFIX):
        try:
            found.append(stamp_of(stat_name(root_fd, INDEX_FILE + suffix, path + suffix)))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


def image_of(root_fd: int, store_path: str) -> IndexImage:
    """The index file with its log, as of one moment. Raises IndexUnusable."""
    for _ in range(COPY_TRIES):
        try:
            image = read_image(root_fd, store_path, INDEX_FILE, page_bytes=PAGE_BYTES, max_bytes=MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise IndexUnusable("it is missing") from error
        except OverflowError as error:
            raise IndexUnusable(str(error)) from error
        if image is not None:
            return image
    raise IndexUnusable("it changes faster than it can be copied")


def rewrites_begun(root_fd: int, store_path: str) -> int:
    return max((count_in(name) for name in list_names(root_fd, store_path) if COUNT_NAME.fullmatch(name)), default=0)


def count_in(name: str) -> int:
    return int(name.rpartition(".")[2])


def counted_too_far(path: str) -> LimitExceeded:
    name = f"{os.path.dirname(path)}/rewrites.{MAX_COUNT}"
    return LimitExceeded(
        f"{name} says that more files were written anew than any store can have, so it is not the store's own, and no "
        f"file is written anew beside it. Stop the daemon, and remove that file and {path}: the index is made anew.",
        path=name,
        limit=MAX_COUNT,
    )


def require_step(status: int, _remaining: int, _total: int) -> None:
    """To be asked after each step of a copy: one that is refused, by a transaction that could not even be rolled back,
    is not tried for ever. Raises IndexUnusable."""
    if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        raise IndexUnusable("it cannot be copied, because a change of it did not come to an end")


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """SQLite's failures in the store's words."""
    try:
        yield
    except (*FAILURES, IndexUnusable) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpace(f"No room for the index {path}. Free some space and try again.", path=path) from error
        raise failed(path, str(error)) from error
