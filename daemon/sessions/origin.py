"""The entries of a session map for the origin of a forked or folded session, and for its recomputed part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...memvid.limits import MAX_TOKENS, MAX_VERSION
from ...memvid.store import IndexRow
from ..api.session import Origin, Recomputed

FORKED_FROM = "forked_from"
"""The key of a fork's origin in its session map."""

FOLDED_FROM = "folded_from"
"""The key of a fold's origin."""


def origin_of(row: IndexRow, tokens: int) -> Origin:
    """The origin at a token of a stored version."""
    return Origin(str(row.uri), row.version, row.bundle_id.hex(), tokens)


def origin_in(stored: object) -> Origin | None:
    """Read an origin from a session map (`asdict` of it), or None. Raises ValueError: it is no such map."""
    if stored is None:
        return None
    kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError("it has not the fields of an origin")
    if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
        raise ValueError("the origin has a version or a number of tokens that cannot be")
    return Origin(**stored)


RECOMPUTED = "recomputed"
"""The key of the recomputed part, in its version and all that go on from it."""

_DAMAGED = "damaged"
"""An entry that is written only if it is false."""


def map_of_recomputed(told: Recomputed) -> dict[str, Any]:
    return {name: value for name, value in asdict(told).items() if name != _DAMAGED or not value}


def recomputed_in(stored: object) -> Recomputed | None:
    """Read the map of `map_of_recomputed`, or None. Raises ValueError: it is no such map."""
    if stored is None:
        return None
    kinds: dict[str, type] = {"version": int, "start": int, "tokens": int, "same_logits": bool}
    if type(stored) is dict and _DAMAGED in stored:
        kinds |= {_DAMAGED: bool}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError(f"{RECOMPUTED} is not what was computed again")
    if not (1 <= stored["version"] <= MAX_VERSION and 0 <= stored["start"] < MAX_TOKENS):
        raise ValueError(f"{RECOMPUTED} has a version or a position that cannot be")
    if not 1 <= stored["tokens"] <= MAX_TOKENS - stored["start"]:
        raise ValueError(f"{RECOMPUTED} has a number of tokens that cannot be")
    return Recomputed(**stored)
