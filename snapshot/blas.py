"""Gives MLX on Linux a fast BLAS, and says which one it has.

The CPU wheel of MLX links netlib's reference BLAS. It calls plain `cblas_sgemm`, so a library that is in the global
symbol scope first takes over: about 60 times the speed for float32 products. That has to happen before the first import
of `mlx.core`, so this module imports nothing of MLX, and the packages that use MLX call `load_fast_blas` from their
`__init__`. On macOS (Accelerate, Metal) and with MLX's CUDA build nothing is done.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In order of preference. NumPy's and SciPy's own OpenBLAS have prefixed symbols and do not serve.
_CANDIDATES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libmkl_rt.so.2", "libblis.so.4")
_CUDA_WHEELS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_MLX_LIBRARY = "libmlx.so"
OVERRIDE_VARIABLE = "TORPOR_BLAS"
HOW_TO_GET_IT = {
    "apt-get": "apt-get install libopenblas0-pthread",
    "dnf": "dnf install openblas-threads",
    "pacman": "pacman -S openblas",
    "apk": "apk add openblas",
    "zypper": "zypper install libopenblas_pthreads0",
}


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """The result: `library` is the soname or path that was loaded, None if none was."""

    library: str | None
    reason: str


def load_fast_blas() -> BlasChoice:
    """Put a full CBLAS into the global symbol scope if this platform needs one. Idempotent.

    `TORPOR_BLAS` names the library to use; `TORPOR_BLAS=reference` keeps the one of MLX.
    """
    global _choice
    if _choice is None:
        _choice = _choose()
    return _choice


def library_in_use() -> str | None:
    """The path of the library with `cblas_sgemm` in the global scope; None if there is none, which on Linux means MLX's
    own reference BLAS."""
    try:
        symbol = ctypes.CDLL(None).cblas_sgemm
    except (AttributeError, OSError):
        return None
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.dli_fname) if found and info.dli_fname else None


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


_choice: BlasChoice | None = None


def _choose() -> BlasChoice:
    if sys.platform != "linux":
        return BlasChoice(None, "not needed on this platform")
    if _has_cuda_wheel():
        return BlasChoice(None, "not needed by the CUDA build of MLX")
    if "mlx.core" in sys.modules:
        return BlasChoice(None, "mlx was imported before torpor, too late to change its BLAS")
    override = os.environ.get(OVERRIDE_VARIABLE)
    if override == "reference":
        return BlasChoice(None, f"{OVERRIDE_VARIABLE}=reference keeps the BLAS that MLX ships")
    for candidate in iter([override]) if override else _candidates():
        if _provides_cblas(candidate):
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return BlasChoice(candidate, f"{candidate} loaded ahead of the reference BLAS that MLX ships")
    wanted = override or "OpenBLAS"
    return BlasChoice(None, f"{wanted} not found: float32 products run on MLX's reference BLAS, about 60 times slower")


def _candidates() -> Iterator[str]:
    yield from _CANDIDATES
    # last, because it starts processes
    found = ctypes.util.find_library("openblas")
    if found is not None and found not in _CANDIDATES:
        yield found


def _provides_cblas(library: str) -> bool:
    # privately first: a library without CBLAS must not reach the global scope
    try:
        return hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL), "cblas_sgemm")
    except OSError:
        return False


def _has_cuda_wheel() -> bool:
    """Whether MLX computes with the library of a CUDA wheel."""
    return any(is_in_place for _, is_in_place in _cuda_wheels())


def replaced_cuda_wheel() -> str | None:
    """The name of an installed CUDA wheel whose library another wheel has replaced."""
    found = list(_cuda_wheels())
    return None if any(is_in_place for _, is_in_place in found) else next((name for name, _ in found), None)


def _cuda_wheels() -> Iterator[tuple[str, bool]]:
    """Each installed CUDA wheel, and whether its library is in place. The CPU wheel's library has the same path, so the
    wheel that was installed last computes."""
    for name in _CUDA_WHEELS:
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name, all(_is_in_place(file) for file in files if file.name == _MLX_LIBRARY)


def _is_in_place(file: importlib.metadata.PackagePath) -> bool:
    """Whether a wheel's file has the size in its list; without a size there, yes."""
    try:
        return file.size is None or Path(str(file.locate())).stat().st_size == file.size
    except OSError:
        return False
