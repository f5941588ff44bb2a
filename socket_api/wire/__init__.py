"""Shared by both ends: the place of the socket, frames, messages, methods, and the limits of the protocol."""
