"""Whether a model's caches hold keys and values as numbers of the computing type, or quantised, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .layout import CacheEntry, CacheLayout

PLAIN: Final = "float"
KV_BITS: Final = (8, 4)
KV_GROUPS: Final = (32, 64, 128)
DEFAULT_KV_GROUP: Final = 64


@dataclass(frozen=True, slots=True)
class KvChoice:
    """How keys and values are quantised as they are computed: bits a number, and how many numbers share a scale."""

    bits: int
    group_size: int = DEFAULT_KV_GROUP


def kv_format_of(layout: CacheLayout) -> str:
    """`float`, or bits and group size as in `q8g64`; several, joined by `+`, where the caches differ."""
    return "+".join(sorted({_format_of(entry) for entry in layout.entries if entry.in_use})) or PLAIN


def _format_of(entry: CacheEntry) -> str:
    settings = dict(entry.settings)
    return f"q{settings['bits']}g{settings['group_size']}" if "bits" in settings else PLAIN
