"""Frames, messages, methods, and limits of the protocol: what both ends share."""
