"""What all routes of one server share, and its work: requests to the service on behalf of HTTP clients, begun,
cancelled when their client leaves, ended at a stop.

As on the Unix socket, a verb that may be cancelled is; another (a sleep, a delete) runs to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from ...daemon.api.process import StatusRequest
from ...daemon.api.records import Request as Asked
from ...daemon.api.verb import R, Verb
from ...daemon.api.verbs import VERBS
from ..errors import ShuttingDown
from ..server.dispatch import Backend
from .access import Access
from .connections import HttpLimits
from .metrics import Counters
from .requests import Bodies, ClientLeft, has_left
from .sign_in import Codes

T = TypeVar("T")


class Works:
    """The work for HTTP clients that is under way."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._under_way: dict[asyncio.Task[Any], bool] = {}  # whether each may be cancelled
        self._stopping = False

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_stopping(self) -> bool:
        """Whether no request is taken any more."""
        return self._stopping

    def begin(self, work: Coroutine[Any, Any, T], *, cancellable: bool) -> asyncio.Task[T]:
        """Carry out requests to the service, as a task. Raises ShuttingDown."""
        if self._stopping:
            work.close()
            raise ShuttingDown("The daemon is stopping. Try again when it has been started.")
        task = asyncio.create_task(work)
        self._under_way[task] = cancellable
        task.add_done_callback(self._forget)
        return task

    async def answer(self, verb: Verb[Any, R], request: Asked, receive: Receive) -> R:
        """Carry out a request, unless its client leaves. receive: of the request, whose body has been read.

        Raises:
            ClientLeft: the client has left; the request was cancelled, or has run to its end.
            ShuttingDown: the daemon stops, and the request was cancelled.
            TorporError: as the service.
        """
        return await self.settle(self.begin(self.backend.ask(verb, request), cancellable=verb.cancellable), receive)

    async def settle(self, work: asyncio.Task[T], receive: Receive) -> T:
        """The result of work, as `answer`."""
        leaving = asyncio.create_task(has_left(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientLeft
            return self.result_of(work)
        finally:
            leaving.cancel()
            await self.give_up(work)

    async def give_up(self, work: asyncio.Task[Any]) -> None:
        """Wait for the end of work, which is cancelled if it may be."""
        if self._under_way.get(work):
            work.cancel()
        if not work.done():
            await asyncio.wait({work})

    def result_of(self, work: asyncio.Task[T]) -> T:
        """The result of work that has ended. Raises ShuttingDown: it was cancelled; its own error."""
        if work.cancelled():
            raise ShuttingDown(
                "The daemon was told to stop, so this request was cancelled. Ask again when it has been started, or"
                " soon if it could not stop."
            )
        return work.result()

    def give_way(self) -> None:
        """Cancel what may be cancelled, for a stop that may still be refused."""
        for work, cancellable in list(self._under_way.items()):
            if cancellable:
                work.cancel()

    async def quiesce(self) -> None:
        """Take no more requests, cancel those that may be, and wait for the others."""
        self._stopping = True
        self.give_way()
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    def _forget(self, work: asyncio.Task[Any]) -> None:
        self._under_way.pop(work, None)
        if not work.cancelled():
            work.exception()  # taken, so that asyncio does not log the error of a request whose client has left


@dataclass
class Desk:
    """The parts of one server over a service. codes: of the inspector's sign-in, None where it is not served."""

    backend: Backend
    access: Access
    limits: HttpLimits = field(default_factory=HttpLimits)
    codes: Codes | None = None
    started_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.works = Works(self.backend)
        self.bodies = Bodies(self.limits)
        self.counters = Counters()
        self.counters.working.set_function(lambda: len(self.works))
        self._default_model: str | None = None

    async def ask(self, request: Request, verb: Verb[Any, R], params: Mapping[str, Any]) -> R:
        """Carry out a verb for the caller of a request, whose body has been read. Raises InvalidRequest, HttpRefused,
        ClientLeft, and as the service."""
        order = await request.state.caller.request_of(verb, params)
        return await self.works.answer(verb, order, request.receive)

    async def default_model(self) -> str:
        """The name of the first model, which is the same as long as the daemon runs."""
        if self._default_model is None:
            status = await self.backend.ask(VERBS["status"], StatusRequest())
            self._default_model = status.models[0].name
        return self._default_model


def desk_of(request: Request) -> Desk:
    """The desk of the server that got a request."""
    desk: Desk = request.app.state.desk
    return desk
