"""What a version tells of having been saved by a repair: from which bundle, and how much of it.

Owns the entry of the environment and that of the session map. The first stands only in what a repair wrote, which gives
way to the bundle that it names; the second in all that goes on from there too, for its beginning is no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import LimitExceeded
from ..limits import MAX_TOKENS
from .ledger_tail import UNREAD, unread_of
from .manifest import Manifest, require_session_map

SALVAGED_FROM: Final = "salvaged_from"
"""The entry of a salvaged version's environment that names the bundle it was saved from."""

SALVAGED: Final = "salvaged"
"""The entry of the session map that tells how much was saved, in a salvaged version and in all that follow it."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The first `tokens` tokens were saved `of` so many; `of` is None where that is not known any more."""

    tokens: int
    of: int | None

    def to_map(self) -> dict[str, int]:
        """As the session map keeps it."""
        return {"tokens": self.tokens} | ({} if self.of is None else {"of": self.of})

    def within(self, token_count: int) -> Salvaged | None:
        """What there is to tell of a session that goes on from its first tokens: nothing, where what is lost had stood
        behind them."""
        return self if token_count >= self.tokens else None


def salvaged_from(manifest: Manifest | None) -> bytes | None:
    """The bundle that a version was saved from; None for any other version."""
    try:
        return bytes.fromhex(manifest.environment[SALVAGED_FROM]) if manifest else None
    except (KeyError, ValueError):
        return None


def salvaged_of(manifest: Manifest) -> Salvaged | None:
    """What a version tells of the repair that saved its beginning; None for one that no repair has cut short."""
    told = _decoded(manifest.session.get(SALVAGED))
    if salvaged_from(manifest) is None or (told is not None and told.tokens == manifest.token_count):
        return told
    return Salvaged(manifest.token_count, None)  # an earlier version of this program had not told more


def keeps_unread(lost: Manifest, token_count: int) -> bool:
    """Whether what follows in a lost version's ledger without blocks stands right behind its first tokens, which are
    saved: nothing between them is lost then."""
    told = lost.session.get(UNREAD)
    return token_count == lost.token_count and isinstance(told, Mapping) and told.get("start") == token_count


def session_map_of_salvaged(lost: Manifest, token_count: int) -> Mapping[str, Any]:
    """The session map of what is saved of a lost version. Where there is no room in it for the entry, as it was."""
    had = salvaged_of(lost) if salvaged_from(lost) is not None else None
    keeps = keeps_unread(lost, token_count)
    whole = lost.token_count if keeps else lost.token_count + unread_of(lost)
    of = max(whole, had.of or 0) if had is not None else whole
    kept = {name: value for name, value in lost.session.items() if name != UNREAD or keeps}
    session = {**kept, SALVAGED: Salvaged(token_count, of).to_map()}
    try:
        require_session_map(session)
    except LimitExceeded:
        return kept
    return session


def _decoded(told: object) -> Salvaged | None:
    """Out of a session map; None for what `to_map` does not make, which others wrote."""
    if not isinstance(told, Mapping) or not {"tokens"} <= told.keys() <= {"tokens", "of"}:
        return None
    tokens, of = told["tokens"], told.get("of")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        return None
    if of is not None and (type(of) is not int or not tokens <= of <= MAX_TOKENS):
        return None
    return Salvaged(tokens, of)
