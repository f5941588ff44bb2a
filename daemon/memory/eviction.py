"""Chooses sessions and models to evict, so that others fit: values in, a value out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...memvid.uri import SessionUri


@dataclass(frozen=True, slots=True)
class Resident:
    """A session in memory. last_used: when a request last released it, by any clock. in_use: whether it must stay.
    model: its model's name."""

    uri: SessionUri
    bytes: int
    last_used: float
    in_use: bool
    model: str = ""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """The weights of a model in memory. last_used, in_use: as of `Resident`."""

    name: str
    bytes: int
    last_used: float
    in_use: bool


def plan_eviction(
    residents: Iterable[Resident],
    held_bytes: int,
    wanted_bytes: int,
    budget_bytes: int,
    models: Iterable[ResidentModel] = (),
) -> tuple[SessionUri | str, ...]:
    """The sessions (URIs) to put to sleep and models (names) to unload, in this order, so that `wanted_bytes` fit: the
    least recently used first.

    The use of a session is a use of its model, and a model goes only after all its sessions. So a model unused for long
    goes before the sessions of another, and a session before its own model.

    held_bytes: all bytes that count against the budget now, with those of residents and models.
    """
    residents = sorted(residents, key=lambda each: (each.last_used, each.uri))
    # A session without memory stays, as its sleep would free nothing; but then its model stays, too.
    needed = {each.model for each in residents if each.in_use or not each.bytes}
    used = {each.model: each.last_used for each in residents}
    candidates: list[tuple[float, bool, SessionUri | str, int]] = [
        (each.last_used, False, each.uri, each.bytes) for each in residents if not each.in_use and each.bytes
    ]
    candidates += [
        (max(each.last_used, used.get(each.name, each.last_used)), True, each.name, each.bytes)
        for each in sorted(models, key=lambda each: each.name)
        if not each.in_use and each.name not in needed
    ]
    missing = held_bytes + wanted_bytes - budget_bytes
    leaving = []
    for _, _, name, size in sorted(candidates, key=lambda each: each[:2]):
        if missing <= 0:
            break
        leaving.append(name)
        missing -= size
    return tuple(leaving)
