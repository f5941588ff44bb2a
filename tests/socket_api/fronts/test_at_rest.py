"""While nobody asks, nothing in the daemon waits for less than a second, so it wakes less than once in one."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

from torpor.tests.socket_api.fronts.fronts_rig import Front, Whole

SHORTEST_S = 1.0


def short_timers() -> list[asyncio.TimerHandle]:
    """Those of the running loop that are due in less."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return [each for each in timers if not each.cancelled() and each.when() < loop.time() + SHORTEST_S]


def short_waits(threads: dict[int, str]) -> Iterator[tuple[str, float]]:
    """The threads that wait on a lock for less, with the seconds."""
    for number, frame in sys._current_frames().items():
        while number in threads and frame is not None:
            timeout = frame.f_locals.get("timeout") if frame.f_code.co_filename == threading.__file__ else None
            if timeout is not None and timeout < SHORTEST_S:
                yield threads[number], timeout
            frame = frame.f_back  # type: ignore[assignment]


def test_while_nobody_asks_nothing_waits_for_less_than_a_second(whole: Whole, there: Front, name: str) -> None:
    there.append(name, text="Read on.", create=True)
    there.sleep(name)
    there.append(name, text="And on.")
    deadline = time.monotonic() + 20
    while any(whole.do(short_timers) for _ in range(3)):  # three times: one that has just gone off is not among them
        assert time.monotonic() < deadline
        time.sleep(0.01)
    others = {each.ident or 0: each.name for each in threading.enumerate() if each is not threading.current_thread()}
    assert list(short_waits(others)) == []
