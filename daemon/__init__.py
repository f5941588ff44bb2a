"""Models, sessions and the engine. Knows nothing of wire formats or argv.

The `__init__` of each folder that uses MLX imports the snapshot folder first: it chooses the BLAS of mlx.core. `api`
and `tasks` do not, so that clients and the server of the socket can import them.
"""
