"""What every figure is printed with: the machine, the versions, and the spread of the runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torpor", "mlx", "mlx-lm", "numpy", "blake3", "msgpack", "zstandard"),
    *("llguidance", "starlette", "uvicorn", "httptools"),
)


def describe() -> dict[str, Any]:
    """The machine and the versions, as plain data. load_average: processes that wanted a core in the last five minutes,
    the benchmark among them. gpu: None where a CPU computes."""
    return {
        "gpu": gpu_name(),
        "processor": processor_name(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[1],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, lowest and highest of repeated runs."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "runs": len(values),
    }


def gpu_name() -> str | None:
    """The GPU that computes, if one does."""
    import mlx.core as mx  # not above: torpor, which chooses the BLAS, may yet have to be imported

    if mx.default_device() == mx.Device(mx.cpu):
        return None
    return str(mx.device_info().get("device_name", "GPU"))


def processor_name() -> str:
    """The processor as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
