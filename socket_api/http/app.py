"""The routes of the HTTP server, behind the checks that hold for every request.

Owns the order: a page of a browser is refused, then a client without a token, then the route answers. Every error
leaves in the shape of the API that the client speaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ...errors import TorporError
from ..errors import HttpRefused, InternalError
from ..server.spans import TRACE_HEADERS, trace_headers
from . import chat_completions, completions, conversations, errors, mcp, messages, models, openapi, responses, sessions
from .desk import Desk, desk_of
from .metrics import metrics
from .work import ClientLeft

_LOG = logging.getLogger(__name__)
_CLIENT_LEFT = 499
"""As other servers log it; nobody reads this answer."""

_OPEN: Final = frozenset({("GET", "/healthz"), ("HEAD", "/healthz"), ("HEAD", "/")})
"""Answered without a token: they tell nothing but that a daemon is here."""


def app_of(desk: Desk) -> ASGIApp:
    """The server over a desk."""
    routes = [
        Route("/", _root),
        Route("/healthz", _health),
        Route("/metrics", metrics),
        Route("/openapi.json", _openapi),
        Route(chat_completions.PATH, Dialect(chat_completions.chat_completions), methods=["POST"]),
        Route(completions.PATH, Dialect(completions.completions), methods=["POST"]),
        Route(responses.PATH, Dialect(responses.responses), methods=["POST"]),
        Route(messages.PATH, Dialect(messages.messages), methods=["POST"]),
        Route(messages.COUNT_PATH, messages.count_tokens, methods=["POST"]),
        Route(mcp.PATH, Dialect(mcp.mcp), methods=["POST"]),
        *responses.routes(),
        *conversations.routes(),
        *models.routes(),
        *sessions.routes(),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            TorporError: _refused,
            ClientLeft: _nobody,
            HTTPException: _no_route,
            Exception: _fault,
        },
    )
    app.state.desk = desk
    return Checked(app, desk)


class Dialect:
    """A route that sends its own answer, for it may be a stream."""

    def __init__(self, handle: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._handle(Request(scope, receive), send)


class Checked:
    """Checks a request before any route sees it, counts its answer, and names it."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app = app
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # Matched as it was sent, so that a name in a path may have an encoded slash.
        scope["path"] = scope["raw_path"].decode("ascii")
        request, name = Request(scope), errors.new_request_id()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = name
                route = getattr(scope.get("route"), "path", "none")
                self._desk.counters.requests.labels(route, str(message["status"])).inc()
            await send(message)

        trace_headers.set({each: request.headers[each] for each in TRACE_HEADERS if each in request.headers})
        try:
            self._check(request)
        except HttpRefused as refusal:
            await errors.response(refusal, errors.dialect_of(request))(scope, receive, tell)
            return
        await self._app(scope, receive, tell)

    def _check(self, request: Request) -> None:
        on_unix = request.state.connection.on_unix
        self._desk.access.require_no_page(request.headers, on_unix=on_unix)
        if (request.method, request.url.path) not in _OPEN:
            request.state.caller = self._desk.access.caller_of(request.headers, on_unix=on_unix)


async def _root(request: Request) -> Response:
    return JSONResponse({"server": f"torpor {__version__}", "openapi": "/openapi.json"})


async def _health(request: Request) -> Response:
    stopping = desk_of(request).works.is_stopping
    return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)


async def _openapi(request: Request) -> Response:
    return JSONResponse(await asyncio.to_thread(openapi.document))


def _handler(answer: Callable[[Request, Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return answer(request, error)

    return handle


@_handler
def _refused(request: Request, error: TorporError) -> Response:
    return errors.response(errors.told_to(request.state.caller, error), errors.dialect_of(request))


@_handler
def _nobody(request: Request, error: ClientLeft) -> Response:
    return Response(status_code=_CLIENT_LEFT)


@_handler
def _no_route(request: Request, error: HTTPException) -> Response:
    problem = {
        404: "There is no such path here; /openapi.json lists those that there are.",
        405: f"This path does not take {request.method:.20}; /openapi.json tells what it takes.",
    }.get(error.status_code, error.detail)
    return errors.response(HttpRefused(problem, status=error.status_code), errors.dialect_of(request))


@_handler
def _fault(request: Request, error: Exception) -> Response:
    _LOG.error("fault in %s", request.url.path[:200])  # uvicorn logs the trace
    told = InternalError(f"The request failed by a fault of the daemon ({type(error).__name__}). See its log.")
    return errors.response(told, errors.dialect_of(request))
