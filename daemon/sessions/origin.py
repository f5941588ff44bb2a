"""How a session map keeps where a forked or folded session comes from."""

from __future__ import annotations

from ...memvid.limits import MAX_TOKENS, MAX_VERSION
from ...memvid.store import IndexRow
from ..api.session import Origin

FORKED_FROM = "forked_from"
"""Under which the session map of a fork tells the origin."""

FOLDED_FROM = "folded_from"
"""Under which that of a session which began with a summary of another does."""


def origin_of(row: IndexRow, tokens: int) -> Origin:
    """At so many tokens of the version of an index row."""
    return Origin(str(row.uri), row.version, row.bundle_id.hex(), tokens)


def origin_in(stored: object) -> Origin | None:
    """Read what the session map keeps, `asdict` of an origin; None where there is none.

    Raises:
        ValueError: it is no such map.
    """
    if stored is None:
        return None
    kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError("it has not the fields of an origin")
    if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
        raise ValueError("the origin has a version or a number of tokens that cannot be")
    return Origin(**stored)
