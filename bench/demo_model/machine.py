"""Settings of this machine to be made before mlx is imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

# mallopt's names for: keep large blocks off mmap, never trim the heap (each would fault its pages in anew).
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def prepare_cpu() -> None:
    """On Linux: takes OpenBLAS before the reference BLAS that mlx's CPU wheel brings, one thread a stream.

    The wheel's own BLAS is some sixty times slower in float32. Without OpenBLAS, or elsewhere, nothing happens.
    """
    if sys.platform != "linux":
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "200")  # so that both streams' work is queued early
    with contextlib.suppress(OSError):
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def device_name() -> str:
    """What computes, in words: the GPU's name, or the processor's and how many cores it has."""
    import mlx.core as mx

    if mx.default_device() != mx.Device(mx.cpu):
        return str(mx.device_info().get("device_name", "GPU"))
    return f"{processor_name()}, {os.cpu_count()} cores (CPU only)"


def processor_name() -> str:
    """The processor as the system names it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
