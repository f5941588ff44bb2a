"""Model state to blocks and back: capture, restore, identity. Knows nothing of sockets or processes."""

from .blas import load_fast_blas
from .open_files import limit_kept

# Must happen before the first import of mlx.core, which every other module of this folder does.
load_fast_blas()
with limit_kept():
    import mlx_lm as mlx_lm
