"""The daemon's requests and answers: a record each, by family, and the table of verbs.

Imports nothing of the daemon but its errors, and no MLX: clients and the wire share it.
"""
