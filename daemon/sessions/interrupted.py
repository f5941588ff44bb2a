"""A request for an answer that was given up in its midst: the same request goes on from there.

Owns its entry in the session map. What was read and written of it stands in the ledger; of a message that is read in
part the text map tells nothing. So the ledger alone does not say what its end belongs to, and this does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ...memvid.limits import MAX_TOKENS

INTERRUPTED: Final = "interrupted"
"""The key in the session map."""

DIGEST_BYTES: Final = 16
_SEED_BYTES: Final = 8
_FIELDS: Final = {"request": bytes, "begins_at": int, "answer_at": int, "end": int, "random_key": bytes}
"""`random_key` has the seed, or is empty; in stores of before, a random key."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """request: the digest of all that decides its answer. begins_at, answer_at: the tokens at which its messages and
    its answer begin. end: the tokens of the ledger when it was given up; fewer than `answer_at` where it was still
    being read. seed: of an answer with a seed of its own; None else.
    """

    request: bytes
    begins_at: int
    answer_at: int
    end: int
    seed: int | None = None

    def to_map(self) -> dict[str, Any]:
        seed = b"" if self.seed is None else self.seed.to_bytes(_SEED_BYTES, "little")
        return {**{name: getattr(self, name) for name in _FIELDS if name != "random_key"}, "random_key": seed}

    @classmethod
    def from_map(cls, stored: object, end: int) -> Interrupted | None:
        """Read the map of `to_map`; None where there is none, or where the ledger does not end as it says. Raises
        ValueError: `to_map` does not make this."""
        if stored is None:
            return None
        if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != _FIELDS:
            raise ValueError(f"{INTERRUPTED} is no request")
        seed = stored["random_key"]
        if len(stored["request"]) != DIGEST_BYTES or len(seed) not in (0, _SEED_BYTES):
            raise ValueError(f"{INTERRUPTED} has a digest or a seed of a size that cannot be")
        places = {name: value for name, value in stored.items() if name != "random_key"}
        entry = cls(**places, seed=int.from_bytes(seed, "little") if seed else None)
        if not 0 <= entry.begins_at <= min(entry.answer_at, entry.end) <= max(entry.answer_at, entry.end) <= MAX_TOKENS:
            raise ValueError(f"{INTERRUPTED} has a position that cannot be")
        return entry if entry.end == end else None
