"""What was computed again of a session whose blocks were damaged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..memvid.limits import MAX_TOKENS, MAX_VERSION

RECOMPUTED = "recomputed"
"""Under which the session map tells it, in the version that was made so and in all that go on from it."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Keys and values of `tokens` tokens from position `start` were lost with damaged blocks of `version`, and computed
    again from the stored tokens. same_logits: whether the logits behind them are to the bit those that were stored."""

    version: int
    start: int
    tokens: int
    same_logits: bool

    def to_map(self) -> dict[str, Any]:
        """What the session map keeps."""
        return asdict(self)

    @classmethod
    def from_map(cls, stored: object) -> Recomputed | None:
        """Read what `to_map` kept; None for a session of which nothing was computed again.

        Raises:
            ValueError: it is not what `to_map` makes.
        """
        if stored is None:
            return None
        kinds = {"version": int, "start": int, "tokens": int, "same_logits": bool}
        if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
            raise ValueError(f"{RECOMPUTED} is not what was computed again")
        if not (1 <= stored["version"] <= MAX_VERSION and 0 <= stored["start"] < MAX_TOKENS):
            raise ValueError(f"{RECOMPUTED} has a version or a position that cannot be")
        if not 1 <= stored["tokens"] <= MAX_TOKENS - stored["start"]:
            raise ValueError(f"{RECOMPUTED} has a number of tokens that cannot be")
        return cls(**stored)
