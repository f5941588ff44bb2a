"""The loop of upkeep: jobs that no request waits for, each when it is due, a piece at a time.

A job tells when the next piece of each of its items is due, and does it. All else is here: it runs, rests and ends, and
an item whose piece fails is put off while the others go on. Nothing wakes while nothing is due. Work on the disk is
done on one thread, where it yields to requests (`disk/upkeep_thread.py`). A piece that waits for a session, for memory
or for a model keeps no other job waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

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
"""So long an item is put off when its piece fails, and twice as long each time that the next one fails, too."""

_MOST_AGAIN_S: Final = 600.0

_MOST_DOUBLINGS: Final = 10
"""An item may fail for as long as the daemon runs, and no float holds its thousandth power of two."""

_OF_ALL: Final = (NoSpace, BudgetExceeded, CorruptMarks, MarksLost, DurabilityLost, LockLost, ServiceClosed)
"""Errors that the next item would meet, too: all of them are put off."""

NOW: Final = 0.0
"""Due at once: a time that has passed."""

Item = TypeVar("Item")


class Job(ABC, Generic[Item]):
    """A kind of upkeep, done for one item after the other: a session, a model; None, where it is for no single one.
    name: for people. Made with the loop that runs it."""

    name: ClassVar[str]

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self._thread = upkeep.thread
        upkeep.add(self)

    @abstractmethod
    def due(self) -> Iterable[tuple[Item, float]]:
        """Its items, each with the time when its next piece is due, by the monotonic clock. Of those that are due, the
        first one is next. What is not among them waits for `look_again`. Asked behind each piece and each `look_again`:
        a piece has to change the answer, or the next one begins at once, without end."""

    @abstractmethod
    async def piece(self, item: Item) -> float | None:
        """Do a bounded piece of work; what blocks on the disk by `self._thread.run`. Gives the seconds in which it kept
        a processor or the disk busy: the job then rests for `REST` times as long. None: it only waited, and needs no
        rest. What it raises is logged, and the item put off."""

    def close(self) -> None:
        """Let go of what it holds between two pieces: there will be none."""

    def look_again(self) -> None:
        """Ask when the next piece is due: something has changed."""
        self._upkeep.look_again(self)

    def try_again(self) -> None:
        """Do what was put off: what it failed for is over."""
        for item, _ in self.due():
            self._upkeep.put_off_no_more(self, item)
        self.look_again()


class SessionJob(Job[SessionUri | None]):
    """Looks at one session after the other, as they are noted."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._noted: dict[SessionUri, None] = {}
        super().__init__(upkeep)

    @abstractmethod
    async def look_at(self, uri: SessionUri) -> float | None:
        """Do the work for a session, as `piece`. May raise SessionNotFound: it is gone, which is no failure."""

    def note(self, uri: SessionUri) -> None:
        """Look at a session: it has changed."""
        self._noted[uri] = None
        self.look_again()

    def note_at_once(self, uri: SessionUri) -> None:
        """As `note`, also if it failed and was put off: somebody waits for it."""
        self._upkeep.put_off_no_more(self, uri)
        self.note(uri)

    def due(self) -> Iterable[tuple[SessionUri | None, float]]:
        return ((uri, NOW) for uri in self._noted)

    async def piece(self, uri: SessionUri | None) -> float | None:
        if uri is None or uri not in self._noted:
            return None  # it was let go since it was due
        del self._noted[uri]
        try:
            return await self.look_at(uri)
        except SessionNotFound:
            return None
        except Exception:
            self._noted[uri] = None
            raise


class RecurringJob(Job[Item]):
    """Comes again to each of its items, some time after the last use of that, and as long after its last piece."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._begun: dict[Item, float] = {}
        super().__init__(upkeep)

    @abstractmethod
    def uses(self) -> Mapping[Item, tuple[float, float]]:
        """Of each item the time of its last use, by the monotonic clock, and the seconds after which it is due."""

    @abstractmethod
    async def look_at(self, item: Item) -> None:
        """Do the work for an item, as `piece`."""

    def due(self) -> Iterable[tuple[Item, float]]:
        """The longest due first."""
        uses = self.uses()
        self._begun = {item: begun for item, begun in self._begun.items() if item in uses}
        times = [(item, max(used, self._begun.get(item, used)) + after) for item, (used, after) in uses.items()]
        return sorted(times, key=lambda each: each[1])

    async def piece(self, item: Item) -> None:
        if item in self.uses():  # else it has gone since it was due
            self._begun[item] = time.monotonic()
            await self.look_at(item)


@dataclass(frozen=True, slots=True)
class JobState:
    """What a job does. running: what its piece is about, for people; None between two pieces. last: when its last piece
    ended, next: when the next one is due; by the monotonic clock, None: never yet, and not before something changes.
    failures: how often those of its items failed that fail now, each since it last did not."""

    name: str
    running: str | None
    last: float | None
    next: float | None
    failures: int


class Upkeep:
    """Runs jobs from `start` until `close`. thread: for their work on the disk; it is there before and takes orders."""

    def __init__(self, thread: UpkeepThread) -> None:
        self.thread = thread
        self._runs: dict[Job[Any], _Run] = {}
        self._is_open = False
        self._context = contextvars.copy_context()  # not that of a request that notes something

    def add(self, job: Job[Any]) -> None:
        """Take a job in, before the start."""
        self._runs[job] = _Run()

    def start(self) -> None:
        """Begin with the jobs."""
        self._is_open = True
        self.look_again()

    def look_again(self, job: Job[Any] | None = None) -> None:
        """Ask a job, or all of them, when their next pieces are due."""
        for each in self._runs if job is None else (job,):
            if self._runs[each].task is None:  # else behind its piece
                self._plan(each)

    def put_off_no_more(self, job: Job[Item], item: Item) -> None:
        """An item is due again, whatever came of it so far. What puts off all items of the job does so still."""
        self._runs[job].failures.pop(item, None)

    def states(self) -> tuple[JobState, ...]:
        """What each job does now."""
        return tuple(
            JobState(
                job.name,
                _about(job, run.item) if run.task else None,
                run.last,
                run.next,
                sum(each.count for each in run.failures.values()),
            )
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

    def _plan(self, job: Job[Any]) -> None:
        """Begin the next piece when it is due."""
        run = self._runs[job]
        run.cancel()
        if not self._is_open or (found := run.first_of(job.due())) is None:
            return
        _, run.next = found
        delay = max(0.0, run.next - time.monotonic())
        run.timer = asyncio.get_running_loop().call_later(delay, self._begin, job, context=self._context)

    def _begin(self, job: Job[Any]) -> None:
        """In the context of the loop, of which the task gets a copy."""
        run = self._runs[job]
        found = run.first_of(job.due())
        if found is None or found[1] > time.monotonic():
            self._plan(job)  # what was due was let go
            return
        run.cancel()
        run.item = found[0]
        run.task = asyncio.get_running_loop().create_task(self._piece(job, run.item))

    async def _piece(self, job: Job[Any], item: Any) -> None:
        run, begun, rest_s = self._runs[job], time.monotonic(), AGAIN_S  # for a piece that is cancelled
        try:
            rest_s = REST * (await job.piece(item) or 0.0)
            run.is_well(item)
        except Exception as error:  # noqa: BLE001 - the other jobs, and its other items, go on
            again_s = run.put_off(None if isinstance(error, _OF_ALL) else item)
            if not isinstance(error, ServiceClosed):  # else the daemon stops
                _tell_failure(_about(job, item), error, again_s)
            rest_s = min(again_s, REST * (time.monotonic() - begun))  # at most: it may have waited
        finally:  # also if what it waited for was cancelled: else a close would wait for ever
            run.last = time.monotonic()
            run.rests_until = run.last + rest_s
            run.task = None
            self._plan(job)


@dataclass(frozen=True, slots=True)
class _Failure:
    """count: how often it came, without a success between. until: it is put off so long, by the monotonic clock."""

    count: int
    until: float


@dataclass(slots=True)
class _Run:
    """How far a job has come; see `JobState`. item: of the last piece. rests_until: no piece begins before. failures:
    of items that are put off; at None, of all of them."""

    timer: asyncio.Handle | None = None
    task: asyncio.Task[None] | None = None
    item: Any = None
    rests_until: float = NOW
    last: float | None = None
    next: float | None = None
    failures: dict[Any, _Failure] = field(default_factory=dict)

    def cancel(self) -> None:
        """Plan no piece."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.next = None

    def first_of(self, due: Iterable[tuple[Any, float]]) -> tuple[Any, float] | None:
        """The item of the next piece, and when that may begin; None without one."""
        now, first = time.monotonic(), None
        for item, at in due:
            begins = max(at, self._put_off_until(item))
            if first is None or begins < first[1]:
                first = item, begins
            if begins <= now:
                break
        if first is None:
            return None
        item, begins = first
        return item, max(begins, self.rests_until, self._put_off_until(None))

    def put_off(self, item: Any) -> float:
        """Behind a piece that failed: put off its item, or at None all of them. Gives the seconds."""
        now = time.monotonic()
        # Without those that never came again: they are gone.
        self.failures = {each: last for each, last in self.failures.items() if now < last.until + _MOST_AGAIN_S}
        count = self.failures[item].count if item in self.failures else 0
        again_s: float = min(_MOST_AGAIN_S, AGAIN_S * 2 ** min(count, _MOST_DOUBLINGS))
        self.failures[item] = _Failure(count + 1, now + again_s)
        return again_s

    def is_well(self, item: Any) -> None:
        """Behind a piece that did not fail."""
        self.failures.pop(item, None)
        self.failures.pop(None, None)

    def _put_off_until(self, item: Any) -> float:
        return self.failures[item].until if item in self.failures else NOW


def _about(job: Job[Any], item: Any) -> str:
    """What a piece is about, for people."""
    return job.name if item is None else f"{job.name} of {item}"


def _tell_failure(about: str, error: Exception, again_s: float) -> None:
    is_expected = isinstance(error, TorporError)
    said = f"{code_of(error)}: {error.message}" if isinstance(error, TorporError) else repr(error)
    _LOG.warning("%s failed, and is tried again in %g s: %s", about, again_s, said, exc_info=not is_expected)
