"""The threads that wait for the disk or hash, so that the event loop and the engine go on; and how they tell on the
loop how far they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...memvid.errors import IndexFailed
from ...memvid.store import Store
from ..api.events import OnEvent, ProgressEvent, Stage

READ_THREADS: Final = 2
"""Threads that look into the store and read snapshots. Writing has one of its own: the store takes one writer at a
time, and those that wait for it must not keep a wake from its thread."""

FILL_THREADS: Final = 2
"""Threads that fill and hash slots during wakes. Hashing and reading release the GIL; two keep two cores busy."""

Result = TypeVar("Result")


class StoreThreads:
    """Runs store work off the event loop. fill: for the slots of wakes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="torpor-read")
        self._write = ThreadPoolExecutor(1, thread_name_prefix="torpor-write")
        self.fill = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="torpor-fill")

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._read, work)

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._write, work)

    async def on_indexed_writer(self, work: Callable[[], Result]) -> Result:
        """As `on_writer`; an index that fails is made anew from the bundles, and the work done once more."""
        try:
            return await self.on_writer(work)
        except IndexFailed:
            await self.on_writer(self._store.rebuild_index)
            return await self.on_writer(work)

    def end_writing(self) -> None:
        """Wait for what is being written; nothing more is."""
        self._write.shutdown()

    def close(self) -> None:
        """Wait for what is being written and read, and end the threads."""
        self.end_writing()
        self._read.shutdown()
        self.fill.shutdown()


def reporter(stage: Stage, emit: OnEvent) -> Callable[[int, int], None]:
    """Progress from any thread, delivered on the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, ProgressEvent(stage, done, total))

    return report
