"""Torpor: local language-model agents with a memory that survives sleep, crash and reboot."""

__version__ = "0.1.0"
