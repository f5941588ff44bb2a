"""Where a session comes from, and what of it was not computed here and at once: one record, with its entries in a
session map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ...memvid.limits import MAX_TOKENS, MAX_VERSION
from ...memvid.store import IndexRow
from ...snapshot.identity import ELSEWHERE, Difference, circumstances_in, compare, decide_bits, tokens_from_elsewhere
from ..api.session import Origin, Recomputed
from ..stored import FOLDED_FROM, FORKED_FROM, origin_in

RECOMPUTED: Final = "recomputed"
"""The key of the recomputed part, in its version and all that go on from it."""

_DAMAGED: Final = "damaged"
"""An entry of the recomputed part that is written only if it is false."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a session comes from.

    forked_from: its origin; None unless it was forked. folded_from: the version whose summary it began with; None else.
    recomputed: the first part that was computed again with other bits, or after damage; None without one.
    elsewhere_tokens: how many first tokens another backend computed, perhaps with other bits.
    slept_by: the backend of the snapshot that it was woken from; None if it was not woken. differs: its parts that
        differ here.
    """

    forked_from: Origin | None = None
    folded_from: Origin | None = None
    recomputed: Recomputed | None = None
    elsewhere_tokens: int = 0
    slept_by: Mapping[str, str] | None = None
    differs: tuple[Difference, ...] = ()

    def to_map(self) -> dict[str, Any]:
        """The entries of a session map; the backend has one of its own."""
        return {
            **({ELSEWHERE: self.elsewhere_tokens} if self.elsewhere_tokens else {}),
            **({FORKED_FROM: asdict(self.forked_from)} if self.forked_from else {}),
            **({RECOMPUTED: _map_of_recomputed(self.recomputed)} if self.recomputed else {}),
            **({FOLDED_FROM: asdict(self.folded_from)} if self.folded_from else {}),
        }

    @classmethod
    def from_map(cls, kept: Mapping[str, Any]) -> Provenance:
        """Read origins and recomputed part of a session map; `woken` adds what the backends say. Raises ValueError:
        `to_map` does not make these entries."""
        return cls(
            forked_from=origin_in(kept.get(FORKED_FROM)),
            folded_from=origin_in(kept.get(FOLDED_FROM)),
            recomputed=_recomputed_in(kept.get(RECOMPUTED)),
        )

    def woken(
        self, kept: Mapping[str, Any], backend: Mapping[str, str], token_count: int, restored_tokens: int
    ) -> Provenance:
        """The same of a session that is woken from a snapshot with this session map. backend: the present one.
        restored_tokens: how many first tokens of its `token_count` were restored unchanged. Raises MalformedSnapshot:
        the map has no such number of tokens from elsewhere."""
        slept_by = circumstances_in(kept.get("backend"))
        differs = compare(slept_by, backend).differing
        elsewhere = token_count if decide_bits(differs) else tokens_from_elsewhere(kept)
        return replace(self, slept_by=slept_by, differs=differs, elsewhere_tokens=min(elsewhere, restored_tokens))

    def computed_again(self, part: Recomputed | None) -> Provenance:
        """The same with a part that was computed again; the first such part is the one to tell of."""
        return replace(self, recomputed=self.recomputed or part)

    def begun_anew(self) -> Provenance:
        """The provenance of the session before its first token, where nothing was restored or computed yet."""
        return Provenance(self.forked_from, self.folded_from)


def origin_of(row: IndexRow, tokens: int) -> Origin:
    """The origin at a token of a stored version."""
    return Origin(str(row.uri), row.version, row.bundle_id.hex(), tokens)


def _map_of_recomputed(part: Recomputed) -> dict[str, Any]:
    return {name: value for name, value in asdict(part).items() if name != _DAMAGED or not value}


def _recomputed_in(stored: object) -> Recomputed | None:
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
    return Recomputed(**stored)
