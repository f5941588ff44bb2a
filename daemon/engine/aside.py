"""Threads that compute with MLX beside the engine, for work that takes seconds. Callers wait on the event loop.

MLX gives each computing thread a stream, with a system thread that stays until the process ends. So a thread waits for
more work: there are never more threads than there was work at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

Result = TypeVar("Result")
Work = Callable[[], None]


class Aside:
    """Does work on threads of its own until `close`. The event loop's. name: of the threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Thread] = []
        self._closed = False

    async def run(self, work: Callable[[], Result], as_error: Callable[[BaseException], Exception]) -> Result:
        """The result of the work, which runs to its end even if no caller waits any more.

        as_error: makes the waiting caller's error from an error of the work.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread(self._name)
        results: list[Result] = []  # nothing but this holds a result: a caller that drops it has the memory free

        def settle(error: Exception | None) -> None:
            self._rest(thread)
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(None)

        def do() -> None:
            try:
                results.append(work())
                loop.call_soon_threadsafe(settle, None)
            except BaseException as error:  # noqa: BLE001 - any error belongs to the waiting caller
                loop.call_soon_threadsafe(settle, as_error(error))

        thread.inbox.put(do)
        await done
        return results.pop()

    def close(self) -> None:
        """End the threads: those that wait are gone then, the others are once their work is done."""
        self._closed = True
        while self._idle:
            self._idle.pop().end()

    def _rest(self, thread: _Thread) -> None:
        if self._closed:
            thread.end()
        else:
            self._idle.append(thread)


class _Thread:
    def __init__(self, name: str) -> None:
        self.inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, which has no work. A process that ends while a thread of it lets go of its stream aborts."""
        self.inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self.inbox.get()) is not None:
            work()
            del work  # it holds what it made
        # Without this as a thread's last act, the interpreter aborts at exit in some runs.
        mx.clear_streams()
