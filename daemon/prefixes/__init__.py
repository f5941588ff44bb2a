"""Prefix reuse between sessions, and why a request did or did not profit from it."""
