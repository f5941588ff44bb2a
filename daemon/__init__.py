"""Models, sessions and the engine. Knows nothing of wire formats or argv.

The `__init__` of each folder that uses MLX imports the snapshot folder first: it chooses the BLAS of mlx.core. `api`
does not, so that clients can import it.
"""
