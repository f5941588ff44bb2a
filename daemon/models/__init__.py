"""Models and adapters in memory: their files, chat template, canary, and how fast they are."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
