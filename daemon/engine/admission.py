"""Which requests are taken in, and who stands back for whom.

Rules:
- A request that wants the engine or memory is taken in only where fewer than a limit wait: it is refused before it has
  done anything. Half of that is for normal requests alone, so that none finds the door shut by the background.
- A background request stands back where a normal one waits for the engine or for memory. For how long it has done so
  adds up; after `MOST_STOOD_BACK_S` it counts as normal until it ends. So does at once one that a normal one waits for.
- What the daemon does by itself belongs to no request. Making room for others counts as normal; what it computes again
  because the disk has damaged it stands back, until somebody waits for that session.

Who stands back is decided where there is something to wait for: `engine.py`, `memory.py`. Requests for one session take
turns in the order of their coming, whatever their priority.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from ..api.process import QueueInfo
from ..api.records import Priority
from ..errors import EngineBusy
from ..options.serve_options import ServeOptions

MOST_STOOD_BACK_S: Final = 30.0
"""For how long in all a background request stands back at most; then it counts as normal."""

P = ParamSpec("P")
Result = TypeVar("Result")


class Request:
    """One that was taken in, or work of the daemon's own.

    waits: whether it neither reads nor writes at the moment; changed by the engine, too. stood_back_s: for how long it
        has stood back so far.
    """

    __slots__ = ("_is_background", "stood_back_s", "waits")

    def __init__(self, priority: Priority = "normal") -> None:
        self._is_background = priority == "background"
        self.stood_back_s = 0.0
        self.waits = True

    def stands_back(self, more_s: float = 0.0) -> bool:
        """Whether normal ones go before it. more_s: for how long it has stood back beside what is counted."""
        return self._is_background and self.stood_back_s + more_s < MOST_STOOD_BACK_S

    def lift(self) -> None:
        """Let it count as normal until it ends: somebody who does waits for it."""
        self._is_background = False


_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar("admitted", default=None)


def current() -> Request:
    """The request on whose behalf this runs; one of its own for what the daemon does by itself."""
    return _request.get() or Request()


@contextmanager
def standing_back() -> Iterator[None]:
    """Around work of the daemon's own that no request waits for: it goes as a background request does."""
    token = _request.set(Request("background"))
    try:
        yield
    finally:
        _request.reset(token)


def apart(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Work on behalf of no request, begun now: others wait for it, however little of a hurry the request has that made
    it necessary."""
    context = contextvars.copy_context()
    context.run(_request.set, None)
    return asyncio.get_running_loop().create_task(work, context=context)


class Queue:
    """The requests under way that want the engine or memory. limit: how many of them may wait."""

    def __init__(self, limit: int = ServeOptions.max_waiting) -> None:
        self.limit = limit
        self._under_way: set[Request] = set()

    def info(self) -> QueueInfo:
        """How many wait, and how many may."""
        waiting = [each for each in self._under_way if each.waits]
        return QueueInfo(len(waiting), sum(each.stands_back() for each in waiting), self.limit)

    @contextmanager
    def admitted(self, priority: Priority) -> Iterator[None]:
        """Around a request.

        Raises:
            EngineBusy: too many wait; nothing has happened.
        """
        waiting = self.info().waiting
        limit = self.limit if priority == "normal" else max(1, self.limit // 2)
        if waiting >= limit:
            what = "" if priority == "normal" else " for one in the background to join them"
            raise EngineBusy(
                f"Of requests that wait for a turn, for memory or the engine there are {waiting}, and no more than "
                f"{limit} may be{what}; send this one again later, or start the daemon with a larger --max-waiting.",
                waiting=waiting,
                limit=limit,
            )
        request = Request(priority)
        self._under_way.add(request)
        token = _request.set(request)
        try:
            yield
        finally:
            _request.reset(token)
            self._under_way.discard(request)
