"""A route that takes a body, declared once: the server answers it, and `/openapi.json` tells what it takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .errors import Dialect
from .requests import Body


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
