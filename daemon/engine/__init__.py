"""The engine thread, which alone calls MLX: generation, batches, sampling, admission, cancellation."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses its BLAS.
from ... import snapshot as _snapshot  # noqa: F401
