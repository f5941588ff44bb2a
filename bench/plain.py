"""Plain system calls for the same bytes: what a store's times stand beside. Nothing here checks what it reads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torpor.memvid.disk.durable import sync_file

_IOVECS = 512
_SAMPLES = 64
_PAGE = 4096


def write_and_flush(path: Path, batches: Iterable[Sequence[memoryview]]) -> tuple[float, float]:
    """Write all buffers into a new file and flush it: (seconds in all, seconds of them in the flush)."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for batch in batches:
            _all_of(os.writev, fd, batch)
        written = time.perf_counter()
        sync_file(fd, str(path))
    finally:
        os.close(fd)
    ended = time.perf_counter()
    return ended - started, ended - written


def read_at(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill the buffers from this place of a file on."""

    def read(fd: int, waiting: Sequence[memoryview]) -> int:
        nonlocal offset
        count = os.preadv(fd, list(waiting), offset)
        offset += count
        return count

    _all_of(read, fd, buffers)


def drop_from_cache(path: Path) -> bool:
    """Ask the system to forget a flushed file's pages; whether a look at some of them found none still there.

    Below the system there may be caches more (of the disk, of a virtual machine's host) that nothing here empties.
    """
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size, page = os.fstat(fd).st_size, memoryview(bytearray(1))
        cached = 0
        for place in range(0, size, max(_PAGE, size // _SAMPLES)):
            with contextlib.suppress(OSError):  # would have to wait for the disk
                cached += os.preadv(fd, [page], place, os.RWF_NOWAIT)
        return cached == 0
    finally:
        os.close(fd)


def settle() -> None:
    """Let what earlier rounds left for the disk be done before the clock runs again."""
    os.sync()


def _all_of(call: object, fd: int, buffers: Sequence[memoryview]) -> None:
    assert callable(call)
    waiting, done = [buffer for buffer in buffers if buffer.nbytes], 0
    while done < len(waiting):
        count = call(fd, waiting[done : done + _IOVECS])
        if not count:
            raise EOFError("the file is shorter than what was to be read")
        while done < len(waiting) and count >= waiting[done].nbytes:
            count -= waiting[done].nbytes
            done += 1
        if count:
            waiting[done] = waiting[done][count:]
