"""Whether a model's caches hold keys and values as numbers of the computing type, or quantised, and how."""

from __future__ import annotations

from typing import Final

from .layout import CacheEntry, CacheLayout

PLAIN: Final = "float"


def kv_format_of(layout: CacheLayout) -> str:
    """`float`, or bits and group size as in `q8g64`; several, joined by `+`, where the caches differ."""
    return "+".join(sorted({_format_of(entry) for entry in layout.entries if entry.in_use})) or PLAIN


def _format_of(entry: CacheEntry) -> str:
    settings = dict(entry.settings)
    return f"q{settings['bits']}g{settings['group_size']}" if "bits" in settings else PLAIN
