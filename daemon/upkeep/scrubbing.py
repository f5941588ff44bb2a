"""The idle scrub: sleeping sessions are read again, slowly and while no request runs, so that damage is found while it
can still be healed. Owns the time, the rate and the order. The store decides on damage, and `healing.py` heals it.

While damage waits for that, the mark on the disk says that the next daemon begins a new round: it finds the damage.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from ...memvid.errors import SessionNotFound
from ...memvid.folder.scrub_mark import ScrubMark, left_of, place_of
from ...memvid.format.records import VerifyReport
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.process import ScrubInfo
from ..errors import ServiceClosed
from ..events.bus import Bus
from ..events.events import DamageFound, SessionScrubbed
from ..options.serve_options import ServeOptions
from ..tasks.pieces import NAMES_AT_ONCE, in_pieces
from .loop import NOW, Job, Upkeep

_PIECE_S: Final = 0.5
"""So long a piece reads at its rate; at least one block."""


@dataclass(frozen=True, slots=True)
class ScrubPolicy:
    """bytes_per_s: the rate; idle_s: the time without a request before it starts; round_s: the shortest time between
    two rounds."""

    bytes_per_s: int = ServeOptions.scrub_rate
    idle_s: float = 5.0
    round_s: float = 24 * 3600.0


def seconds_ahead(done_bytes: int, passed_s: float, bytes_per_s: int) -> float:
    """Seconds to wait to keep the rate."""
    return max(0.0, done_bytes / bytes_per_s - passed_s)


@dataclass(slots=True)
class _Reading:
    """A session that is being read. steps: of the check; begun: by the monotonic clock."""

    uri: SessionUri
    in_round: bool
    steps: Generator[int, None, VerifyReport]
    begun: float


class Scrub(Job[SessionUri | None]):
    """Reads one session after the other. to_heal: gets each session in whose files faults were found, with these;
    `healing.py` takes it out."""

    name: ClassVar = "scrub"

    def __init__(
        self,
        upkeep: Upkeep,
        store: Store,
        policy: ScrubPolicy,
        bus: Bus,
        to_heal: dict[SessionUri, VerifyReport],
    ) -> None:
        self._store = store
        self._policy = policy
        self._bus = bus
        self._to_heal = to_heal
        self._mark = self._saved = store.load_scrub_mark()
        self._left: deque[SessionUri] | None = None
        self._suspects: deque[SessionUri] = deque()
        self._reading: _Reading | None = None
        self._not_before = NOW
        self._sessions = self._bytes_read = self._damaged = 0
        super().__init__(upkeep)

    def info(self, healed: int, unhealed: int) -> ScrubInfo:
        return ScrubInfo(
            bytes_per_s=self._policy.bytes_per_s,
            sessions=self._sessions,
            bytes_read=self._bytes_read,
            damaged=self._damaged,
            healed=healed,
            unhealed=unhealed,
            last_ns=self._mark.checked_ns or None,
        )

    def suspect(self, uri: SessionUri) -> None:
        """Note a session that a wake found damaged: it is read, and healed, as soon as no request runs."""
        if uri not in self._suspects:
            self._suspects.append(uri)
            self.look_again()

    def due(self) -> list[tuple[SessionUri | None, float]]:
        """The session to read, when the rate and the requests let it read on; without one the round, when it begins,
        goes on after a restart, or has its mark saved."""
        uri = self._next()
        if uri is None and self._saved != self._mark_to_save():
            seconds = 0.0
        elif uri is not None or self._left is None:
            seconds = self._policy.idle_s - self._bus.quiet_s()
        else:
            seconds = self._seconds_to_round()
        return [(uri, max(self._not_before, time.monotonic() + seconds))]

    def close(self) -> None:
        if self._reading is not None:
            self._reading.steps.close()

    async def piece(self, uri: SessionUri | None) -> None:
        """Read on, or begin to read, or begin a round."""
        if uri is None and self._saved != self._mark_to_save():
            await self._save_mark()
        elif not self._is_idle():
            return
        elif uri is not None:
            with suppress(SessionNotFound):  # deleted meanwhile
                await self._read_on(self._reading or self._begin(uri))
        elif self._left is None:  # go on with the round of the daemon before this one
            self._left = await self._behind(self._mark.after) if self._mark.begun_ns else deque()
        elif self._seconds_to_round() <= 0.0:
            await self._begin_round()

    def _next(self) -> SessionUri | None:
        """The session to read, if there is one left."""
        if self._reading is not None:
            return self._reading.uri
        waiting = self._suspects or self._left
        return waiting[0] if waiting else None

    def _begin(self, uri: SessionUri) -> _Reading:
        in_round = uri not in self._suspects
        waiting = self._left if in_round else self._suspects
        assert waiting is not None
        waiting.remove(uri)
        self._reading = _Reading(uri, in_round, self._store.verifying(uri, deep=True), time.monotonic())
        return self._reading

    async def _read_on(self, reading: _Reading) -> None:
        """Compare more bytes of a session's versions with their digests. At the end of it, have healed what is
        damaged."""
        try:
            report = await self._read_piece(reading.steps)
        except ServiceClosed:
            raise
        except Exception:
            self._reading = None  # the other sessions are still read
            raise
        if report is not None:
            self._reading = None
            await self._has_read(reading, report)

    async def _read_piece(self, steps: Generator[int, None, VerifyReport]) -> VerifyReport | None:
        async with self._thread.piece():
            begun = time.monotonic()
            done, report = await self._thread.run(lambda: self._read(steps))
        self._not_before = time.monotonic() + seconds_ahead(done, time.monotonic() - begun, self._policy.bytes_per_s)
        return report

    def _read(self, steps: Generator[int, None, VerifyReport]) -> tuple[int, VerifyReport | None]:
        """The bytes that were read, and the report if that was all. On the thread of upkeep."""
        done, until = 0, time.monotonic() + _PIECE_S
        try:
            while done < _PIECE_S * self._policy.bytes_per_s and time.monotonic() < until:
                done += next(steps)
                if self._thread.must_stop() or not self._is_idle():
                    break
        except StopIteration as end:
            return done, end.value
        return done, None

    async def _has_read(self, reading: _Reading, report: VerifyReport) -> None:
        uri, found = reading.uri, len(report.findings)
        self._sessions += 1
        self._bytes_read += report.bytes_checked
        seconds = time.monotonic() - reading.begun
        self._bus.publish(SessionScrubbed(uri, report.bundles_checked, report.bytes_checked, found, seconds))
        if report.damaged:  # else no version lacks anything
            self._damaged += 1
            self._bus.publish(DamageFound(uri, found, report.findings[0].code))
        if not report.ok:
            self._to_heal[uri] = report
            self._upkeep.look_again()
        if reading.in_round:
            self._mark = ScrubMark(place_of(uri), self._mark.begun_ns, time.time_ns())
        await self._save_mark()

    async def _begin_round(self) -> None:
        """Begin with the first session, if there is any: an empty store has not had its first round."""
        begun_ns, everybody = time.time_ns(), await self._behind(b"")
        if everybody:
            self._mark = ScrubMark(b"", begun_ns, self._mark.checked_ns)
            self._left = everybody
        else:
            self._not_before = time.monotonic() + self._policy.idle_s

    async def _behind(self, after: bytes) -> deque[SessionUri]:
        """The sessions left to read behind a place of the round, without those that are to be healed first."""
        left = await in_pieces(left_of(self._store.index.iter_uris(NAMES_AT_ONCE), after))
        return deque(uri for uri in left if uri not in self._to_heal)

    def _is_idle(self) -> bool:
        """For any thread."""
        return self._bus.quiet_s() >= self._policy.idle_s

    def _seconds_to_round(self) -> float:
        """0 also if the last round began in the future of a clock that was put back."""
        begun_s, now_s = self._mark.begun_ns / 1e9, time.time()
        return max(0.0, begun_s + self._policy.round_s - now_s) if begun_s <= now_s else 0.0

    def _mark_to_save(self) -> ScrubMark:
        return ScrubMark(checked_ns=self._mark.checked_ns) if self._to_heal else self._mark

    async def _save_mark(self) -> None:
        mark = self._mark_to_save()
        if mark != self._saved:
            await self._thread.run(lambda: self._store.save_scrub_mark(mark))
            self._saved = mark
