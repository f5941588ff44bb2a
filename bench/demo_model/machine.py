"""Settings of this machine to be made before mlx is imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from machine import gpu_name, processor_name

# mallopt's names for: keep large blocks off mmap, never trim the heap (each would fault its pages in anew).
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def prepare_cpu() -> None:
    """On Linux: settings for two streams on two cores, and then the package's choice of BLAS, one thread a stream."""
    if sys.platform != "linux":
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "200")  # so that both streams' work is queued early
    # Here, not at the top: OpenBLAS reads its settings when it is loaded.
    from torpor.snapshot.blas import load_fast_blas

    load_fast_blas()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def device_name() -> str:
    """What computes, in words: the GPU's name, or the processor's and how many cores it has."""
    return gpu_name() or f"{processor_name()}, {os.cpu_count()} cores (CPU only)"
