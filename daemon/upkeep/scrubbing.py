"""The idle scrub: sleeping sessions are read again, slowly and while no request runs, so that damage is found while it
can still be healed. Owns the time, the rate and the order. The store decides on damage, and `healing.py` mends it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
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


class Scrub(Job):
    """Reads one session after the other. mend: called with each session in whose files faults were found, and with
    these."""

    name: ClassVar = "scrub"

    def __init__(
        self,
        upkeep: Upkeep,
        store: Store,
        policy: ScrubPolicy,
        bus: Bus,
        mend: Callable[[SessionUri, VerifyReport], Awaitable[None]],
    ) -> None:
        self._store = store
        self._policy = policy
        self._bus = bus
        self._mend = mend
        self._mark = store.load_scrub_mark()
        self._left: deque[SessionUri] | None = None
        self._suspects: deque[SessionUri] = deque()
        self._reading: _Reading | None = None
        self._mending: SessionUri | None = None
        self._not_before = NOW
        self._unmended: set[SessionUri] = set()
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
        """Note a session that a wake found damaged: it is read, and mended, as soon as no request runs."""
        if uri not in self._suspects:
            self._suspects.append(uri)
            self.look_again()

    def due(self) -> float:
        """When the rate and the requests let it read on; without anything to read, when the next round begins."""
        now = time.monotonic()
        if self._reading or self._suspects or self._left or self._left is None:
            return max(self._not_before, now + self._policy.idle_s - self._bus.quiet_s())
        return max(self._not_before, now + self._seconds_to_round())

    def about(self) -> str:
        if self._mending is not None:
            return f"heal of {self._mending}"
        return self.name if self._reading is None else f"{self.name} of {self._reading.uri}"

    def close(self) -> None:
        if self._reading is not None:
            self._reading.steps.close()

    async def piece(self) -> None:
        """Read on, or begin to read, or begin a round."""
        if not self._is_idle():
            return
        if self._left is None:  # go on with the round of the daemon before this one
            self._left = await self._behind(self._mark.after) if self._mark.begun_ns else deque()
        if self._reading is None:
            self._reading = self._next()
        if self._reading is not None:
            await self._read_on(self._reading)
        elif self._seconds_to_round() <= 0.0:
            await self._begin_round()

    def _next(self) -> _Reading | None:
        """Begin to read the next session, if there is one left."""
        while waiting := self._suspects or self._left:
            uri, in_round = waiting.popleft(), waiting is self._left
            try:
                return _Reading(uri, in_round, self._store.verifying(uri, deep=True), time.monotonic())
            except SessionNotFound:  # deleted meanwhile
                self._unmended.discard(uri)
        return None

    async def _read_on(self, reading: _Reading) -> None:
        """Compare more bytes of a session's versions with their digests. At the end of it, mend what is damaged."""
        try:
            report = await self._read_piece(reading.steps)
            if report is not None:
                self._reading = None
                await self._has_read(reading, report)
        except ServiceClosed:
            raise
        except Exception:
            self._reading = None  # the other sessions are still read
            raise

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
            self._mending = uri
            try:
                await self._mend(uri, report)
            except ServiceClosed:
                await self._leave(uri)
                return
            finally:
                self._mending = None
        self._unmended.discard(uri)
        if reading.in_round:
            await self._passed(uri)

    async def _begin_round(self) -> None:
        """Begin with the first session, if there is any: an empty store has not had its first round."""
        begun_ns, everybody = time.time_ns(), await self._behind(b"")
        if everybody:
            self._mark = ScrubMark(b"", begun_ns, self._mark.checked_ns)
            self._left = everybody
        else:
            self._not_before = time.monotonic() + self._policy.idle_s

    async def _behind(self, after: bytes) -> deque[SessionUri]:
        """The sessions left to read behind a place of the round."""
        return deque(await in_pieces(left_of(self._store.index.iter_uris(NAMES_AT_ONCE), after)))

    def _is_idle(self) -> bool:
        """For any thread."""
        return self._bus.quiet_s() >= self._policy.idle_s

    def _seconds_to_round(self) -> float:
        """0 also if the last round began in the future of a clock that was put back."""
        begun_s, now_s = self._mark.begun_ns / 1e9, time.time()
        return max(0.0, begun_s + self._policy.round_s - now_s) if begun_s <= now_s else 0.0

    async def _leave(self, uri: SessionUri) -> None:
        """Note that the daemon stops before a damaged session was mended: the next daemon begins a new round and finds
        it. So does this one, if it does not stop after all."""
        self._unmended.add(uri)
        self._mark = ScrubMark(b"", 0, self._mark.checked_ns)
        await self._save_mark()

    async def _passed(self, uri: SessionUri) -> None:
        self._mark = ScrubMark(place_of(uri), self._mark.begun_ns, time.time_ns())
        if not self._unmended:
            await self._save_mark()

    async def _save_mark(self) -> None:
        await self._thread.run(lambda: self._store.save_scrub_mark(self._mark))
