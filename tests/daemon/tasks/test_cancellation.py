"""Waiting that outlasts a cancellation."""

from __future__ import annotations

import asyncio

import pytest
from torpor.daemon.tasks.cancellation import settled, to_the_end
from torpor.tests.daemon.session_rig import cancelled


async def test_work_runs_to_its_end_when_the_caller_is_cancelled_again_and_again() -> None:
    gate, log = asyncio.Event(), []

    async def work() -> int:
        await gate.wait()
        log.append("done")
        return 1

    task = asyncio.ensure_future(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    await cancelled(task)
    assert log == ["done"]


async def test_result_and_error_of_the_work_are_the_callers() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def succeed() -> int:
        return 5

    assert await to_the_end(succeed()) == 5
    with pytest.raises(KeyError):
        await to_the_end(fail())


async def test_an_error_after_a_cancellation_is_dropped_quietly() -> None:
    gate = asyncio.Event()

    async def fail() -> None:
        await gate.wait()
        raise KeyError("nobody hears it")

    task = asyncio.ensure_future(to_the_end(fail()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    await cancelled(task)


async def test_a_future_that_is_itself_cancelled_counts_as_settled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await settled(future)


async def test_several_wait_for_one_task_and_one_that_is_cancelled_does_not_end_it_for_the_others() -> None:
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    task = asyncio.ensure_future(work())
    first, second = (asyncio.ensure_future(to_the_end(task)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    gate.set()
    await cancelled(first)
    assert await second == 7
    assert await to_the_end(task) == 7
