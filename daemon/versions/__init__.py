"""Versions of sessions: what each says, the one writer of them, turns that count before one is there, and wakes."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
