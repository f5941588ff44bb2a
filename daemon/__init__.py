"""Models, sessions and the engine. Knows nothing of wire formats or argv."""

# Before any module of this folder imports mlx.core: the snapshot folder chooses the BLAS that it will use.
from .. import snapshot as _snapshot  # noqa: F401
