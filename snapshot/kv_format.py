"""Whether a model's caches hold keys and values as numbers of the computing type, or quantised, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .layout import CacheEntry, CacheLayout

PLAIN: Final = "float"
KV_BITS: Final = (8, 4)
KV_GROUPS: Final = (32, 64, 128)
DEFAULT_KV_GROUP: Final = 64
_QUANTISED: Final = re.compile(r"q([0-9]+)g([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class KvChoice:
    """How keys and values are quantised as they are computed: bits a number, and how many numbers share a scale."""

    bits: int
    group_size: int = DEFAULT_KV_GROUP


def kv_format_of(layout: CacheLayout) -> str:
    """`float`, or bits and group size as in `q8g64`; several, joined by `+`, where the caches differ."""
    return "+".join(sorted({_format_of(entry) for entry in layout.entries if entry.in_use})) or PLAIN


def serving(kv_format: str, model: str) -> str | None:
    """The options of a daemon in which this model keeps its KV so: a part of a sentence. None where no option gives
    that."""
    quantised = [part for part in kv_format.split("+") if part != PLAIN]
    if not quantised:
        return f"without --kv-bits for {model}"
    found = _QUANTISED.fullmatch(quantised[0])
    if len(quantised) > 1 or found is None or int(found[1]) not in KV_BITS or int(found[2]) not in KV_GROUPS:
        return None
    return f"with --kv-bits {model}={found[1]} --kv-group {model}={found[2]}"


def _format_of(entry: CacheEntry) -> str:
    settings = dict(entry.settings)
    return f"q{settings['bits']}g{settings['group_size']}" if "bits" in settings else PLAIN
