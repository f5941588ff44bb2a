"""Trees of branches as session maps tell of them: `branches/sleeping.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...memvid.errors import InvalidUri
from ...memvid.uri import SessionUri
from ..api.limits import MAX_BRANCHES, MAX_NUMBER

TREE: Final = "tree"
"""The key for where the branches of a tree are, in the map of its root."""

BRANCH: Final = "branch"
"""The key for what a branch had beyond a session, in the map of each of them."""


@dataclass(frozen=True, slots=True)
class Planted:
    """Where one branch of a stored tree is. uri, bundle_id: of its version; version: its number. parent: its place in
    the tree's list."""

    uri: SessionUri
    version: int
    bundle_id: str
    parent: int


def branches_in(session_map: Mapping[str, Any]) -> list[Planted]:
    """The branches of a stored tree but the root, each behind its parent; none for a version that is no tree. Raises
    ValueError: no tree is written so."""
    stored = session_map.get(TREE, [])
    try:
        if len(stored) >= MAX_BRANCHES:
            raise ValueError(f"{len(stored) + 1} branches")
        return [_planted(each, at) for at, each in enumerate(stored, start=1)]
    except (KeyError, TypeError, InvalidUri) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def fork_head_in(session_map: Mapping[str, Any]) -> int:
    """How many tokens a branch had when it was forked; 0 where that is not told."""
    branch = session_map.get(BRANCH)
    head = branch.get("fork_head") if isinstance(branch, Mapping) else None
    return head if type(head) is int and 0 <= head <= MAX_NUMBER else 0


def require_counts(*numbers: object) -> None:
    """Raises ValueError: one is no count."""
    if any(type(each) is not int or not 0 <= each <= MAX_NUMBER for each in numbers):
        raise ValueError(f"numbers {numbers}")


def _planted(stored: Mapping[str, Any], at: int) -> Planted:
    version, bundle_id, parent = stored["version"], stored["bundle"], stored["parent"]
    require_counts(version, parent)
    if type(bundle_id) is not bytes or parent >= at:
        raise ValueError(f"branch {at} has the parent {parent}, and a bundle {type(bundle_id).__name__}")
    return Planted(SessionUri.parse(stored["session"]), version, bundle_id.hex(), parent)
