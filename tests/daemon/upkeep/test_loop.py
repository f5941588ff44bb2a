"""The loop of upkeep: a job runs when it is due and never else, rests, is put off when it fails, and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
from torpor.daemon.disk.upkeep_thread import UpkeepThread
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.tasks.door import Door, Phase
from torpor.daemon.upkeep import loop
from torpor.daemon.upkeep.loop import NOW, Job, RecurringJob, SessionJob, Upkeep
from torpor.memvid.errors import CorruptMarks, DurabilityLost, NoSpace, SessionNotFound, StoreIoError
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import until

A, B = SessionUri("default", "a"), SessionUri("default", "b")
request: ContextVar[str] = ContextVar("request", default="none")


async def end(upkeep: Upkeep) -> None:
    upkeep.thread._door.begin_to_stop(Phase.CLOSED, 0.0)
    await upkeep.close()


@asynccontextmanager
async def running(*kinds: Any) -> Any:
    upkeep = Upkeep(UpkeepThread(Door()))
    jobs = [kind(upkeep) for kind in kinds]
    upkeep.start()
    try:
        yield upkeep, *jobs
    finally:
        await end(upkeep)


class Times(Job[None]):
    """Due at each of some times. seen: when its pieces began; asked: how often it was asked."""

    name: ClassVar = "times"

    def __init__(self, upkeep: Upkeep) -> None:
        self.times: list[float] = []
        self.seen: list[float] = []
        self.asked = 0
        self.seconds: float | None = None
        self.error: Exception | None = None
        self.going_on = asyncio.Event()
        self.going_on.set()
        super().__init__(upkeep)

    def due(self) -> list[tuple[None, float]]:
        self.asked += 1
        return [(None, at) for at in self.times]

    async def piece(self, _: None) -> float | None:
        self.times.remove(min(self.times))
        self.seen.append(time.monotonic())
        await self.going_on.wait()
        if self.error is not None:
            raise self.error
        return self.seconds

    def at(self, *times: float) -> None:
        self.times += times
        self.look_again()


class Other(Times):
    name: ClassVar = "other"


class Sessions(SessionJob):
    """Looks at sessions. bad: at which it fails, with which error."""

    name: ClassVar = "look"

    def __init__(self, upkeep: Upkeep) -> None:
        self.seen: list[SessionUri] = []
        self.bad: dict[SessionUri, Exception] = {}
        super().__init__(upkeep)

    async def look_at(self, uri: SessionUri) -> None:
        self.seen.append(uri)
        if uri in self.bad:
            raise self.bad[uri]


class Models(RecurringJob[SessionUri]):
    """Comes again to what was noted, a hundredth of a second after the last time."""

    name: ClassVar = "watch"

    def __init__(self, upkeep: Upkeep) -> None:
        self.seen: list[SessionUri] = []
        self.noted: list[SessionUri] = []
        self.bad: dict[SessionUri, Exception] = {}
        super().__init__(upkeep)

    def note(self, item: SessionUri) -> None:
        self.noted.append(item)
        self.look_again()

    def uses(self) -> dict[SessionUri, tuple[float, float]]:
        return dict.fromkeys(self.noted, (NOW, 0.01))

    async def look_at(self, item: SessionUri) -> None:
        self.seen.append(item)
        if item in self.bad:
            raise self.bad[item]


async def settled() -> None:
    await asyncio.sleep(0.03)


# --- when


async def test_a_piece_begins_when_it_is_due_and_none_is_asked_for_meanwhile() -> None:
    async with running(Times) as (_, job):
        now = time.monotonic()
        job.at(now + 0.1, now + 0.05, NOW)
        await until(lambda: len(job.seen) == 3)
        assert all(seen - now >= due for seen, due in zip(job.seen, (0, 0.05, 0.1), strict=True))
        asked = job.asked
        await settled()
        assert job.asked == asked, "nothing is due, so nothing wakes"


async def test_before_the_start_and_after_the_end_nothing_begins() -> None:
    upkeep = Upkeep(UpkeepThread(Door()))
    job = Times(upkeep)
    job.at(NOW)
    await settled()
    assert job.seen == []
    upkeep.start()
    await until(lambda: len(job.seen) == 1)
    await end(upkeep)
    job.at(NOW)
    await settled()
    assert len(job.seen) == 1


async def test_what_is_noted_during_a_piece_is_done_behind_it() -> None:
    async with running(Times) as (_, job):
        job.going_on.clear()
        job.at(NOW)
        await until(lambda: len(job.seen) == 1)
        job.at(NOW)
        await settled()
        assert len(job.seen) == 1, "one piece at a time"
        job.going_on.set()
        await until(lambda: len(job.seen) == 2)


async def test_a_piece_that_waits_keeps_no_other_job_waiting() -> None:
    async with running(Times, Other) as (_, waiting, other):
        waiting.going_on.clear()
        waiting.at(NOW)
        other.at(NOW)
        await until(lambda: len(other.seen) == 1)
        waiting.going_on.set()


async def test_a_job_rests_by_the_time_that_a_piece_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REST", 10)
    async with running(Times) as (_, job):
        job.seconds = 0.01
        job.at(NOW, NOW)
        await until(lambda: len(job.seen) == 2)
        assert job.seen[1] - job.seen[0] >= 0.1


async def test_a_job_rests_behind_a_piece_that_fails_too_before_it_looks_at_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "REST", 10)
    monkeypatch.setattr(loop, "AGAIN_S", 3600.0)
    at = list[float]()

    class Slow(Sessions):
        async def look_at(self, uri: SessionUri) -> None:
            at.append(time.monotonic())
            await asyncio.sleep(0.02)
            await super().look_at(uri)

    async with running(Slow) as (_, job):
        job.bad[A] = StoreIoError("No.")
        job.note(A)
        job.note(B)
        await until(lambda: job.seen == [A, B])
        assert at[1] - at[0] >= 0.2


async def test_a_piece_runs_for_no_request_also_where_one_has_noted_what_is_due() -> None:
    seen = []

    class Asks(Sessions):
        async def look_at(self, uri: SessionUri) -> None:
            seen.append(request.get())
            request.set("of the piece before")

    async with running(Asks) as (_, job):
        request.set("a request")
        for _ in range(2):
            job.note(A)
            await until(lambda: not job._noted)
            await settled()
        request.set("none")
    assert seen == ["none", "none"]


# --- failures


async def test_a_piece_that_fails_is_told_and_the_job_put_off_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "AGAIN_S", 0.04)
    async with running(Times, Other) as (upkeep, job, other):
        job.error = StoreIoError("No.")
        job.at(NOW, NOW, NOW)
        other.at(NOW)
        with caplog.at_level(logging.WARNING):
            await until(lambda: len(job.seen) == 3)
        (state, _) = upkeep.states()
        assert (state.failures, len(other.seen)) == (3, 1)
        assert job.seen[1] - job.seen[0] >= 0.04
        assert job.seen[2] - job.seen[1] >= 0.08
        job.error = None
        job.at(NOW)
        await until(lambda: len(job.seen) == 4 and upkeep.states()[0].failures == 0)
    assert "times failed, and is tried again in 0.04 s: store_io: No." in caplog.text


@pytest.mark.parametrize("kind", [Sessions, Models])
async def test_an_item_that_fails_comes_again_later_and_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, kind: type[Sessions | Models]
) -> None:
    monkeypatch.setattr(loop, "AGAIN_S", 3600.0)
    async with running(kind) as (upkeep, job):
        job.bad[A] = ZeroDivisionError()
        job.note(A)
        job.note(B)
        await until(lambda: job.seen[:2] == [A, B])
        job.note(A)
        job.note(B)
        await until(lambda: job.seen.count(B) >= 2)
        await settled()
        assert (job.seen.count(A), upkeep.states()[0].failures) == (1, 1), "nothing hurries it"
        monkeypatch.setattr(loop, "AGAIN_S", 0.01)
        upkeep._runs[job].failures.clear()  # an hour has gone by
        job.look_again()
        await until(lambda: job.seen.count(A) >= 3)
        del job.bad[A]
        await until(lambda: upkeep.states()[0].failures == 0)


async def test_a_job_may_fail_more_often_than_a_float_has_doublings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_MOST_AGAIN_S", 0.01)
    async with running(Sessions) as (upkeep, job):
        upkeep._runs[job].failures[A] = loop._Failure(2000, time.monotonic())
        job.bad[A] = StoreIoError("No.")
        job.note(A)
        await until(lambda: job.seen == [A, A])
        del job.bad[A]
        await until(lambda: upkeep.states()[0].failures == 0)


@pytest.mark.parametrize("error", [NoSpace("full"), CorruptMarks("damaged"), DurabilityLost("no flush")])
async def test_where_all_sessions_would_fail_alike_no_other_is_tried(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(loop, "AGAIN_S", 3600.0)
    async with running(Sessions) as (_, job):
        job.bad[A] = error
        job.note(A)
        job.note(B)
        await until(lambda: job.seen == [A])
        await settled()
        assert job.seen == [A]


async def test_a_session_that_is_let_go_before_its_piece_begins_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with running(Sessions) as (upkeep, sessions):
        begin = upkeep._begin

        def let_go_first(job: Job) -> None:
            begin(job)
            sessions._noted.pop(A)

        upkeep._begin = let_go_first
        sessions.note(A)
        await until(lambda: upkeep.states()[0].last is not None)
        assert (sessions.seen, upkeep.states()[0].failures, caplog.records) == ([], 0, [])


async def test_a_session_that_is_gone_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with running(Sessions) as (upkeep, job):
        job.bad[A] = SessionNotFound("gone")
        job.note(A)
        job.note(B)
        await until(lambda: job.seen == [A, B])
        await until(lambda: upkeep.states()[0].running is None)
    assert caplog.text == ""


# --- state, and the end


async def test_its_state_is_a_value() -> None:
    async with running(Times, Sessions) as (upkeep, times, sessions):
        times.going_on.clear()
        times.at(NOW)
        sessions.note(A)
        await until(lambda: sessions.seen == [A] and len(times.seen) == 1)
        await settled()
        of_times, of_sessions = upkeep.states()
        assert (of_times.name, of_times.running, of_times.last, of_times.next) == ("times", "times", None, None)
        assert (of_sessions.running, of_sessions.next, of_sessions.failures) == (None, None, 0)
        assert of_sessions.last is not None
        times.going_on.set()
        due = time.monotonic() + 3600
        times.at(due)
        await until(lambda: upkeep.states()[0].next == due)


async def test_a_close_waits_for_the_piece_that_runs_and_has_it_stop() -> None:
    class Long(Sessions):
        async def look_at(self, uri: SessionUri) -> None:
            async with self._thread.piece():
                await self._thread.run(self.work)
            self.seen.append(uri)

        def work(self) -> None:
            while not self._thread.must_stop():
                time.sleep(0.001)

    async with running(Long) as (upkeep, job):
        job.note(A)
        await until(lambda: upkeep.states()[0].running == "look of torpor://default/a")
        job.note(B)
        await end(upkeep)
        assert job.seen == [A]
        with pytest.raises(ServiceClosed):
            await upkeep.thread.order(int)


async def test_a_close_waits_for_a_piece_that_waits_for_something_else() -> None:
    async with running(Times) as (upkeep, job):
        job.going_on.clear()
        job.at(NOW)
        await until(lambda: len(job.seen) == 1)
        closing = asyncio.ensure_future(end(upkeep))
        await settled()
        assert not closing.done()
        job.going_on.set()
        await closing
        assert upkeep.states()[0].running is None


async def test_a_piece_that_is_cancelled_ends_and_keeps_no_close_waiting() -> None:
    async with running(Times) as (upkeep, times):
        times.going_on.clear()
        times.times = [NOW]
        times.look_again()
        await until(lambda: times.seen)
        (state,) = upkeep.states()
        assert state.running is not None
        times.times = []
        upkeep._runs[times].task.cancel()
        await until(lambda: upkeep.states()[0].running is None)
    assert upkeep.states()[0].last is not None


async def test_a_daemon_that_stops_is_no_failure_of_a_piece(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AGAIN_S", 3600.0)

    class Late(Sessions):
        async def look_at(self, uri: SessionUri) -> None:
            self.seen.append(uri)
            async with self._thread.piece():
                raise AssertionError

    async with running(Late) as (upkeep, job):
        upkeep.thread._door.begin_to_stop(Phase.STOPPING, 0.0)
        job.note(A)
        await until(lambda: job.seen == [A])
        await settled()
        assert job.seen == [A], "it does not try again and again"
    assert caplog.text == ""
