"""The folder of a store: its bundle files, tags and pins, quarantine, second copies of a bundle, small files.

Changes names and marks, never a bundle's bytes. Knows no index."""
