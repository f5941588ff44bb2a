"""What computes here: device, BLAS and versions. Kept with every snapshot, and compared when it wakes.

KV that is woken elsewhere is the same to the bit; what another backend computes from it may differ in the last ones. So
these are the parts of the identity that may differ (`snapshot/identity.py`).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import mlx.core as mx

from ... import __version__
from ...snapshot.blas import library_in_use
from ...snapshot.identity import MAX_CIRCUMSTANCE_CHARS


def describe(adapter: Path | None = None) -> dict[str, str]:
    """The facts, as text, under the names of their parts. adapter: the folder of the model's, if it has one."""
    facts = {
        "device": _device(),
        "blas": library_in_use() or "as shipped",
        "processor": _processor()[:MAX_CIRCUMSTANCE_CHARS],
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "torpor": __version__,
    }
    if adapter is not None:
        facts["adapter_path"] = str(adapter)[:MAX_CIRCUMSTANCE_CHARS]
    return facts


def _device() -> str:
    """The kind of device that MLX computes on: cpu, metal or cuda."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _processor() -> str:
    """The processor as the system names it, and how many of its cores this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{named or platform.processor() or platform.machine()} x {cores}"
