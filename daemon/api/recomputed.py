"""What was computed again of a session, instead of being read from its blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ...memvid.limits import MAX_TOKENS, MAX_VERSION

RecomputePolicy = Literal["off", "exact", "fastest"]
RECOMPUTE_POLICIES: Final[tuple[RecomputePolicy, ...]] = ("off", "exact", "fastest")
WakeWay = Literal["restore", "recompute"]

RECOMPUTED = "recomputed"
"""Under which the session map tells it, in the version that was made so and in all that go on from it."""

_DAMAGED = "damaged"
"""The entry that is there only where it is false."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Keys and values of `tokens` tokens of `version` from position `start` were computed again from the stored tokens.
    same_logits: whether the logits behind them are to the bit those that were stored. damaged: whether they were lost
    with damaged blocks; if not, a stop had not written them, or computing them was faster and gave other bits."""

    version: int
    start: int
    tokens: int
    same_logits: bool
    damaged: bool = True

    def to_map(self) -> dict[str, Any]:
        """What the session map keeps."""
        return {name: value for name, value in asdict(self).items() if name != _DAMAGED or not value}

    @classmethod
    def from_map(cls, stored: object) -> Recomputed | None:
        """Read what `to_map` kept; None for a session of which nothing was computed again.

        Raises:
            ValueError: it is not what `to_map` makes.
        """
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
        return cls(**stored)
