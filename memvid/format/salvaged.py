"""The entries of a version that a repair saved: from which bundle, and how much of it.

Owns an entry of the environment and one of the session map. The first is only in versions that a repair wrote; they
give way to the bundle that it names. The second is in all later versions too: they begin with the saved part.
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
"""The entry of the session map with the saved amount, in a salvaged version and in all later ones."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The first `tokens` of `of` tokens were saved; `of` is None if it is no longer known."""

    tokens: int
    of: int | None

    def to_map(self) -> dict[str, int]:
        return {"tokens": self.tokens} | ({} if self.of is None else {"of": self.of})

    def within(self, token_count: int) -> Salvaged | None:
        """The entry for a session that goes on from its first tokens: None if only tokens behind those were lost."""
        return self if token_count >= self.tokens else None


def salvaged_from(manifest: Manifest | None) -> bytes | None:
    """The bundle that a version was saved from; None for any other version."""
    try:
        return bytes.fromhex(manifest.environment[SALVAGED_FROM]) if manifest else None
    except (KeyError, ValueError):
        return None


def salvaged_of(manifest: Manifest) -> Salvaged | None:
    """The entry of a version whose beginning a repair saved; None for any other version."""
    told = _decoded(manifest.session.get(SALVAGED))
    if salvaged_from(manifest) is None or (told is not None and told.tokens == manifest.token_count):
        return told
    return Salvaged(manifest.token_count, None)  # as from an earlier version of this program


def keeps_unread(lost: Manifest, token_count: int) -> bool:
    """Whether the unread tokens of a lost version follow its saved first tokens with no gap."""
    told = lost.session.get(UNREAD)
    return token_count == lost.token_count and isinstance(told, Mapping) and told.get("start") == token_count


def session_map_of_salvaged(lost: Manifest, token_count: int) -> Mapping[str, Any]:
    """The session map for the saved part of a lost version; unchanged if the entry does not fit."""
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
    """From a session map; None if another program wrote something else there."""
    if not isinstance(told, Mapping) or not {"tokens"} <= told.keys() <= {"tokens", "of"}:
        return None
    tokens, of = told["tokens"], told.get("of")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        return None
    if of is not None and (type(of) is not int or not tokens <= of <= MAX_TOKENS):
        return None
    return Salvaged(tokens, of)
