"""How a terminal or a pipe is written to. Knows no daemon and no store."""
