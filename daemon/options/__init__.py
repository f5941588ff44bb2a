"""The options of a daemon, each declared once, and how a value of one is written.

Knows no MLX, no engine and no parser: the commands and the daemon share it.
"""
