"""Model state to blocks and back: capture, restore, identity. Knows nothing of sockets or processes."""

from .blas import load_fast_blas
from .open_files import import_mlx_lm

# Must happen before the first import of mlx.core, which every other module of this folder does.
load_fast_blas()
import_mlx_lm()
