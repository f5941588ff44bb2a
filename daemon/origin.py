"""Where a forked session comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..memvid.limits import MAX_TOKENS, MAX_VERSION
from ..memvid.store import IndexRow

FORKED_FROM = "forked_from"
"""Under which the session map tells the origin."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The version that a session was forked from, and how many of its tokens the session began with."""

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
        """Read what `to_map` kept; None for a session that was not forked.

        Raises:
            ValueError: it is not what `to_map` makes.
        """
        if stored is None:
            return None
        kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
        if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
            raise ValueError(f"{FORKED_FROM} is not the origin of a fork")
        if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
            raise ValueError(f"{FORKED_FROM} has a version or a number of tokens that cannot be")
        return cls(**stored)
