"""What is not told to who may know of one namespace alone.

The store has equal blocks once, whoever wrote them: so a number of bytes or blocks can tell that another namespace has
the same words. And a session may come from one of another namespace, whose name, id and tokens are not its own. A
manifest tells all of it, in one text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

OF_ALL: Final = frozenset(
    (
        *("blocks_new", "blocks_reused", "bundle_bytes", "bytes_freed", "bytes_read", "bytes_written"),
        *("problem", "problems", "problems_left_out", "unreadable", "written_bytes"),
        *("alone_bytes", "beside_bytes", "shared_by", "shared_bytes", "stored_bytes"),
        "manifest",
        "request",
        *("codec", "pack", "read_ns", "sessions_needing", "versions_needing"),
        "lineage",
    )
)
"""The fields of results that depend on what other namespaces have stored, and how often they have asked. The line of a
fork ends with the id of a version of another session."""

LEFT_OUT: Final = OF_ALL | {"parent"}
"""The fields that an answer may lack."""

_NAME: Final = re.compile(r"torpor://([A-Za-z0-9._-]+)/[A-Za-z0-9._-]+", re.ASCII)


def without_others(told: Any, namespace: str | None) -> Any:
    """A result's map without the fields `OF_ALL`, on any level, and with None for each map and each name of a session
    of another namespace. namespace: None where all may be named; else the id of a parent, which may be another one's,
    is told by a history alone, which knows whose it is."""
    if isinstance(told, Mapping):
        if _is_others(told.get("session"), namespace):
            return None
        is_id = isinstance(told.get("parent"), str)  # else the number of a branch
        hidden = OF_ALL if namespace is None or "way" in told or not is_id else LEFT_OUT
        return {name: without_others(value, namespace) for name, value in told.items() if name not in hidden}
    if isinstance(told, list | tuple):
        return [without_others(each, namespace) for each in told]
    return None if _is_others(told, namespace) else told


def _is_others(value: Any, namespace: str | None) -> bool:
    """Whether it is the name of a session of another namespace, and no text that begins with one."""
    named = _NAME.fullmatch(value) if namespace is not None and isinstance(value, str) else None
    return named is not None and named[1] != namespace
