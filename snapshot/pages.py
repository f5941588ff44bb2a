"""Large pages for memory that is about to be filled, if the system has them at hand.

The system gives fresh memory page by page, at the first touch, and for a wake of hundreds of megabytes that is most of
the work: a hundred thousand faults of a microsecond and more. Linux gives 2 MiB at once on request (`madvise`), in a
tenth of the time. But if free memory must be brought together first, or a virtual machine's host has taken it back, one
large page takes longer than the small ones. So each is timed, and behind the first slow one that wake asks for no more.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

_SIZE_FILE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; an earlier one refuses it, and gives pages as they are filled
_MOST_BYTES: Final = 32 << 20
"""A larger page (on systems whose small pages are large) has no room in an array."""

SLOW_SECONDS: Final = 1e-3
"""Processor time for one large page, above which it is slow. Zeroing 2 MiB takes a tenth of this, and the 512 faults of
small pages about as long."""


class LargePages:
    """The requests of one wake; several threads may ask at once. A failure changes only the time."""

    def __init__(self) -> None:
        self._size = _page_bytes()
        self._system = _system()
        self.is_slow = self._size is None or self._system is None

    def back(self, array: mx.array) -> None:
        """Ask now for each large page that lies whole in the array. Its content stays."""
        if self.is_slow or self._size is None or self._system is None:
            return
        start = np.asarray(cast(Any, array)).ctypes.data
        first = -(-start // self._size) * self._size
        for page in range(first, start + array.nbytes - self._size + 1, self._size):
            if self.is_slow or (page == first and self._system.is_there(page)):
                return  # memory that was in use before is not given again
            started = time.thread_time()
            given = self._system.give(page, self._size)
            self.is_slow = self.is_slow or not given or time.thread_time() - started > SLOW_SECONDS


def _page_bytes() -> int | None:
    """Bytes of a large page; None where the system has none to give."""
    try:
        size = int(_SIZE_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return size if 0 < size <= _MOST_BYTES else None


class _System:
    """The needed calls of Linux, through the C library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._madvise, self._mincore = library.madvise, library.mincore
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

    def is_there(self, address: int) -> bool:
        """Whether the small page at this address has memory."""
        answer = ctypes.create_string_buffer(1)
        return bool(self._mincore(address, 1, answer) == 0 and answer.raw[0] & 1)

    def give(self, address: int, size: int) -> bool:
        """Ask for a large page at this address; False if the system refuses."""
        return all(self._madvise(address, size, advice) == 0 for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE))


@functools.cache
def _system() -> _System | None:
    if sys.platform != "linux":
        return None
    try:
        return _System(ctypes.CDLL(None))
    except (OSError, AttributeError):
        return None
