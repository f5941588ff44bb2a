"""The index's bytes with its log: what SQLite itself would say of them, whatever the log looks like."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid.errors import UnsafePath
from torpor.memvid.index import index_image
from torpor.memvid.index.index_image import WAL_FRAME, WAL_HEADER, read_image
from torpor.tests.memvid.log_making import PAGE, checksum, one_frame_log

NAME = "index.sqlite"
LIMIT = 1 << 24
FRAME = WAL_FRAME.size + PAGE


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A database in WAL mode, of several commits in its file and several in its log; nothing checkpoints by itself."""
    (tmp_path / "db").mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(tmp_path / "db" / NAME, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB)")
        fill(connection, 40)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        fill(connection, 15)
        yield connection


def fill(connection: sqlite3.Connection, rows: int) -> None:
    for _ in range(rows):
        connection.execute("INSERT INTO t (b) VALUES (randomblob(1500))")


def rows_of(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    return connection.execute("SELECT * FROM t ORDER BY a").fetchall()


def rows_by_image(folder: Path) -> list[tuple[int, bytes]]:
    """What the image of the database in a folder says."""
    root_fd = os.open(folder, os.O_RDONLY)
    try:
        found = read_image(root_fd, str(folder), NAME, page_bytes=PAGE, max_bytes=LIMIT)
    finally:
        os.close(root_fd)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        memory.deserialize(found.data)
        assert memory.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return rows_of(memory)


def rows_by_sqlite(folder: Path, scratch: Path) -> list[tuple[int, bytes]]:
    """What SQLite says of a copy of it, after a recovery of its own."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for suffix in ("", "-wal"):
        if (folder / f"{NAME}{suffix}").exists():
            shutil.copy(folder / f"{NAME}{suffix}", scratch)
    with contextlib.closing(sqlite3.connect(scratch / NAME)) as connection:
        return rows_of(connection)


def summed_again(log: bytes, order: str) -> bytes:
    """A log with its checksums made again, of words in this byte order."""
    header = struct.pack(">I", 0x377F0682 | (order == ">")) + log[4:24]
    sums = checksum(header, order)
    parts = [header, struct.pack(">II", *sums)]
    for at in range(WAL_HEADER.size, len(log), FRAME):
        head, page = log[at : at + 16], log[at + WAL_FRAME.size : at + FRAME]
        sums = checksum(head[:8] + page, order, sums)
        parts += [head, struct.pack(">II", *sums), page]
    return b"".join(parts)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*-shm"))
    return to


def test_the_image_holds_what_stands_only_in_the_log_and_reading_it_writes_nothing(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    folder = copied(tmp_path / "db", tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(rows_by_image(folder)) == 55
    assert rows_by_image(folder) == rows_of(database)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("change", ["shrinks", "grows", "begins anew"])
def test_the_image_is_as_long_as_the_last_commit_says(
    database: sqlite3.Connection, tmp_path: Path, change: str
) -> None:
    if change == "shrinks":
        database.execute("DELETE FROM t WHERE a > 5")
        database.execute("VACUUM")
    elif change == "grows":
        fill(database, 100)
    else:  # the log is written from its beginning, over older frames that it still has
        database.execute("PRAGMA wal_checkpoint(RESTART)")
        fill(database, 1)
    assert rows_by_image(tmp_path / "db") == rows_of(database)


def test_a_log_cut_anywhere_counts_up_to_its_last_whole_commit(database: sqlite3.Connection, tmp_path: Path) -> None:
    folder = copied(tmp_path / "db", tmp_path / "copy")
    log = (folder / f"{NAME}-wal").read_bytes()
    lengths = [0, 1, WAL_HEADER.size - 1, WAL_HEADER.size]
    lengths += [WAL_HEADER.size + count * FRAME + more for count in range(8) for more in (0, 8, 30, FRAME - 1)]
    counts = set()
    for length in lengths:
        (folder / f"{NAME}-wal").write_bytes(log[:length])
        found = rows_by_image(folder)
        assert found == rows_by_sqlite(folder, tmp_path / "scratch")
        counts.add(len(found))
    assert len(counts) > 3


def test_a_log_with_a_flipped_bit_counts_up_to_the_frame_before_it(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    folder = copied(tmp_path / "db", tmp_path / "copy")
    log = (folder / f"{NAME}-wal").read_bytes()
    choice = random.Random(7)
    counts = set()
    for at in [*range(WAL_HEADER.size), *(choice.randrange(len(log)) for _ in range(60))]:
        damaged = bytearray(log)
        damaged[at] ^= 1 << choice.randrange(8)
        (folder / f"{NAME}-wal").write_bytes(damaged)
        found = rows_by_image(folder)
        assert found == rows_by_sqlite(folder, tmp_path / "scratch"), at
        counts.add(len(found))
    assert len(counts) > 3


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("content", ["rows", "ones"])
def test_a_log_is_summed_as_sqlite_does_in_either_byte_order(
    database: sqlite3.Connection, tmp_path: Path, order: str, content: str
) -> None:
    """Whoever wrote it may have been a machine of the other kind."""
    if content == "ones":  # the largest words there are
        database.executemany("INSERT INTO t (b) VALUES (?)", [(b"\xff" * 3000,)] * 20)
    folder = copied(tmp_path / "db", tmp_path / "copy")
    log = (folder / f"{NAME}-wal").read_bytes()
    (folder / f"{NAME}-wal").write_bytes(summed_again(log, order))
    assert len(rows_of(database)) == len(rows_by_image(folder)) > 50
    assert rows_by_image(folder) == rows_by_sqlite(folder, tmp_path / "scratch") == rows_of(database)
    if order == ("<" if sys.byteorder == "little" else ">"):
        assert (folder / f"{NAME}-wal").read_bytes() == log


@pytest.mark.parametrize("what", ["file", "log"])
def test_an_image_of_two_moments_is_no_image(
    database: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between the reading of log and file the daemon brings the log into the file, and begins it anew."""
    folder = tmp_path / "db"
    real, times = index_image._read_all, 0

    def disturbed(fd: int, path: str, max_bytes: int) -> bytes:
        nonlocal times
        times += 1
        if times == 2:
            fill(database, 3)
            database.execute(f"PRAGMA wal_checkpoint({'PASSIVE' if what == 'file' else 'TRUNCATE'})")
        return real(fd, path, max_bytes)

    monkeypatch.setattr(index_image, "_read_all", disturbed)
    if what == "log":  # the file looks as it did: its times are coarse
        monkeypatch.setattr(index_image, "_state", lambda *_: (0, 0))
    root_fd = os.open(folder, os.O_RDONLY)
    try:
        assert read_image(root_fd, str(folder), NAME, page_bytes=PAGE, max_bytes=LIMIT) is None
    finally:
        os.close(root_fd)
    assert rows_by_image(folder) == rows_of(database)


def test_a_file_or_a_log_over_the_limit_is_not_read(database: sqlite3.Connection, tmp_path: Path) -> None:
    root_fd = os.open(tmp_path / "db", os.O_RDONLY)
    try:
        with pytest.raises(OverflowError, match="more than 4096"):
            read_image(root_fd, str(tmp_path / "db"), NAME, page_bytes=PAGE, max_bytes=PAGE)
    finally:
        os.close(root_fd)


@pytest.mark.parametrize("pages", [0xFFFF_FFFF, LIMIT // PAGE + 1, LIMIT // PAGE])
def test_a_log_that_says_that_there_are_more_pages_than_in_file_and_log_is_refused(
    database: sqlite3.Connection, tmp_path: Path, pages: int
) -> None:
    folder = copied(tmp_path / "db", tmp_path / "copy")
    (folder / f"{NAME}-wal").write_bytes(one_frame_log((folder / NAME).read_bytes()[:PAGE], pages))
    with pytest.raises(OverflowError, match=f"{pages} pages"):
        rows_by_image(folder)


def test_a_log_that_is_a_link_is_refused(database: sqlite3.Connection, tmp_path: Path) -> None:
    folder = copied(tmp_path / "db", tmp_path / "copy")
    (folder / f"{NAME}-wal").rename(tmp_path / "elsewhere")
    (folder / f"{NAME}-wal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        rows_by_image(folder)
