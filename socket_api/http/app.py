"""The routes of the HTTP server, behind the checks that hold for every request.

Owns the order: a page of a browser is refused, then a client without a token, then the route answers. Every error
leaves in the shape of the API that the client speaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from string import ascii_letters, digits
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ...daemon.events.accounts import MAX_CLIENT_CHARS, client
from ...errors import TorporError
from ..errors import HttpRefused, InternalError
from ..server.spans import TRACE_HEADERS, trace_headers
from . import (
    chat_completions,
    completions,
    conversations,
    errors,
    events,
    mcp,
    messages,
    models,
    openapi,
    page,
    responses,
    sessions,
)
from .access import NOBODYS, Caller
from .metrics import metrics
from .requests import ClientLeft
from .routing import Posted, Sending
from .work import Desk, desk_of

_LOG = logging.getLogger(__name__)
_CLIENT_LEFT = 499
"""As other servers log it; nobody reads this answer."""

DIALECTS: Final = (chat_completions, completions, responses, conversations, messages)
"""The APIs that clients speak: each is a module, which gives its routes."""

_WORD: Final = frozenset(f"{ascii_letters}{digits}._-/+")

_OPEN: Final = frozenset({("GET", "/healthz"), ("HEAD", "/healthz"), ("HEAD", "/")})
"""Answered without a token: they tell nothing but that a daemon is here."""


def app_of(desk: Desk) -> ASGIApp:
    """The server over a desk."""
    dialects = _of_dialects()
    routes = [
        Route("/", _root),
        Route("/healthz", _health),
        Route("/metrics", metrics),
        Route("/openapi.json", _openapi),
        *dialects,
        Route(mcp.PATH, Sending(mcp.mcp), methods=["POST"]),
        *models.routes(),
        *sessions.routes(),
        *events.routes(),
        *(page.routes() if desk.codes is not None else []),
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


def _of_dialects() -> list[Route]:
    return [route for each in DIALECTS for route in each.routes()]


class Checked:
    """Checks a request before any route sees it, finds the API that it speaks, counts its answer, and names it."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app = app
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # Matched as it was sent, so that a name in a path may have an encoded slash.
        scope["path"] = scope["raw_path"].decode("ascii")
        request, name = Request(scope), errors.new_request_id()
        request.state.speaks = spoken_by(request)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = name
                route = getattr(scope.get("route"), "path", "none")
                self._desk.counters.requests.labels(route, str(message["status"])).inc()
            await send(message)

        client.set(_client_of(request))
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
        has_page = self._desk.codes is not None
        if (request.method, request.url.path) in _OPEN or (has_page and page.is_open(request)):
            request.state.caller = Caller(NOBODYS)
        else:
            request.state.caller = self._desk.access.caller_of(request.headers, on_unix=on_unix)


def spoken_by(request: Request) -> errors.Dialect:
    """The API that a client speaks, by its headers or by the path."""
    is_anthropics = "anthropic-version" in request.headers or request.url.path.startswith(_anthropics())
    return "anthropic" if is_anthropics else "openai"


@cache
def _anthropics() -> tuple[str, ...]:
    """The paths at which Anthropic's API is spoken."""
    return tuple(each.path for each in _of_dialects() if isinstance(each, Posted) and each.speaks == "anthropic")


def _client_of(request: Request) -> str:
    """Who asks, for figures: the first word of its name, and the API that it speaks."""
    name = "".join(filter(_WORD.__contains__, request.headers.get("user-agent", "").partition(" ")[0]))
    spoken = max((path for path in _spoken() if request.url.path.startswith(path)), key=len, default="")
    return f"{name[:MAX_CLIENT_CHARS] or 'unknown'} {_spoken().get(spoken, 'sessions')}"


@cache
def _spoken() -> Mapping[str, str]:
    """The name of the API that is spoken at each path."""
    names = {route.path: each.__name__.rpartition(".")[2] for each in DIALECTS for route in each.routes()}
    return {**names, mcp.PATH: "mcp"}


async def _root(request: Request) -> Response:
    if desk_of(request).codes is not None and page.is_asked(request):
        return page.page(request)
    return JSONResponse({"server": f"torpor {__version__}", "openapi": "/openapi.json"})


async def _health(request: Request) -> Response:
    stopping = desk_of(request).works.is_stopping
    return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)


@cache
def _document() -> Mapping[str, Any]:
    return openapi.document(_of_dialects())


async def _openapi(request: Request) -> Response:
    return JSONResponse(await asyncio.to_thread(_document))


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
    fault = InternalError(f"The request failed by a fault of the daemon ({type(error).__name__}). See its log.")
    return errors.response(fault, errors.dialect_of(request))
