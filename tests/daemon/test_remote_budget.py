"""A day's budget of the remote: what it holds back, and what it never does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torpor.daemon.upkeep import uploading
from torpor.memvid.disk.daily_budget import DailyBudget, Used
from torpor.memvid.folder import used_days
from torpor.memvid.remote import uploading as sending
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, freed, remote_of
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until

BOUNDED = {"remote_daily_budget": DailyBudget(requests=5000)}
DAY_NS = 24 * 3600 * 10**9


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The fixture: sets the day of the count."""

    def at(number: int) -> None:
        monkeypatch.setattr(used_days, "now_ns", lambda: number * DAY_NS)

    at(20_000)
    monkeypatch.setattr(uploading, "_LOOK_S", 0.05)
    return at


def use_up(rig: Rigged) -> None:
    rig.service._parts.store.disk._core.used_days.add(Used(reads=5000))


async def newest_in(rig: Rigged, uri: SessionUri = S) -> str | None:
    head = await remote_of(rig).head(uri)
    return None if head is None else head.newest


def job_of(rig: Rigged) -> uploading.Uploading:
    job = rig.service._parts.upkeep.uploading
    assert job is not None
    return job


async def waiting(rig: Rigged) -> Any:
    """What the status says once a session waits."""
    await until(lambda: job_of(rig).use_today().waiting > 0)
    return (await rig.service.status()).remote


async def test_what_nobody_waits_for_waits_for_the_next_day(
    machine: OpenMachine, day: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is sent then, by the same daemon."""
    async with machine("one", **BOUNDED) as one:
        use_up(one)
        slept = await one.asleep("s", tokens_of(1, 300))
        told = await waiting(one)
        assert (told.daily_budget, told.waiting) == ("5,000 requests", 1)
        assert told.requests > 5000
        assert told.dollars > 0
        assert await newest_in(one) is None
        assert remote_of(one).has(S), "nobody else takes it before it is there"
        assert caplog.text.count("budget of this day is used up") == 1
        day(20_001)
        await freed(one)
        assert await newest_in(one) == slept.bundle_id


async def test_a_version_that_is_larger_than_the_budget_goes_there_in_some_days(
    machine: OpenMachine, day: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops between two packs, and no byte is sent twice."""
    monkeypatch.setattr(sending, "MAX_SENT_PACK_BYTES", 1)
    async with machine("one", remote_daily_budget=DailyBudget(bytes_sent=20_000)) as one:
        slept, leases = await one.asleep("s", tokens_of(1, 600)), remote_of(one).leases
        days = sent = 0
        while S in leases:
            day(20_000 + days)
            await until(lambda: S not in leases or job_of(one).use_today().waiting > 0)
            days, sent = days + 1, sent + job_of(one).use_today().bytes_sent
        assert await newest_in(one) == slept.bundle_id
        assert days > 2
        assert sent < 1.5 * slept.bytes_written


@pytest.mark.one_in(1)
async def test_what_was_sent_for_a_version_that_is_gone_is_not_sent_again(
    machine: OpenMachine, day: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the budget of the day, and goes while it is on its way: as one of write behind does, once a sleep
    covers it."""
    is_sent, may_end, ends = threading.Event(), threading.Event(), sending.RemoteVersions.put_version

    def put_version(*args: Any) -> str:
        is_sent.set()
        assert may_end.wait(20)
        return ends(*args)

    monkeypatch.setattr(sending.RemoteVersions, "put_version", put_version)
    async with machine("one", remote_daily_budget=DailyBudget(bytes_sent=20_000)) as one:
        await one.read("s", tokens_of(1, 512))
        await one.service.save("s")
        await until(is_sent.is_set)
        await one.service.append("s", tokens=tokens_of(2, 20))
        slept = await one.sleep("s")
        await one.service.delete("s@1")
        may_end.set()
        told = await waiting(one)
        assert await newest_in(one) is None
        pushed = await one.service.push("s")
        assert (pushed.blocks_sent, pushed.blocks) == (2, 4), "two whole ones are there"
        assert pushed.bytes_sent < told.bytes_sent
        assert await newest_in(one) == slept.bundle_id


async def test_who_waits_for_the_remote_is_not_held_back(machine: OpenMachine, day: Callable[[int], None]) -> None:
    """A second receipt, a push, and a machine that asks for a session."""
    async with machine("one", remote_lease=1.0, **BOUNDED) as one, machine("two", remote_lease=1.0) as two:
        use_up(one)
        await one.read("s", tokens_of(1, 300))
        slept = await one.service.sleep("s", remote=True)
        assert slept.remote.bundle_id == await newest_in(one)
        for name in ("pushed", "asked"):
            await one.asleep(name, tokens_of(2, 40))
        assert (await one.service.push("pushed")).bytes_sent > 0
        assert await newest_in(one, SessionUri("default", "asked")) is None
        assert (await two.wake("asked")).token_count == 40


async def test_a_stop_sends_no_more_than_the_day_may_use_and_the_next_start_sends_the_rest(
    machine: OpenMachine, day: Callable[[int], None]
) -> None:
    async with machine("one", **BOUNDED) as one:
        use_up(one)
        await one.asleep("s", tokens_of(1, 300))
        await waiting(one)
        count = one.service._parts.store.disk._core.used_days
        used = count.today()
    assert count.today() == used
    async with machine("one", **BOUNDED) as one:
        await waiting(one)
        assert await newest_in(one) is None
        day(20_001)
        await freed(one)
