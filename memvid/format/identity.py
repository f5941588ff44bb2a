"""The identity of the model of a state, as the store sees it: named parts and one digest.

The layer above decides what the parts are (weights, tokenizer, compute dtype, …). Here they are opaque text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3

from ..errors import InvalidDraft
from ..limits import MAX_IDENTITY_NAME_CHARS, MAX_IDENTITY_PARTS, MAX_IDENTITY_VALUE_BYTES
from .packing import pack

_DOMAIN = "torpor.identity/1"


@dataclass(frozen=True, slots=True)
class Identity:
    """Sorted (part, value) pairs. The digest is BLAKE3-256 of their canonical encoding, domain-separated."""

    parts: tuple[tuple[str, str], ...]
    digest: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = tuple(sorted((part, value) for part, value in self.parts))
        _require_valid(parts)
        object.__setattr__(self, "parts", parts)
        encoded = pack([_DOMAIN, [[part, value] for part, value in parts]], "identity")
        object.__setattr__(self, "digest", blake3(encoded).digest())

    def mismatched_fields(self, live: Identity) -> list[dict[str, str | None]]:
        """The parts that differ: `stored` is ours, `live` is the other's; None where one has no such part."""
        stored_parts, live_parts = dict(self.parts), dict(live.parts)
        return [
            {"field": part, "stored": stored_parts.get(part), "live": live_parts.get(part)}
            for part in sorted(stored_parts.keys() | live_parts.keys())
            if stored_parts.get(part) != live_parts.get(part)
        ]


def _require_valid(parts: tuple[tuple[str, str], ...]) -> None:
    if not parts or len(parts) > MAX_IDENTITY_PARTS:
        raise InvalidDraft(
            f"an identity needs 1 to {MAX_IDENTITY_PARTS} parts, this has {len(parts)}.", parts=len(parts)
        )
    for part, value in parts:
        if not isinstance(part, str) or not isinstance(value, str):
            raise InvalidDraft("identity parts and values must be text.")
        if not 1 <= len(part) <= MAX_IDENTITY_NAME_CHARS:
            raise InvalidDraft(
                f"an identity part's name needs 1 to {MAX_IDENTITY_NAME_CHARS} characters.", field=part[:64]
            )
        if len(value.encode("utf-8", "surrogatepass")) > MAX_IDENTITY_VALUE_BYTES:
            raise InvalidDraft(
                f"identity part {part!r} has more than {MAX_IDENTITY_VALUE_BYTES} bytes; keep its digest instead.",
                field=part,
            )
    if len({part for part, _ in parts}) != len(parts):
        raise InvalidDraft("an identity part is there twice.")
