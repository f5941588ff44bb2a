"""The one thread that owns MLX.

Work comes as *steps*: a generator that does a bounded piece (one prefill chunk, one token) between two yields.
Jobs take turns, a piece each, so that a long prefill does not stop the token stream of another session. A job
whose caller goes away is closed at its next yield, where its state is consistent by construction; the caller
waits for that, so nobody touches a session while the engine still does.

Streams of MLX are thread-local: an evaluated array may be used on any thread, a lazy one only here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, TypeVar

import mlx.core as mx

from .errors import ServiceClosed
from .waiting import settled

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class _Job:
    """Steps with the future that waits for their result, on the loop where it waits."""

    __slots__ = ("cancelled", "future", "loop", "steps")

    def __init__(self, steps: Steps[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.steps = steps
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False

    def advance(self) -> bool:
        """Do one piece; True while there is more to do."""
        try:
            if self.cancelled:
                self.steps.close()
                self._settle(None, None)
                return False
            next(self.steps)
        except StopIteration as end:
            self._settle(end.value, None)
            return False
        except BaseException as error:  # noqa: BLE001 - whatever a step raises belongs to its caller, not to the engine
            # A SystemExit out of a model's code must end that request, not the event loop that waits for it.
            failure = error if isinstance(error, Exception) else RuntimeError(f"A step ended with {error!r}.")
            self._settle(None, error.with_traceback(_below(error)) if failure is error else failure)
            return False
        return True

    def _settle(self, value: object, error: BaseException | None) -> None:
        def deliver() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)

        self.loop.call_soon_threadsafe(deliver)


def _below(error: BaseException) -> TracebackType | None:
    """Where an error was raised, without the frame that caught it: it has the job, and the job the error."""
    return error.__traceback__ and error.__traceback__.tb_next


class Engine:
    """Runs steps on a thread of its own until `stop`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torpor-engine", daemon=True)
        self._thread.start()

    async def run(self, steps: Steps[Result]) -> Result:
        """The result of the steps, which run on the engine thread, taking turns with those of others.

        When the awaiting task is cancelled, the steps are closed at their next yield, and only then does the
        cancellation go on.

        Raises:
            ServiceClosed: the engine has been stopped.
        """
        if self._stopped:
            steps.close()
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
        job = _Job(steps, asyncio.get_running_loop())
        self._inbox.put(job)
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            job.cancelled = True
            await settled(job.future)
            raise
        finally:
            del job  # its error, whose frames have this one, would hold itself

    async def call(self, function: Callable[[], Result]) -> Result:
        """The result of one short function, run on the engine thread between the steps of others."""

        def steps() -> Steps[Result]:
            yield from ()  # makes this a generator, of one piece
            return function()

        return await self.run(steps())

    def stop(self) -> None:
        """Let the jobs at hand finish, then end the thread. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        jobs: deque[_Job] = deque()
        accepting = True
        while accepting or jobs:
            accepting = self._take_in(jobs, accepting=accepting)
            if jobs:
                job = jobs.popleft()
                if job.advance():
                    jobs.append(job)
                del job  # while this thread waits for the next, the states of the last one would stay in memory
        # Without this as the thread's last act, the interpreter aborts at exit in some runs.
        mx.clear_streams()

    def _take_in(self, jobs: deque[_Job], *, accepting: bool) -> bool:
        """Move what has arrived to the end of the turn; wait only when there is nothing to do."""
        while accepting:
            try:
                job = self._inbox.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                return False
            jobs.append(job)
        return accepting
