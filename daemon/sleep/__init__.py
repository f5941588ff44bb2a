"""From memory to the store and back: sleep, wake, ledgers, recomputation, forks, fewer bits."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
