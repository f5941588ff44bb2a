"""The index: derived, in memory, with a copy in a file that may vanish at any moment."""
