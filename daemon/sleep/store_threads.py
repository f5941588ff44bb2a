"""The threads for disk work and hashing, so that the event loop and the engine go on; and their progress reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...memvid.store import Store
from ..api.events import OnEvent, ProgressEvent, Stage

READ_THREADS: Final = 2
"""Threads that read the store. Writes have one of their own: the store takes one writer at a time, and waiting writers
must not keep a wake from a thread."""

FILL_THREADS: Final = 2
"""Threads that fill and hash slots during wakes. Hashing and reading release the GIL; two keep two cores busy."""

Result = TypeVar("Result")


class StoreThreads:
    """Runs store work off the event loop. fill: for the slots of wakes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="torpor-read")
        self._write = ThreadPoolExecutor(1, thread_name_prefix="torpor-write")
        self._journal = ThreadPoolExecutor(1, thread_name_prefix="torpor-journal")
        self.fill = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="torpor-fill")

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._read, work)

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._write, work)

    async def on_journal(self, work: Callable[[], Result]) -> Result:
        """Run work on the journal, off the event loop: no turn waits for a sleep to be written."""
        return await asyncio.get_running_loop().run_in_executor(self._journal, work)

    def end_writing(self) -> None:
        """Wait for running writes; take no more."""
        self._journal.shutdown()
        self._write.shutdown()

    def close(self) -> None:
        """Wait for running reads and writes, and end the threads."""
        self.end_writing()
        self._read.shutdown()
        self.fill.shutdown()


def reporter(stage: Stage, emit: OnEvent) -> Callable[[int, int], None]:
    """A function that reports progress from any thread to the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, ProgressEvent(stage, done, total))

    return report
