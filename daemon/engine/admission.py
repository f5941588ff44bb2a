"""Admission of requests, and which requests stand back for others.

Rules:
- A request for the engine or memory is admitted only while fewer than a limit wait; else it is refused before it does
  anything. Half of the limit is for normal requests alone, so that background requests never shut them out.
- A background request stands back while a normal one waits for the engine or for memory. This time adds up; after
  `MOST_STOOD_BACK_S` it counts as normal until it ends. It does so at once if a normal request waits for it.
- The daemon's own work belongs to no request. Making room for others counts as normal; recomputing blocks damaged on
  the disk stands back, until a request waits for that session.

`engine.py` and `memory.py`, where requests wait, decide which stand back. Requests for one session take turns in order
of arrival, at any priority.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from ..api.process import QueueInfo
from ..api.records import Priority
from ..errors import EngineBusy
from ..options.current import CurrentOptions

MOST_STOOD_BACK_S: Final = 30.0
"""For how long in all a background request stands back at most; then it counts as normal."""

Result = TypeVar("Result")


class Request:
    """An admitted request, or the daemon's own work.

    waits: whether it neither reads nor writes at the moment; changed by the engine, too. stood_back_s: for how long it
        has stood back so far. task: of a client's request.
    """

    __slots__ = ("_is_background", "_task", "stood_back_s", "waits")

    def __init__(self, priority: Priority = "normal", task: asyncio.Task[Any] | None = None) -> None:
        self._is_background = priority == "background"
        self._task = task
        self.stood_back_s = 0.0
        self.waits = True

    @property
    def goes_on(self) -> bool:
        """Whether it is a client's request that was not given up. How long it takes is not known."""
        return self._task is not None and not self._task.cancelling()

    def stands_back(self, more_s: float = 0.0) -> bool:
        """Whether normal requests go before it. more_s: seconds beyond the counted ones."""
        return self._is_background and self.stood_back_s + more_s < MOST_STOOD_BACK_S

    def lift(self) -> None:
        """Count it as normal until it ends: a normal request waits for it."""
        self._is_background = False


_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar("admitted", default=None)


def current() -> Request:
    """The current request; a new one for the daemon's own work."""
    return _request.get() or Request()


@contextmanager
def standing_back() -> Iterator[None]:
    """Run the daemon's own work, which no request waits for, as a background request."""
    token = _request.set(Request("background"))
    try:
        yield
    finally:
        _request.reset(token)


def apart(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Begin work on behalf of no request: others wait for it, even if a background request has caused it."""
    context = contextvars.copy_context()
    context.run(_request.set, None)
    return asyncio.get_running_loop().create_task(work, context=context)


class Queue:
    """The running requests for the engine or memory."""

    def __init__(self, options: CurrentOptions) -> None:
        self._options = options
        self._under_way: set[Request] = set()

    @property
    def limit(self) -> int:
        """How many of them may wait."""
        return self._options.now.max_waiting

    def info(self) -> QueueInfo:
        """How many wait, and how many may."""
        waiting = [each for each in self._under_way if each.waits]
        return QueueInfo(len(waiting), sum(each.stands_back() for each in waiting), self.limit)

    @contextmanager
    def admitted(self, priority: Priority) -> Iterator[None]:
        """Count a request while it runs. Raises EngineBusy: too many wait; nothing has happened."""
        waiting = self.info().waiting
        limit = self.limit if priority == "normal" else max(1, self.limit // 2)
        if waiting >= limit:
            what = "" if priority == "normal" else " before one in the background is taken"
            raise EngineBusy(
                f"{waiting} requests wait for a turn, for memory or the engine, and at most {limit} may{what}. Send "
                "this one again later, or start the daemon with a larger --max-waiting.",
                waiting=waiting,
                limit=limit,
            )
        request = Request(priority, asyncio.current_task())
        self._under_way.add(request)
        token = _request.set(request)
        try:
            yield
        finally:
            _request.reset(token)
            self._under_way.discard(request)
