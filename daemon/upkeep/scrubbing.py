"""The idle scrub: sleeping sessions are read again, slowly and while no request runs, so that damage is found while it
can still be healed. Owns the time, the rate and the order. The store decides on damage, and `healing.py` mends it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...errors import TorporError
from ...memvid.errors import SessionNotFound
from ...memvid.folder.scrub_mark import ScrubMark, left_of, place_of
from ...memvid.format.records import VerifyReport
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.process import ScrubInfo
from ..engine.rounds import Rounds
from ..errors import ServiceClosed
from ..events.bus import Bus
from ..events.events import DamageFound, SessionScrubbed
from ..options.serve_options import ServeOptions
from ..tasks.pieces import NAMES_AT_ONCE, in_pieces

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ScrubPolicy:
    """bytes_per_s: the rate; idle_s: the time without a request before it starts; round_s: the shortest time between
    two rounds; look_s: how often it looks for requests."""

    bytes_per_s: int = ServeOptions.scrub_rate
    idle_s: float = 5.0
    round_s: float = 24 * 3600.0
    look_s: float = 0.5


def seconds_ahead(done_bytes: int, passed_s: float, bytes_per_s: int) -> float:
    """Seconds to wait to keep the rate."""
    return max(0.0, done_bytes / bytes_per_s - passed_s)


class _GivenUp(Exception):  # the daemon stops; never leaves this module
    pass


class Scrub(Rounds):
    """Reads one session after the other. mend: called with each session in whose files faults were found, and with
    these."""

    def __init__(
        self, store: Store, policy: ScrubPolicy, bus: Bus, mend: Callable[[SessionUri, VerifyReport], Awaitable[None]]
    ) -> None:
        self._store = store
        self._policy = policy
        self._bus = bus
        self._mend = mend
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-scrub")
        self._stop = threading.Event()
        self._mark = store.load_scrub_mark()
        self._left: deque[SessionUri] | None = None
        self._suspects: deque[SessionUri] = deque()
        self._unmended: set[SessionUri] = set()
        self._tell = bus.from_any_thread()
        self._sessions = self._bytes_read = self._damaged = 0
        super().__init__()

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

    async def close(self) -> None:
        """Stop at the next block, wait for a running repair, and end the thread."""
        self._stop.set()
        await super().close()
        await asyncio.to_thread(self._thread.shutdown)

    async def _round(self) -> float:
        """Read one session if it is time."""
        try:
            if self._left is None:  # go on with the round of the daemon before this one
                self._left = await self._behind(self._mark.after) if self._mark.begun_ns else deque()
            if self._suspects and self._is_idle():
                await self._check(self._suspects.popleft(), in_round=False)
                return 0.0
            if self._left and self._is_idle():
                await self._check(self._left.popleft(), in_round=True)
                return 0.0
            if not self._left and self._round_is_due():
                await self._begin_round()
        except Exception as error:  # noqa: BLE001 - after any error the other sessions are still read
            _LOG.warning("the scrub: %s", error.message if isinstance(error, TorporError) else repr(error))
        return self._policy.look_s

    async def _begin_round(self) -> None:
        """Begin with the first session, if there is any: an empty store has not had its first round."""
        begun_ns, everybody = time.time_ns(), await self._behind(b"")
        if everybody:
            self._mark = ScrubMark(b"", begun_ns, self._mark.checked_ns)
            self._left = everybody

    async def _check(self, uri: SessionUri, *, in_round: bool) -> None:
        """Read one session, and mend it if it is damaged."""
        try:
            report = await self._in_thread(partial(self._read, uri))
        except (_GivenUp, SessionNotFound):
            self._unmended.discard(uri)
            return  # the daemon stops, or it was deleted meanwhile
        if report.damaged:  # else no version lacks anything
            self._damaged += 1
            self._bus.publish(DamageFound(uri, len(report.findings), report.findings[0].code))
        if not report.ok:
            try:
                await self._mend(uri, report)
            except ServiceClosed:
                await self._leave(uri)
                return
        self._unmended.discard(uri)
        if in_round:
            await self._passed(uri)

    async def _behind(self, after: bytes) -> deque[SessionUri]:
        """The sessions left to read behind a place of the round."""
        return deque(await in_pieces(left_of(self._store.index.iter_uris(NAMES_AT_ONCE), after)))

    def _round_is_due(self) -> bool:
        """Whether the last round began long enough ago, or in the future of a clock that was put back."""
        begun_s, now_s = self._mark.begun_ns / 1e9, time.time()
        return not begun_s <= now_s < begun_s + self._policy.round_s

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
        await self._in_thread(lambda: self._store.save_scrub_mark(self._mark))

    def _read(self, uri: SessionUri) -> VerifyReport:
        """Compare every byte of a session's versions with its digest, on the scrub's thread."""
        begun = time.monotonic()
        pace = _Pace(self._policy, self._stop, self._is_idle)
        report = self._store.verify(uri, deep=True, pace=pace)
        self._sessions += 1
        self._bytes_read += report.bytes_checked
        seconds = time.monotonic() - begun
        found = len(report.findings)
        self._tell(SessionScrubbed(uri, report.bundles_checked, report.bytes_checked, found, seconds))
        return report

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _is_idle(self) -> bool:
        return self._bus.quiet_s() >= self._policy.idle_s


class _Pace:
    """Keeps a reading thread to a rate, and pauses it during requests."""

    def __init__(self, policy: ScrubPolicy, stop: threading.Event, is_idle: Callable[[], bool]) -> None:
        self._policy = policy
        self._stop = stop
        self._is_idle = is_idle
        self._begun = time.monotonic()
        self._done = 0

    def __call__(self, size_bytes: int) -> None:
        """Count bytes that were read, and wait. Raises _GivenUp if the daemon stops."""
        self._done += size_bytes
        ahead = seconds_ahead(self._done, time.monotonic() - self._begun, self._policy.bytes_per_s)
        if self._stop.wait(ahead):
            raise _GivenUp
        while not self._is_idle():
            if self._stop.wait(self._policy.look_s):
                raise _GivenUp
            self._begun, self._done = time.monotonic(), 0  # the pause is not made up for
