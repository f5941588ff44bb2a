"""A hold of an event loop is found, with the place that held it; and one of a daemon, in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from torpor.tests.socket_api.loop_gaps import Gap, gaps_in, watched
from torpor.tests.socket_api.real_daemon import served, until

HELD_S = 0.1


def hold_the_loop() -> None:
    ends = time.thread_time() + HELD_S  # what others take of a core does not count
    while time.thread_time() < ends:
        pass


def wait_on_the_loop() -> None:
    time.sleep(HELD_S)


@pytest.mark.one_in(1)
async def test_a_planted_hold_is_found_with_its_place() -> None:
    found: list[Gap] = []
    with watched(found.append):
        for hold in (hold_the_loop, wait_on_the_loop):
            await asyncio.sleep(0)
            while not any(hold.__name__ in "".join(each.stack) for each in found):
                asyncio.get_running_loop().call_soon(hold)  # again: on a busy machine the looking thread may come late
                await asyncio.sleep(0)
    held = {name: gap for gap in found for name in ("hold_the_loop", "wait_on_the_loop") if name in "".join(gap.stack)}
    assert all(gap.seconds >= HELD_S / 2 for gap in held.values())
    assert held["wait_on_the_loop"].computed_s < held["wait_on_the_loop"].seconds / 2


async def test_a_loop_that_nobody_holds_has_no_gap() -> None:
    found: list[Gap] = []
    with watched(found.append, least_s=HELD_S):
        for _ in range(200):
            await asyncio.sleep(0)
    assert not found


@pytest.mark.one_in(1)
def test_a_daemon_that_stood_still_tells_it(short_path: Path) -> None:
    with served(short_path, watched=True) as daemon:
        stopped = time.monotonic()
        os.kill(daemon.process.pid, signal.SIGSTOP)
        until(lambda: time.monotonic() > stopped + HELD_S)
        os.kill(daemon.process.pid, signal.SIGCONT)
        until(lambda: any(gap.seconds >= HELD_S / 2 for gap in gaps_in(daemon.gaps, since=stopped)))
