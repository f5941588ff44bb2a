"""The one thread on which grammars are compiled. Those of several requests take turns between compilations.

No thread can be stopped within a compilation, so nobody waits for its end: a request that is given up leaves at once,
and so does a daemon that stops.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from ..errors import ServiceClosed
from ..models.grammars import Steps, roomy_stack

Result = TypeVar("Result")

_END_S: Final = 0.2
"""A thread without work ends at once: seconds are for a busy machine."""


class GrammarThread:
    """Does steps until `close`, one at a time."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        with roomy_stack():
            self._thread = threading.Thread(target=_run, args=(self._inbox,), name="torpor-grammar", daemon=True)
            self._thread.start()

    async def run(self, steps: Steps[Result]) -> Result:
        """The result of steps. A caller that is cancelled leaves at once, and no further step is begun for it. Raises
        ServiceClosed."""
        ended: tuple[Result] | None = None
        while ended is None:
            if self._closed:
                raise ServiceClosed("The daemon is stopping; try again when it is back.")
            job = _Job(lambda: _end_of(steps))
            self._inbox.put(job)
            ended = await asyncio.wrap_future(job.done)
        return ended[0]

    def close(self) -> None:
        """End the thread. One that works on ends once that is done, and is not waited for."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join(_END_S)


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.done: Future[Any] = Future()

    def do(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - any error belongs to the waiting caller
            self.done.set_exception(error)


def _run(inbox: queue.SimpleQueue[_Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job.do()
        del job  # it holds what it made


def _end_of(steps: Steps[Result]) -> tuple[Result] | None:
    """What the next step of these gives, if it is the last."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
