"""Requests to the service on behalf of HTTP clients: begun, cancelled when their client leaves, ended at a stop.

As on the Unix socket, a verb that may be cancelled is; another (a sleep, a delete) runs to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from ...daemon.api.records import Request
from ...daemon.api.verb import R, Verb
from ..errors import ShuttingDown
from ..server.dispatch import Backend

T = TypeVar("T")


class ClientLeft(Exception):
    """The client is gone, so there is nobody to answer. Never leaves the server."""


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

    async def answer(self, verb: Verb[Any, R], request: Request, receive: Receive) -> R:
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


async def has_left(receive: Receive) -> None:
    """Wait until the client of a request leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
