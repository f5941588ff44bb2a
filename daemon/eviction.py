"""Which sessions go to sleep so that others fit: values in, a value out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..memvid.uri import SessionUri


@dataclass(frozen=True, slots=True)
class Resident:
    """A session in memory. last_used: when a request last let go of it, by any clock; in_use: whether it may not go."""

    uri: SessionUri
    bytes: int
    last_used: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """sessions: those that must go, the least recently used first; short_bytes: what is missing even then."""

    sessions: tuple[SessionUri, ...]
    short_bytes: int


def plan_eviction(residents: Iterable[Resident], held_bytes: int, wanted_bytes: int, budget_bytes: int) -> Eviction:
    """Which idle sessions must go to sleep so that `wanted_bytes` fit beside what is held.

    held_bytes: all that counts against the budget now, the residents' own bytes included.
    """
    missing = held_bytes + wanted_bytes - budget_bytes
    chosen = []
    for resident in sorted(residents, key=lambda each: (each.last_used, each.uri)):
        if missing <= 0:
            break
        if not resident.in_use and resident.bytes > 0:
            chosen.append(resident.uri)
            missing -= resident.bytes
    return Eviction(tuple(chosen), max(0, missing))
