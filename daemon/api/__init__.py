"""The daemon's requests and answers: a record each, by family, and the table of verbs.

Knows no MLX and no engine, and imports nothing of the daemon but its errors: clients and the wire share it.
"""
