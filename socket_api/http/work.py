"""Requests to the service on behalf of HTTP clients: begun, cancelled when their client leaves, ended at a stop.

As on the Unix socket, a verb that may be cancelled is; another (a sleep, a delete) runs to its end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive

from ...daemon.api.records import Request
from ...daemon.api.verb import R, Verb
from ..errors import ShuttingDown
from ..server.dispatch import Backend


class ClientLeft(Exception):
    """The client is gone, so there is nobody to answer. Never leaves the server."""


class Works:
    """The requests that are being carried out."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: dict[asyncio.Task[Any], Verb[Any, Any]] = {}
        self._stopping = False

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_stopping(self) -> bool:
        """Whether no request is taken any more."""
        return self._stopping

    def begin(self, verb: Verb[Any, R], request: Request) -> asyncio.Task[R]:
        """Carry out a request, as a task. Raises ShuttingDown."""
        if self._stopping:
            raise ShuttingDown("The daemon is stopping. Try again when it has been started.")
        work: asyncio.Task[R] = asyncio.create_task(self._backend.ask(verb, request))
        self._under_way[work] = verb
        work.add_done_callback(self._forget)
        return work

    async def answer(self, verb: Verb[Any, R], request: Request, receive: Receive) -> R:
        """Carry out a request, unless its client leaves. receive: of the request, whose body has been read.

        Raises:
            ClientLeft: the client has left; the request was cancelled, or has run to its end.
            ShuttingDown: the daemon stops, and the request was cancelled.
            TorporError: as the service.
        """
        work = self.begin(verb, request)
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
        """Wait for the end of a request, which is cancelled if it may be."""
        verb = self._under_way.get(work)
        if verb is not None and verb.cancellable:
            work.cancel()
        if not work.done():
            await asyncio.wait({work})

    def result_of(self, work: asyncio.Task[R]) -> R:
        """The result of a request that has ended. Raises ShuttingDown: it was cancelled; its own error."""
        if work.cancelled():
            raise ShuttingDown(
                "The daemon was told to stop, so this request was cancelled. Ask again when it has been started, or"
                " soon if it could not stop."
            )
        return work.result()

    def give_way(self) -> None:
        """Cancel what may be cancelled, for a stop that may still be refused."""
        for work, verb in list(self._under_way.items()):
            if verb.cancellable:
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
