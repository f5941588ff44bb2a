"""Shared by both ends: the socket's address, frames, messages and methods."""
