"""How far a request is, as server-sent events, for a client that accepts them.

Each event is a map: `stage`, `done` and `total` of its progress, and at the end `result`, which is what the answer
would be, or `error`. Progress that a slow client has not taken yet gives way to what came behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...daemon.api.events import ProgressEvent, Reporting, WorkEvent
from ...daemon.api.verb import Verb
from ...errors import TorporError
from . import errors
from .requests import ClientLeft, has_left
from .routing import EventStream
from .work import desk_of

_STREAM: Final = "text/event-stream"


def wants_reports(request: Request, order: object) -> bool:
    """Whether a client is to be told how far its request is."""
    return isinstance(order, Reporting) and _STREAM in request.headers.get("accept", "")


class Reports(Response):
    """An answer that tells how far the request is. told: the JSON of a result, on one line."""

    def __init__(
        self, request: Request, verb: Verb[Any, Any], order: Reporting, told: Callable[[Any], Awaitable[bytes]]
    ) -> None:
        super().__init__()
        self._request, self._verb, self._order, self._told = request, verb, order, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out the request. Raises ClientLeft, and TorporError where nothing was sent yet."""
        desk, stream = desk_of(self._request), EventStream(self._request, send)
        newest: list[ProgressEvent] = []
        woken = asyncio.Event()

        def report(event: WorkEvent) -> None:
            if isinstance(event, ProgressEvent):
                newest[:] = [event]
                woken.set()

        order = self._order.told_to(report)
        work = desk.works.begin(desk.backend.ask(self._verb, order), cancellable=self._verb.cancellable)
        leaving = asyncio.create_task(has_left(self._request.receive))
        for each in (work, leaving):
            each.add_done_callback(lambda _: woken.set())
        try:
            while not work.done():
                await woken.wait()
                woken.clear()
                if leaving.done():
                    raise ClientLeft
                if newest:
                    event = newest.pop()
                    await _tell(stream, to_json(event))
            await _tell(stream, b'{"result":%b}' % await self._told(desk.works.result_of(work)), last=True)
        except TorporError as error:
            if not stream.begun:
                raise
            told = errors.told_to(self._request.state.caller, error)
            await _tell(stream, to_json({"error": {"code": told.code, "message": told.message}}), last=True)
        finally:
            leaving.cancel()
            await desk.works.give_up(work)


async def _tell(stream: EventStream, told: bytes, *, last: bool = False) -> None:
    await stream.tell(b"data: %b\n\n" % told, {}, last=last)
