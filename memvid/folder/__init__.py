"""The folder of a store: its manifests and packs, its journal, tags and pins, and small files. Knows no content."""
