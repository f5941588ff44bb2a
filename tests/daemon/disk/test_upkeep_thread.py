"""Upkeep and requests know of each other: who waits, who stops, and who has had room given back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torpor.daemon.disk.upkeep_thread import UpkeepThread
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.tasks.door import Door, Phase
from torpor.tests.daemon.session_rig import DEADLINE_S, Gate, cancelled, until


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def thread(door: Door) -> Iterator[UpkeepThread]:
    upkeep = UpkeepThread(door)
    yield upkeep
    door.begin_to_stop(Phase.STOPPING, 0.0)  # else a repack of a test that has failed goes on
    upkeep._pool.shutdown()


class Repack:
    """A repack that goes on until it is told to stop, or its gate is opened."""

    def __init__(self, thread: UpkeepThread, *, is_order: bool = False) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = False
        self.result = asyncio.ensure_future(thread.repack(self._work, is_order=is_order))

    def _work(self, should_stop: Callable[[], bool]) -> int:
        self.begun.set()
        while not should_stop() and not self.may_end.wait(0.001):
            pass
        time.sleep(0.02)  # it removes its file
        self.has_ended = True
        return 7

    async def is_stopped(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            result, was_told = await self.result
        assert result == 7
        return was_told


async def waiting(work: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_work_is_done_one_after_the_other_on_one_thread_that_has_a_name(thread: UpkeepThread) -> None:
    names = [await thread.order(lambda: threading.current_thread().name) for _ in range(2)]
    async with thread.piece():
        names.append(await thread.run(lambda: threading.current_thread().name))
    assert names == ["torpor-upkeep_0"] * 3


async def test_a_piece_is_told_to_stop_once_an_order_waits_and_the_order_goes_next(thread: UpkeepThread) -> None:
    async with thread.piece():
        assert not thread.must_stop()
        order = await waiting(thread.order(lambda: "done"))
        assert thread.must_stop()
    assert await order == "done"
    assert not thread.must_stop()


async def test_a_piece_is_told_to_stop_while_a_sleep_is_written(thread: UpkeepThread) -> None:
    with thread.sleeps:
        assert thread.must_stop()
    assert not thread.must_stop()


async def test_work_whose_caller_leaves_is_waited_for_before_other_work_begins(thread: UpkeepThread) -> None:
    gate = Gate()
    order = asyncio.ensure_future(thread.order(gate.pass_through))
    await gate.reached()
    order.cancel()
    other = await waiting(thread.order(lambda: "other"))
    assert thread._turn.locked(), "else an end would wait for the thread, and the event loop with it"
    gate.open()
    await cancelled(order)
    assert await other == "other"


# --- repacks


async def test_a_repack_that_is_upkeep_begins_when_no_sleep_is_written_and_stops_for_one(thread: UpkeepThread) -> None:
    with thread.sleeps:
        repack = Repack(thread)
        await asyncio.sleep(0.01)
        assert not repack.begun.is_set()
    await until(repack.begun.is_set)
    with thread.sleeps:
        assert await repack.is_stopped()


async def test_a_repack_that_is_asked_for_goes_on_beside_sleeps_that_have_room(thread: UpkeepThread) -> None:
    repack = Repack(thread, is_order=True)
    await until(repack.begun.is_set)
    with thread.sleeps:
        await asyncio.sleep(0.01)
        repack.may_end.set()
        assert not await repack.is_stopped()


@pytest.mark.parametrize("is_order", [False, True])
async def test_a_sleep_without_room_has_every_repack_stop_and_none_begin(thread: UpkeepThread, is_order: bool) -> None:
    before, repack = thread.repacks_ended, Repack(thread, is_order=is_order)
    await until(repack.begun.is_set)
    with thread.sleeps, thread.claims:
        assert await thread.wait_for_room(before)
        assert repack.has_ended
        assert await repack.is_stopped()
        later = Repack(thread, is_order=is_order)
        await asyncio.sleep(0.01)
        assert not later.begun.is_set()
        assert not await thread.wait_for_room(thread.repacks_ended), "what has not begun is not waited for"
    later.may_end.set()
    assert not await later.is_stopped()


async def test_there_is_no_more_room_where_no_repack_was_under_way(thread: UpkeepThread) -> None:
    with thread.claims:
        assert not await thread.wait_for_room(thread.repacks_ended)


async def test_one_that_ended_during_the_first_try_has_given_room_back(thread: UpkeepThread) -> None:
    before, repack = thread.repacks_ended, Repack(thread)
    repack.may_end.set()
    await repack.is_stopped()
    with thread.claims:
        assert await thread.wait_for_room(before)
        assert not await thread.wait_for_room(thread.repacks_ended)


async def test_a_sleep_without_room_does_not_wait_for_other_work(thread: UpkeepThread) -> None:
    gate = Gate()
    order = asyncio.ensure_future(thread.order(gate.pass_through))
    await gate.reached()
    with thread.claims:
        assert not await thread.wait_for_room(thread.repacks_ended)
    gate.open()
    await order


# --- the end


async def test_a_stop_lets_the_work_that_runs_end_and_begins_no_more(thread: UpkeepThread, door: Door) -> None:
    gate = Gate()
    running = asyncio.ensure_future(thread.order(gate.pass_through))
    await gate.reached()
    late = await waiting(thread.order(int))
    assert thread.must_stop(), "an order waits"
    door.begin_to_stop(Phase.STOPPING, 0.0)
    closing = await waiting(thread.close())
    gate.open()
    await running
    with pytest.raises(ServiceClosed):
        await late
    await closing
    with pytest.raises(ServiceClosed):
        async with thread.piece():
            pass
