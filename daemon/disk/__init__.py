"""Work on the store's disk beside requests: the threads for it, and maintenance."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
