"""What the store has of all namespaces in one: equal blocks lie in it once, whoever wrote them. So a number of bytes or
blocks can tell that another namespace has the same words, and who may know of one namespace alone is not told any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OF_ALL: Final = frozenset(
    (
        *("blocks_new", "blocks_reused", "bundle_bytes", "bytes_freed", "bytes_read", "bytes_written"),
        *("problem", "problems", "problems_left_out", "unreadable", "written_bytes"),
        *("alone_bytes", "beside_bytes", "shared_bytes", "stored_bytes"),
        "request",
        *("codec", "pack", "read_ns", "sessions_needing", "versions_needing"),
    )
)
"""The fields of results that depend on what other namespaces have stored, and how often they have asked."""


def without_others(told: Any) -> Any:
    """A result's map without the fields `OF_ALL`, on any level."""
    if isinstance(told, Mapping):
        return {name: without_others(value) for name, value in told.items() if name not in OF_ALL}
    return [without_others(each) for each in told] if isinstance(told, list | tuple) else told
