"""Whether a model's caches hold keys and values as numbers of the computing type, or quantised, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

PLAIN = "float"


def kv_format_of(caches: Iterable[Any]) -> str:
    """`float`, or bits and group size as in `q8g64`; several, joined by `+`, where the layers differ."""
    return "+".join(sorted(set(_formats(caches)))) or PLAIN


def _formats(caches: Iterable[Any]) -> Iterator[str]:
    for cache in caches:
        if hasattr(cache, "caches"):  # a list of caches for one layer
            yield from _formats(cache.caches)
        elif hasattr(cache, "bits"):
            yield f"q{cache.bits}g{cache.group_size}"
        else:
            yield PLAIN
