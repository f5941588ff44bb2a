"""`python -m torpor.daemon.doctor`: a report on MLX on this machine, as one JSON object on standard output.

A process of its own, so that the command line, which shows the answer, never imports MLX.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import time
from typing import Any

# Before mlx.core is imported: the snapshot folder chooses its BLAS.
from ..snapshot import blas  # isort: skip

import mlx.core as mx

from .. import __version__
from .upkeep.suspending import why_not

PRODUCT_SIZE = 512
_PRODUCTS = 15
# The reference BLAS reaches about 2 GFLOP/s on any machine, a tuned one far more than this.
FAST_GFLOPS = 20.0
_PACKAGES = ("mlx", "mlx-lm", "numpy", "blake3", "msgpack", "zstandard", "pydantic")


def examine() -> dict[str, Any]:
    """The report: versions, device, BLAS with its measured speed, and advice on a faster one where that helps."""
    choice = blas.load_fast_blas()
    device, rates = _measure()
    gflops = statistics.median(rates)
    on_linux_cpu = sys.platform == "linux" and "cpu" in device
    library = blas.library_in_use() if on_linux_cpu else None
    fast = gflops >= FAST_GFLOPS
    return {
        "torpor": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": device,
        "blas": {
            "library": library,
            "reason": choice.reason,
            "fast": fast,
            "gflops": round(gflops, 1),
            "gflops_lowest": round(min(rates), 1),
            "gflops_highest": round(max(rates), 1),
            "product": f"{PRODUCT_SIZE}x{PRODUCT_SIZE}x{PRODUCT_SIZE} float32",
            "advice": _wheel_advice() or (None if fast or not on_linux_cpu else _advice(library)),
        },
        "suspend": asyncio.run(why_not()),
    }


def main() -> None:
    print(json.dumps(examine(), indent=2))


def _measure() -> tuple[str, list[float]]:
    """The default device, and the rates of single products in GFLOP/s after a warm-up."""
    left, right = (mx.random.normal((PRODUCT_SIZE, PRODUCT_SIZE)) for _ in range(2))
    mx.eval(left, right, left @ right)
    rates = []
    for _ in range(_PRODUCTS):
        started = time.perf_counter()
        mx.eval(left @ right)
        rates.append(2 * PRODUCT_SIZE**3 / (time.perf_counter() - started) / 1e9)
    return str(mx.default_device()), rates


def _wheel_advice() -> str | None:
    wheel = blas.replaced_cuda_wheel()
    if wheel is None:
        return None
    return (
        f"{wheel} is installed, but another wheel of MLX was installed over it, and the GPU is not used. Put it back:"
        f" pip install --force-reinstall --no-deps {wheel}=={_version('mlx')}."
    )


def _advice(library: str | None) -> str:
    if library is not None:
        return (
            f"{library} is loaded in the place of MLX's reference BLAS, and is slow just now. Is the machine busy?"
            " Ask again when it is not."
        )
    manager = next((name for name in blas.HOW_TO_GET_IT if shutil.which(name)), None)
    command = blas.HOW_TO_GET_IT[manager] if manager else "install OpenBLAS with your package manager"
    return f"MLX runs on its slow reference BLAS. Get the fast one: {command}. Then start torpor again."


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
