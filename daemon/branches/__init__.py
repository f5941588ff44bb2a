"""Trees of branches: the futures of one session in memory, their registry, and their steps."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
