"""Where a forked or folded session comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...memvid.limits import MAX_TOKENS, MAX_VERSION
from ...memvid.store import IndexRow

FORKED_FROM = "forked_from"
"""Under which the session map of a fork tells the origin."""

FOLDED_FROM = "folded_from"
"""Under which that of a session which began with a summary of another does."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The version that a session was forked from, and how many of its tokens the session began with; or the one that it
    was folded from, and how many tokens its summary is of."""

    session: str
    version: int
    bundle_id: str
    tokens: int

    @classmethod
    def of(cls, row: IndexRow, tokens: int) -> Origin:
        """At so many tokens of the version of an index row."""
        return cls(str(row.uri), row.version, row.bundle_id.hex(), tokens)

    def to_map(self) -> dict[str, Any]:
        """What the session map keeps."""
        return asdict(self)

    @classmethod
    def from_map(cls, stored: object) -> Origin | None:
        """Read what `to_map` kept; None where there is none.

        Raises:
            ValueError: it is not what `to_map` makes.
        """
        if stored is None:
            return None
        kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
        if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
            raise ValueError("it has not the fields of an origin")
        if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
            raise ValueError("the origin has a version or a number of tokens that cannot be")
        return cls(**stored)
