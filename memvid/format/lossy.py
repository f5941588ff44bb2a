"""The entry for a lossy session in the session map: a listing reads it without a bundle or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..limits import MAX_TOKENS
from .manifest import Manifest

LOSSY: Final = "lossy"
"""Its entry in the session map of a lossy version, and of all later versions."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """The loss of a session: the KV of its first `tokens` tokens was once kept in `bits` bits, and all later tokens
    were computed from that."""

    bits: int
    tokens: int


def lossy_of(manifest: Manifest) -> Lossy | None:
    """The loss of a version, at most its tokens; None if another program wrote something else there."""
    told = manifest.session.get(LOSSY)
    if not isinstance(told, Mapping) or told.keys() != {"bits", "tokens"} or not manifest.token_count:
        return None
    bits, tokens = told["bits"], told["tokens"]
    if not all(type(value) is int and 0 < value <= MAX_TOKENS for value in (bits, tokens)):
        return None
    return Lossy(bits, min(tokens, manifest.token_count))
