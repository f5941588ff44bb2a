"""Models, sessions and the engine. Knows nothing of wire formats or argv.

What computes with MLX stands in folders whose `__init__` imports the snapshot folder first: it chooses the BLAS that
mlx.core will use. `api` does not, so that clients can import it.
"""
