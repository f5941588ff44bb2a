"""Chooses sessions and models to evict, so that others fit: values in, a value out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...memvid.uri import SessionUri


@dataclass(frozen=True, slots=True)
class Resident:
    """A session in memory. last_used: when a request last let go of it, by any clock; in_use: whether it may not go.
    model: the name of the one that it is on."""

    uri: SessionUri
    bytes: int
    last_used: float
    in_use: bool
    model: str = ""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """The weights of a model in memory. last_used: as of `Resident`; in_use: whether they stay in any case."""

    name: str
    bytes: int
    last_used: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """leaving: sessions that must go to sleep and models that must be unloaded, by uri and by name, in that order;
    short_bytes: bytes still missing then."""

    leaving: tuple[SessionUri | str, ...]
    short_bytes: int


def plan_eviction(
    residents: Iterable[Resident],
    held_bytes: int,
    wanted_bytes: int,
    budget_bytes: int,
    models: Iterable[ResidentModel] = (),
) -> Eviction:
    """Choose sessions and models to evict, the least recently used first, so that `wanted_bytes` fit.

    A model is used whenever one of its sessions is, and goes only after all of them: so a model that no request has
    used for long goes before the sessions of another, and a session before its own model.

    held_bytes: all that counts against the budget now, the bytes of residents and models included.
    """
    residents = sorted(residents, key=lambda each: (each.last_used, each.uri))
    # A session without memory stays, for its sleep would free nothing; but then its model stays, too.
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
    return Eviction(tuple(leaving), max(0, missing))
