"""The backend: device, BLAS and versions. Kept with every snapshot, and compared when it wakes. KV woken on another
backend is the same to the bit, but results computed from it may differ in the last bits. So these parts of the identity
may differ (`snapshot/identity.py`).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import mlx.core as mx

from ... import __version__
from ...snapshot.blas import library_in_use
from ...snapshot.identity import MAX_CIRCUMSTANCE_CHARS

# Names of CUDA 12 wheels end in -cu12; those of CUDA 13 may have another end, or none.
_NVIDIA_LIBRARY = re.compile(r"nvidia-(?:cuda-)?(cublas|cudnn|nvrtc)(?:-cu\d+)?")
# Settings of MLX that change the bits a GPU computes; without effect on a CPU.
_GPU_SETTINGS = ("MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA")


def describe(adapter: Path | None = None) -> dict[str, str]:
    """The facts as text, by the names of their parts. adapter: the folder of the model's adapter, if it has one."""
    device = _device()
    on_cuda = device == "cuda"
    libraries = _nvidia_libraries() if on_cuda else library_in_use()
    settings = [] if device == "cpu" else [f"{name}={os.environ[name]}" for name in _GPU_SETTINGS if name in os.environ]
    facts = {
        "device": device,
        "blas": ", ".join([libraries or "as shipped", *settings])[:MAX_CIRCUMSTANCE_CHARS],
        "processor": (_gpu() if on_cuda else _processor())[:MAX_CIRCUMSTANCE_CHARS],
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "numpy": importlib.metadata.version("numpy"),
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


def _gpu() -> str:
    """The GPU's name and architecture: MLX chooses kernels by it."""
    info = mx.device_info()
    return ", ".join(str(info[key]) for key in ("device_name", "architecture") if key in info) or "not named"


def _nvidia_libraries() -> str:
    """The libraries that compute for MLX on CUDA, with versions; empty if no Python package has them."""
    versions = {}
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"]).lower().replace("_", "-")
        if match := _NVIDIA_LIBRARY.fullmatch(name):
            versions[match[1]] = package.version
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _processor() -> str:
    """The processor's name, and how many of its cores this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{named or platform.processor() or platform.machine()} x {cores}"
