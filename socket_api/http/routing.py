"""A route that takes a body, declared once: the server answers it, and `/openapi.json` tells what it takes. And a
stream of server-sent events, which ends for a client that takes no bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .errors import Dialect
from .requests import Body, ClientLeft
from .work import desk_of

_LOG = logging.getLogger(__name__)
_EVENT_STREAM: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Posted(Route):
    """A route with a body. speaks: the API in whose shape errors are told, at its path and at every path that begins
    with it."""

    def __init__(self, path: str, answer: Callable[..., Any], body: type[Body], *, speaks: Dialect = "openai") -> None:
        super().__init__(path, answer, methods=["POST"])
        self.body = body
        self.speaks = speaks


class Sending:
    """A function that sends the answer of a route by itself, for it may be a stream."""

    def __init__(self, handle: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._handle(Request(scope, receive), send)


class EventStream:
    """The answer of a request as server-sent events."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self.begun = False

    async def tell(self, events: bytes, headers: Mapping[str, str], *, last: bool = False) -> None:
        """Send events, with the answer's head and these headers before the first. Raises ClientLeft: the client takes
        no bytes."""
        try:
            async with asyncio.timeout(desk_of(self._request).limits.stall_timeout_s):
                if not self.begun:
                    self.begun = True
                    head = MutableHeaders({**headers, **_EVENT_STREAM})
                    await self._send({"type": "http.response.start", "status": 200, "headers": head.raw})
                await self._send({"type": "http.response.body", "body": events, "more_body": not last})
        except TimeoutError:
            self.drop()
            raise ClientLeft from None

    def drop(self) -> None:
        """End the connection at once."""
        _LOG.warning("client dropped: it takes no bytes")
        self._request.state.connection.abort()
