"""Shared by commands: options, input, consent, and the ways to a daemon or a store."""
