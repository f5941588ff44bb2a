"""The index as one piece of bytes: its file with what the write-ahead log has committed since, without opening either.

Owns the form of SQLite's log, and the copy that is of one moment though a daemon writes. Knows nothing of tables.

Why not let SQLite read it: a reader takes part in the log. It leaves files behind, and a checkpoint of the daemon
waits for it. Why the log at all: a row that stands only there names an acknowledged version. Without it, one whose
file is lost would look like one that was deleted, or that never was.

Rules:
- A frame counts once its checksum, and those of all before it, are right and a commit follows it: SQLite's own rule.
- The log is read first. What a checkpoint brings into the file meanwhile is in the log that was read, or shows in the
  file's state; a log that was begun anew meanwhile shows in its header. Either way the copy is taken again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..disk.paths import closing_fd, open_file, read_at, read_up_to, stat_name, stat_open

WAL_SUFFIX: Final = "-wal"
WAL_HEADER: Final = struct.Struct(">IIIIQII")
"""Magic, format, page bytes, checkpoints, both salts, both checksums of what stands before them."""
WAL_FRAME: Final = struct.Struct(">IIQII")
"""Page number, the file's pages if the frame ends a commit (else 0), both salts, both checksums."""

JOURNAL_MODES: Final = slice(18, 20)
"""Where the file's first page says how changes of it are kept."""
WITH_LOG: Final = b"\2\2"
"""In a log, which a copy has none of."""

_WAL_MAGIC: Final = 0x377F0682  # the last bit says that checksums are of big-endian words
_MASK: Final = 0xFFFFFFFF
_SUMMED_OF_HEADER: Final = range(WAL_HEADER.size // 8 - 1)
_STEPS_WITHOUT_CARRY: Final = 16  # a step takes less than 1.4 bits, and 32 are free


_Order = Literal["little", "big"]


@dataclass(frozen=True, slots=True)
class IndexImage:
    """What an index is: `data` with what the log commits in it, `file_data` without. Bytes of whole pages.

    `in_log` are the pages that commits in the log have changed, and how many pages there are by it; 0 if there is none.
    """

    data: bytearray
    file_data: bytes
    in_log: tuple[Collection[int], int]


def read_image(root_fd: int, store_path: str, file_name: str, *, page_bytes: int, max_bytes: int) -> IndexImage | None:
    """The index as it is at one moment; None where a daemon changed it while it was read. Writes nothing.

    Raises:
        FileNotFoundError: there is no file. UnsafePath, StoreIoError.
        OverflowError: the file, or the log, has more than `max_bytes`, or the file would have with the log in it.
    """
    path = f"{store_path}/{file_name}"
    with closing_fd(open_file(root_fd, file_name, os.O_RDONLY, path)) as fd:
        before = _state(fd, path)
        log = _read_log(root_fd, store_path, file_name, max_bytes)
        file_data = _read_all(fd, path, max_bytes)
        replaced = stat_name(root_fd, file_name, path).st_ino != stat_open(fd, path).st_ino
        if replaced or _state(fd, path) != before or not _is_still(log, root_fd, store_path, file_name):
            return None
    data = bytearray(file_data)
    pages, count = committed_pages(log, page_bytes)
    if count * page_bytes > min(max_bytes, len(file_data) + len(log)):  # a page that is new is in the log
        raise OverflowError(f"by its log {path} has {count} pages, more than there can be")
    if count:
        data = data[: count * page_bytes].ljust(count * page_bytes, b"\0")
        for page, at in pages.items():
            if page <= count:
                data[(page - 1) * page_bytes : page * page_bytes] = log[at : at + page_bytes]
    if data[JOURNAL_MODES] == WITH_LOG:
        data[JOURNAL_MODES] = b"\1\1"
    return IndexImage(data, file_data, (pages.keys(), count))


def committed_pages(log: bytes, page_bytes: int) -> tuple[dict[int, int], int]:
    """Where in the log the last committed state of each page begins, and how many pages the file has then; nothing
    where no commit is whole."""
    pages: dict[int, int] = {}
    waiting: dict[int, int] = {}
    count = 0
    for page, pages_of_file, at in _frames(log, page_bytes):
        waiting[page] = at
        if pages_of_file:
            pages.update(waiting)
            waiting.clear()
            count = pages_of_file
    return pages, count


def _frames(log: bytes, page_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Page, pages of the file or 0, and where the page's bytes begin, of each frame before the first broken one."""
    if len(log) < WAL_HEADER.size:
        return
    magic, _, found_bytes, _, salts, *expected = WAL_HEADER.unpack_from(log)
    if magic & ~1 != _WAL_MAGIC or found_bytes != page_bytes:
        return
    order: _Order = "big" if magic & 1 else "little"
    [sums] = _sums(memoryview(log)[: WAL_HEADER.size], WAL_HEADER.size, _SUMMED_OF_HEADER, order)
    if sums != tuple(expected):
        return
    size = WAL_FRAME.size + page_bytes
    heads = list(itertools.takewhile(lambda head: head[0] and head[2] == salts, _heads(log, size)))  # others are older
    frames = memoryview(log)[WAL_HEADER.size : WAL_HEADER.size + len(heads) * size]
    summed = [0, *range(WAL_FRAME.size // 8, size // 8)]
    one, both, other = _weights(len(summed))
    begin = WAL_HEADER.size + WAL_FRAME.size
    for (page, pages_of_file, _, *expected), (first, second) in zip(
        heads, _sums(frames, size, summed, order), strict=True
    ):
        sums = (one * sums[0] + both * sums[1] + first) & _MASK, (both * sums[0] + other * sums[1] + second) & _MASK
        if sums != tuple(expected):
            return
        yield page, pages_of_file, begin
        begin += size


def _heads(log: bytes, size: int) -> Iterator[tuple[int, ...]]:
    for at in range(WAL_HEADER.size, len(log) - size + 1, size):
        yield WAL_FRAME.unpack_from(log, at)


def _sums(data: memoryview, size: int, summed: Sequence[int], order: _Order) -> list[tuple[int, int]]:
    """SQLite's checksum, begun at zero, of each piece of `size` bytes: of those of its 8 bytes that `summed` counts.

    All pieces at once, each in 64 bits of one large number. One after the other, in Python, takes ten times as long.
    """
    count = len(data) // size
    words = data.cast("Q")
    low = int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * count, "little")
    first = second = 0
    for number, word in enumerate(summed, 1):
        pair = int.from_bytes(words[word :: size // 8].tobytes(), order)
        one, other = (pair & low, pair >> 32 & low) if order == "little" else (pair >> 32 & low, pair & low)
        first += one + second
        second += other + first
        if number % _STEPS_WITHOUT_CARRY == 0:
            first, second = first & low, second & low
    firsts, seconds = ((each & low).to_bytes(8 * count, order) for each in (first, second))
    form = f"{'<' if order == 'little' else '>'}{count}Q"
    return list(zip(struct.unpack(form, firsts), struct.unpack(form, seconds), strict=True))


def _weights(steps: int) -> tuple[int, int, int]:
    """What both sums before so many steps of 8 bytes add to both sums after them: first to first, each to the other,
    second to second."""
    one, both, other = 1, 0, 1
    for _ in range(steps):
        one, both, other = (one + both) & _MASK, (both + other) & _MASK, (both + 2 * other) & _MASK
    return one, both, other


def _read_log(root_fd: int, store_path: str, file_name: str, max_bytes: int) -> bytes:
    with _opened_log(root_fd, store_path, file_name) as (fd, path):
        return b"" if fd is None else _read_all(fd, path, max_bytes)


def _is_still(log: bytes, root_fd: int, store_path: str, file_name: str) -> bool:
    """Whether the log has not begun anew since it was read: it may only have grown."""
    with _opened_log(root_fd, store_path, file_name) as (fd, path):
        return not log or (fd is not None and read_at(fd, 0, WAL_HEADER.size, path) == log[: WAL_HEADER.size])


@contextlib.contextmanager
def _opened_log(root_fd: int, store_path: str, file_name: str) -> Iterator[tuple[int | None, str]]:
    path = f"{store_path}/{file_name}{WAL_SUFFIX}"
    try:
        fd = open_file(root_fd, file_name + WAL_SUFFIX, os.O_RDONLY, path)
    except FileNotFoundError:
        yield None, path
        return
    with closing_fd(fd):
        yield fd, path


def _read_all(fd: int, path: str, max_bytes: int) -> bytes:
    if stat_open(fd, path).st_size > max_bytes:
        raise OverflowError(f"{path} has more than {max_bytes} bytes")
    return read_up_to(fd, max_bytes, path)


def _state(fd: int, path: str) -> tuple[int, int]:
    status = stat_open(fd, path)
    return status.st_size, status.st_mtime_ns
