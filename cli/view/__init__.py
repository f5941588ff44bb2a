"""Writing to a terminal or a pipe."""
