"""Memory that is about to be filled, in large pages where the system has them at hand.

Fresh memory is given page by page as it is first touched, and for a wake of hundreds of megabytes that is most of the
work: a hundred thousand faults of a microsecond and more. Linux gives 2 MiB at once where it is asked to (`madvise`),
in a tenth of the time. But not always: where free memory has to be brought together first, or a virtual machine's host
has taken it back, one large page takes longer than all the small ones it stands for. So each is timed, and the first
slow one ends it for that wake.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

_SIZE_FILE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE: Final = 14
_MOST_BYTES: Final = 32 << 20
"""A large page of more than this (on systems whose small pages are large) is more than an array has room for."""

SLOW_SECONDS: Final = 1e-3
"""Of the processor, for one large page. Zeroing 2 MiB takes a tenth of it, 512 faults about as long as this."""


class LargePages:
    """What one wake asks for; several threads may ask at once. Whatever fails changes nothing but the time."""

    def __init__(self) -> None:
        self._size = _page_bytes()
        self._advise = _madvise()
        self.given = 0
        self.is_slow = self._size is None or self._advise is None

    def back(self, array: mx.array) -> None:
        """Touch the array's memory, a byte of each large page that lies in it whole. Its bytes stay undefined: it is
        from `memory.unfilled`, and nothing has been written into it."""
        if self.is_slow or self._size is None or self._advise is None:
            return
        start = np.asarray(cast(Any, array)).ctypes.data
        for page in range(-(-start // self._size) * self._size, start + array.nbytes - self._size + 1, self._size):
            if self.is_slow or self._advise(page, self._size, _MADV_HUGEPAGE) != 0:
                return
            started = time.thread_time()
            ctypes.memset(page, 0, 1)  # lets go of the interpreter's lock, unlike a write through a view
            self.given += 1
            self.is_slow = self.is_slow or time.thread_time() - started > SLOW_SECONDS


def _page_bytes() -> int | None:
    """Bytes of a large page; None where the system has none to give."""
    try:
        size = int(_SIZE_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return size if 0 < size <= _MOST_BYTES else None


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return cast(Callable[[int, int, int], int], madvise)
