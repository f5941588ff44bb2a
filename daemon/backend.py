"""What computes here: versions, device and BLAS. Kept with every snapshot for people who compare results later.

KV that is woken elsewhere is the same to the bit; what another backend computes from it may differ in the last ones.
"""

from __future__ import annotations

import importlib.metadata

import mlx.core as mx

from ..snapshot.blas import library_in_use


def describe() -> dict[str, str]:
    """The facts, as text."""
    return {
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "device": str(mx.default_device()),
        "blas": library_in_use() or "as shipped",
    }
