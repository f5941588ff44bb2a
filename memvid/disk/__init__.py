"""The system's calls on files: flushes, locks, paths that cannot escape, the I/O budget, small sealed JSON files.

Knows no block, no bundle and no store."""
