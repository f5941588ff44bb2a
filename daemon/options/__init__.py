"""The options of a daemon, each declared once, and the forms of their values. Imports no MLX, no engine and no parser:
the commands and the daemon share it.
"""
