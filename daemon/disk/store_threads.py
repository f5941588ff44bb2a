"""The threads for disk work and hashing, so that the event loop and the engine go on; and their progress reports.

The process has seven pools, and with a remote one more (`remote.py`). Five are here. Texts have one thread of their
own, because no two calls may use one tokenizer (`sessions/encoding.py`), and upkeep has one, because nothing waits for
it (`upkeep_thread.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import mlx.core as mx

from ..api.events import OnEvent, ProgressEvent, Stage

MOST_FILL_THREADS: Final = 8
"""So many hash faster than any disk reads."""

Result = TypeVar("Result")


def fill_threads() -> int:
    """How many threads fill and hash slots during wakes: one for each core that this process may use. Where the engine
    computes on the cores, too, half of them; but two, so that one reads while the other hashes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = cores // 2 if mx.default_device().type == mx.DeviceType.cpu else cores
    return min(MOST_FILL_THREADS, max(2, own))


class StoreThreads:
    """Runs store work off the event loop. fill: for the slots of wakes."""

    def __init__(self) -> None:
        self._reads: set[asyncio.Future[Any]] = set()
        # One: the store takes one writer at a time.
        self._write = ThreadPoolExecutor(1, thread_name_prefix="torpor-write")
        # Another one: no turn waits for a sleep to be written.
        self._journal = ThreadPoolExecutor(1, thread_name_prefix="torpor-journal")
        # Two: who looks may ask for all bytes of a session, and again and again, and no wake waits behind that.
        self._look = ThreadPoolExecutor(2, thread_name_prefix="torpor-look")
        # Apart from the reads: each wake waits on one of those for its slots.
        self.fill = ThreadPoolExecutor(fill_threads(), thread_name_prefix="torpor-fill")

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop: on the threads that asyncio has for short work of all
        kinds. They are enough that no wake waits for the reads of others."""
        return await self._reading(None, work)

    async def on_look(self, work: Callable[[], Result]) -> Result:
        """As `on_io`, for a view, which may take long: after the views that were asked for before."""
        return await self._reading(self._look, work)

    async def _reading(self, pool: ThreadPoolExecutor | None, work: Callable[[], Result]) -> Result:
        reading = asyncio.get_running_loop().run_in_executor(pool, work)
        self._reads.add(reading)
        reading.add_done_callback(self._has_read)
        try:
            return await asyncio.shield(reading)  # it goes on though nobody waits any more, and `close` waits for it
        finally:
            del reading  # its error, whose frames have this one, would hold itself

    def _has_read(self, reading: asyncio.Future[Any]) -> None:
        self._reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # taken, so that asyncio does not log what nobody waits for

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._write, work)

    async def on_journal(self, work: Callable[[], Result]) -> Result:
        """Run work on the journal, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._journal, work)

    async def close(self) -> None:
        """Wait for running reads and writes, and end the threads."""
        for pool in (self._journal, self._write):
            await asyncio.to_thread(pool.shutdown)
        while self._reads:
            await asyncio.wait(self._reads)
        for pool in (self._look, self.fill):
            await asyncio.to_thread(pool.shutdown)


def reporter(stage: Stage, emit: OnEvent) -> Callable[[int, int], None]:
    """A function that reports progress from any thread to the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, ProgressEvent(stage, done, total))

    return report
