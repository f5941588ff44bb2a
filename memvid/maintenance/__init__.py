"""Repack, strip, forget, prune and usage."""
