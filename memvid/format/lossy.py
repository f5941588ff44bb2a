"""What a session map tells of a loss, for those who list sessions: they open no bundle and know no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..limits import MAX_TOKENS
from .manifest import Manifest

LOSSY: Final = "lossy"
"""The entry of the session map that has it, in a lossy version and in all that follow it."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """What a session has lost: the keys and values of its first `tokens` tokens were kept in `bits` bits once, and what
    was read behind them was computed from those."""

    bits: int
    tokens: int


def lossy_of(manifest: Manifest) -> Lossy | None:
    """What a version tells of its loss, as far as its tokens go; whatever else stands there, others wrote."""
    told = manifest.session.get(LOSSY)
    if not isinstance(told, Mapping) or told.keys() != {"bits", "tokens"} or not manifest.token_count:
        return None
    bits, tokens = told["bits"], told["tokens"]
    if not all(type(value) is int and 0 < value <= MAX_TOKENS for value in (bits, tokens)):
        return None
    return Lossy(bits, min(tokens, manifest.token_count))
