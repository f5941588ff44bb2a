"""The entries of a session map for the origin of a forked or folded session, and for the part of a session that was
computed again instead of being read from its blocks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...memvid.limits import MAX_TOKENS, MAX_VERSION
from ...memvid.store import IndexRow
from ..api.session import Origin, Recomputed

FORKED_FROM = "forked_from"
"""Under which the session map of a fork tells the origin."""

FOLDED_FROM = "folded_from"
"""Under which that of a session which began with a summary of another does."""


def origin_of(row: IndexRow, tokens: int) -> Origin:
    """At so many tokens of the version of an index row."""
    return Origin(str(row.uri), row.version, row.bundle_id.hex(), tokens)


def origin_in(stored: object) -> Origin | None:
    """Read what the session map keeps, `asdict` of an origin; None where there is none. Raises ValueError: it is no
    such map."""
    if stored is None:
        return None
    kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError("it has not the fields of an origin")
    if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
        raise ValueError("the origin has a version or a number of tokens that cannot be")
    return Origin(**stored)


RECOMPUTED = "recomputed"
"""Under which the session map tells it, in the version that was made so and in all that go on from it."""

_DAMAGED = "damaged"
"""The entry that is there only where it is false."""


def map_of_recomputed(told: Recomputed) -> dict[str, Any]:
    """The entry of the session map."""
    return {name: value for name, value in asdict(told).items() if name != _DAMAGED or not value}


def recomputed_in(stored: object) -> Recomputed | None:
    """Read what `map_of_recomputed` made; None where nothing of the session was computed again. Raises ValueError: it
    is no such map."""
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
