"""Chooses whether a wake restores or recomputes, from rates measured here.

A function of values, with a sentence that gives the reason.

To restore gives back the same bits, computes nothing, and keeps the engine free: it is the default. `exact` lets a wake
compute the tokens again if that is measured to be faster and all their calls can be repeated; the result is kept only
if it equals the stored state bit for bit. `fastest` also keeps a result that differs, and the session says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...memvid.units import format_plural
from ...snapshot.passes import tokens_of
from ..api.limits import RecomputePolicy
from ..api.waking import WakeWay
from ..models.rates import Rates


@dataclass(frozen=True, slots=True)
class Calls:
    """Model calls by cost. in_chunks: tokens read in chunks, with the single last token of each read, as in the prefill
    rate. alone: other calls of one token."""

    in_chunks: int = 0
    alone: int = 0

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> Calls:
        """Count runs of calls. runs: the tokens of each call, and the number of such calls in a row."""
        in_chunks = alone = 0
        behind_chunk = False
        for size, count in runs:
            is_chunk = tokens_of(size) > 1
            if is_chunk:
                in_chunks += size * count
            else:
                in_chunks += behind_chunk
                alone += count - behind_chunk
            behind_chunk = is_chunk
        return cls(in_chunks, alone)

    @property
    def tokens(self) -> int:
        return self.in_chunks + self.alone


@dataclass(frozen=True, slots=True)
class Work:
    """The work of each of the two ways.

    read_bytes: bytes that a restore reads. behind: model calls behind the record. again: model calls to recompute all.
    obstacle: why recomputing is impossible. inexact: why other bits may result. Both are parts of a sentence, or None.
    """

    read_bytes: int
    behind: Calls
    again: Calls
    obstacle: str | None = None
    inexact: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice, its reason, and the seconds of each way (None: a rate is not measured)."""

    way: WakeWay
    reason: str
    restore_s: float | None
    recompute_s: float | None


def choose(work: Work, rates: Rates, policy: RecomputePolicy) -> Choice:
    """Choose the way of a wake."""
    restore_s, recompute_s = _restoring(work, rates), _computing(work.again, rates)
    if recompute_s is not None and rates.fixed is not None:
        recompute_s += rates.fixed.seconds
    way, reason = _decide(work, rates, policy, restore_s, recompute_s)
    return Choice(way, reason, restore_s, recompute_s)


def _decide(
    work: Work, rates: Rates, policy: RecomputePolicy, restore_s: float | None, recompute_s: float | None
) -> tuple[WakeWay, str]:
    if restore_s is None or recompute_s is None:
        missing = " and ".join(_missing(work, rates))
        return "restore", f"It is restored, as always where a rate is not measured yet: {missing}."
    if recompute_s >= restore_s:
        return "restore", "Restoring is the faster way, and gives back the very bits that slept."
    why_not = work.obstacle or (work.inexact if policy != "fastest" else None)
    if why_not is not None:
        return "restore", f"Computing the tokens again would be faster, but {why_not}; so it is restored."
    if policy == "off":
        return "restore", (
            "Computing the tokens again would be faster; it is restored all the same, for that is exact and keeps the "
            "model free. torpor serve --recompute exact allows the other."
        )
    if policy == "exact":
        return "recompute", (
            "Computing the tokens again is faster. What results is kept if it is, bit for bit, what is stored; if not, "
            "it is restored."
        )
    return "recompute", (
        "Computing the tokens again is faster. The session says that it was recomputed if other bits result, as the "
        "daemon was told (serve --recompute fastest)."
    )


def _restoring(work: Work, rates: Rates) -> float | None:
    reading, behind = rates.restore, _computing(work.behind, rates)
    if reading is None or rates.fixed is None or behind is None:
        return None
    return rates.fixed.seconds + work.read_bytes * reading.seconds + behind


def _computing(calls: Calls, rates: Rates) -> float | None:
    if (calls.in_chunks and rates.prefill is None) or (calls.alone and rates.decode is None):
        return None
    seconds = calls.in_chunks * rates.prefill.seconds if rates.prefill else 0.0
    return seconds + (calls.alone * rates.decode.seconds if rates.decode else 0.0)


def _missing(work: Work, rates: Rates) -> list[str]:
    missing = []
    if rates.restore is None or rates.fixed is None:
        missing.append("no wake was seen")
    if rates.prefill is None and (work.again.in_chunks or work.behind.in_chunks):
        missing.append("no text was read")
    if rates.decode is None and (work.again.alone or work.behind.alone):
        missing.append("no token was written")
    return missing


def unrepeatable_calls(count: int) -> str:
    """The reason why tokens with unrepeatable calls may get other bits (`passes.UNREPEATABLE`)."""
    were = "was" if count == 1 else "were"
    tokens = format_plural(count, "token")
    return f"{tokens} of it {were} computed beside other sessions, or in cut calls; these cannot be made again"
