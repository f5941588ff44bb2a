"""The loop of upkeep: jobs that no request waits for, each when it is due, a piece at a time.

A job tells when its next piece is due, and does it. All else is here: it runs, rests, is put off when it fails, and
ends. Nothing wakes while nothing is due. Work on the disk is done on one thread, where it yields to requests
(`disk/upkeep_thread.py`). A piece that waits for a session, for memory or for a model keeps no other job waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from ...errors import TorporError
from ...memvid.errors import (
    BudgetExceeded,
    CorruptMarks,
    DurabilityLost,
    LockLost,
    MarksLost,
    NoSpace,
    SessionNotFound,
)
from ...memvid.uri import SessionUri
from ..disk.upkeep_thread import UpkeepThread
from ..errors import ServiceClosed
from ..events.bus import code_of

_LOG = logging.getLogger(__name__)

REST: Final = 9
"""The rest behind a piece, by its own time: a job takes at most a tenth of a processor and of the disk from others."""

AGAIN_S: Final = 60.0
"""So long a job is put off when a piece of it fails, and twice as long each time that the next one fails, too."""

_MOST_AGAIN_S: Final = 600.0

_MOST_DOUBLINGS: Final = 10
"""A job may fail for as long as the daemon runs, and no float holds its thousandth power of two."""

_OF_ALL: Final = (NoSpace, BudgetExceeded, CorruptMarks, MarksLost, DurabilityLost, LockLost)
"""Errors of the store that the next session would meet, too."""

NOW: Final = 0.0
"""Due at once: a time that has passed."""


class Job(ABC):
    """A kind of upkeep. name: for people. Made with the loop that runs it."""

    name: ClassVar[str]

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self._thread = upkeep.thread
        upkeep.add(self)

    @abstractmethod
    def due(self) -> float | None:
        """When the next piece is due, by the monotonic clock; None: not before `look_again`. Asked behind each piece
        and each `look_again`: a piece has to change the answer, or the next one begins at once, without end."""

    @abstractmethod
    async def piece(self) -> float | None:
        """Do a bounded piece of work; what blocks on the disk by `self._thread.run`. Gives the seconds in which it kept
        a processor or the disk busy: the job then rests for `REST` times as long. None: it only waited, and needs no
        rest. What it raises is logged, and the job put off."""

    def about(self) -> str:
        """What its piece is about, for people."""
        return self.name

    def put_off(self, error: Exception, seconds: float) -> float:
        """Behind a piece that failed: the seconds until the next one may begin."""
        return seconds

    def close(self) -> None:  # noqa: B027 - most jobs hold nothing between two pieces
        """Let go of what it holds between two pieces: there will be none."""

    def look_again(self) -> None:
        """Ask when the next piece is due: something has changed."""
        self._upkeep.look_again(self)


class SessionJob(Job):
    """Looks at one session after the other, as they are noted. One at which it fails comes again later."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._noted: dict[SessionUri, None] = {}
        self._at: SessionUri | None = None
        super().__init__(upkeep)

    @abstractmethod
    async def look_at(self, uri: SessionUri) -> float | None:
        """Do the work for a session, as `piece`. May raise SessionNotFound: it is gone, which is no failure."""

    def note(self, uri: SessionUri) -> None:
        """Look at a session: it has changed."""
        self._noted[uri] = None
        self.look_again()

    def due(self) -> float | None:
        return NOW if self._noted else None

    async def piece(self) -> float | None:
        if not self._noted:
            return None  # what was noted was let go since the piece was due
        self._at = uri = next(iter(self._noted))
        del self._noted[uri]
        seconds = None
        with suppress(SessionNotFound):
            seconds = await self.look_at(uri)
        self._at = None
        return seconds

    def about(self) -> str:
        return self.name if self._at is None else f"{self.name} of {self._at}"

    def put_off(self, error: Exception, seconds: float) -> float:
        """Puts off this session; and all of them, where they would fail alike: the disk has no room, for example."""
        uri, self._at = self._at, None
        if uri is None:
            return seconds
        asyncio.get_running_loop().call_later(seconds, self.note, uri)
        return seconds if isinstance(error, _OF_ALL) else 0.0


@dataclass(frozen=True, slots=True)
class JobState:
    """What a job does. running: what its piece is about, for people; None between two pieces. last: when its last piece
    ended, next: when the next one is due; by the monotonic clock, None: never yet, and not before something changes.
    failures: of its last pieces, one after the other."""

    name: str
    running: str | None
    last: float | None
    next: float | None
    failures: int


class Upkeep:
    """Runs jobs from `start` until `close`. thread: for their work on the disk; it is there before and takes orders."""

    def __init__(self, thread: UpkeepThread) -> None:
        self.thread = thread
        self._runs: dict[Job, _Run] = {}
        self._is_open = False
        self._context = contextvars.copy_context()  # not that of a request that notes something

    def add(self, job: Job) -> None:
        """Take a job in, before the start."""
        self._runs[job] = _Run()

    def start(self) -> None:
        """Begin with the jobs."""
        self._is_open = True
        self.look_again()

    def look_again(self, job: Job | None = None) -> None:
        """Ask a job, or all of them, when their next pieces are due."""
        for each in self._runs if job is None else (job,):
            if self._runs[each].task is None:  # else behind its piece
                self._plan(each)

    def states(self) -> tuple[JobState, ...]:
        """What each job does now."""
        return tuple(
            JobState(job.name, job.about() if run.task else None, run.last, run.next, run.failures)
            for job, run in self._runs.items()
        )

    async def close(self) -> None:
        """Begin no more pieces, wait for those that run, and end the thread."""
        self._is_open = False
        for run in self._runs.values():
            run.cancel()
        while tasks := [run.task for run in self._runs.values() if run.task is not None]:
            await asyncio.wait(tasks)
        for job in self._runs:
            job.close()
        await self.thread.close()

    def _plan(self, job: Job) -> None:
        """Begin the next piece when it is due."""
        run = self._runs[job]
        run.cancel()
        if not self._is_open or (due := job.due()) is None:
            return
        run.next = max(due, run.rests_until)
        delay = max(0.0, run.next - time.monotonic())
        run.timer = asyncio.get_running_loop().call_later(delay, self._begin, job, context=self._context)

    def _begin(self, job: Job) -> None:
        """In the context of the loop, of which the task gets a copy."""
        self._runs[job].cancel()
        self._runs[job].task = asyncio.get_running_loop().create_task(self._piece(job))

    async def _piece(self, job: Job) -> None:
        run, begun, rest_s = self._runs[job], time.monotonic(), AGAIN_S  # for a piece that is cancelled
        try:
            rest_s = REST * (await job.piece() or 0.0)
            run.failures = 0
        except Exception as error:  # noqa: BLE001 - the other jobs, and its other pieces, go on
            again_s = min(_MOST_AGAIN_S, AGAIN_S * 2 ** min(run.failures, _MOST_DOUBLINGS))
            if not isinstance(error, ServiceClosed):  # else the daemon stops
                run.failures += 1
                _tell_failure(job.about(), error, again_s)
            took_s = time.monotonic() - begun  # at most: it may have waited
            rest_s = max(job.put_off(error, again_s), min(again_s, REST * took_s))
        finally:  # also if what it waited for was cancelled: else a close would wait for ever
            run.last = time.monotonic()
            run.rests_until = run.last + rest_s
            run.task = None
            self._plan(job)


@dataclass(slots=True)
class _Run:
    """How far a job has come; see `JobState`. rests_until: no piece begins before."""

    timer: asyncio.Handle | None = None
    task: asyncio.Task[None] | None = None
    rests_until: float = NOW
    last: float | None = None
    next: float | None = None
    failures: int = 0

    def cancel(self) -> None:
        """Plan no piece."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.next = None


def _tell_failure(about: str, error: Exception, again_s: float) -> None:
    is_expected = isinstance(error, TorporError)
    said = f"{code_of(error)}: {error.message}" if isinstance(error, TorporError) else repr(error)
    _LOG.warning("%s failed, and is tried again in %g s: %s", about, again_s, said, exc_info=not is_expected)
