"""Versions in an object store: what others may read, and whose a session is."""
