"""The order in which replicas are asked to take a request: first where its session is awake, then the one that would be
ready soonest, in seconds.

A figure that is a second old is good enough: a request that comes to the wrong replica is answered there, and costs a
hand-over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast things go, by which the wait is foreseen. They are rough, for they only choose between replicas: a local
    NVMe disk, an object store in the same region, and a small model on a processor. handover_s: from the question to
    the session's sleep and its way into the remote. answer_s: of a request that is under way."""

    disk_bytes_per_s: float = 1e9
    remote_bytes_per_s: float = 1e8
    text_bytes_per_s: float = 2000.0
    handover_s: float = 2.0
    answer_s: float = 5.0


RATES: Final = Rates()


@dataclass(frozen=True, slots=True)
class Standing:
    """What a replica last told of itself. awake: its awake sessions, by URI, with their bytes in memory. asleep: those
    that its store has, with their bytes. free_bytes: of its memory budget."""

    awake: Mapping[str, int] = field(default_factory=dict)
    asleep: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int = 0

    @classmethod
    def told(cls, stats: Mapping[str, Any]) -> Standing:
        """Read what a replica told; one that has told nothing yet has nothing."""
        return cls(stats.get("awake", {}), stats.get("asleep", {}), stats.get("free_bytes", 0))

    def bytes_of(self, session: str | None) -> int:
        """The bytes of a session; 0 if it has none."""
        return 0 if session is None else self.awake.get(session) or self.asleep.get(session) or 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs. session: None for a new one. was_at: the replica that answered in it last, which may be
    newer than what that told. head_bytes: of text before its first message, and read_at: the replicas that have read
    that."""

    session: str | None = None
    was_at: str | None = None
    head_bytes: int = 0
    read_at: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wait:
    """The seconds until a replica would begin an answer: behind other requests; until another replica has given the
    session back; until its bytes are here, and in memory; until other sessions have made room; and until the text
    before the first message is read."""

    waiting_s: float = 0.0
    handover_s: float = 0.0
    fetching_s: float = 0.0
    waking_s: float = 0.0
    room_s: float = 0.0
    reading_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    def __str__(self) -> str:
        parts = [(each.name[:-2], getattr(self, each.name)) for each in fields(self)]
        told = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts if seconds)
        return f"{self.seconds:.3g} s" + (f" ({told})" if told else "")


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica as a place for a request. is_awake: the session is awake there."""

    replica: str
    is_awake: bool
    wait: Wait

    def __str__(self) -> str:
        return f"awake here, {self.wait}" if self.is_awake else str(self.wait)


def ranked(
    standings: Mapping[str, Standing], queued: Mapping[str, int], wanted: Wanted, rates: Rates = RATES
) -> Sequence[Placed]:
    """The replicas, the best first. queued: requests that each has; a replica without a figure has none."""
    has = {name: wanted.session in each.awake for name, each in standings.items()}
    if wanted.was_at in has:
        has = {name: name == wanted.was_at for name in has}
    places = [
        Placed(name, has[name], _wait(name, standings, queued.get(name, 0), wanted, has, rates)) for name in standings
    ]
    return sorted(places, key=lambda each: (not each.is_awake, each.wait.seconds, -standings[each.replica].free_bytes))


def _wait(
    name: str, standings: Mapping[str, Standing], queued: int, wanted: Wanted, has: Mapping[str, bool], rates: Rates
) -> Wait:
    reads = wanted.head_bytes if wanted.session is None and name not in wanted.read_at else 0
    waiting_s, reading_s = queued * rates.answer_s, reads / rates.text_bytes_per_s
    standing = standings[name]
    size = standing.bytes_of(wanted.session) or max(each.bytes_of(wanted.session) for each in standings.values())
    if has[name] or not size:
        return Wait(waiting_s, reading_s=reading_s)
    return Wait(
        waiting_s,
        rates.handover_s if any(has.values()) else 0.0,
        0.0 if wanted.session in standing.asleep else size / rates.remote_bytes_per_s,
        size / rates.disk_bytes_per_s,
        max(0, size - standing.free_bytes) / rates.disk_bytes_per_s,
        reading_s,
    )
