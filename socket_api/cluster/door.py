"""The one place where requests come in: reads a request whole, tells by its key which replica is to answer, and passes
the answer on as it comes. It keeps no session, and any number of doors may stand beside each other.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ...errors import TorporError
from ..errors import InvalidRequest
from ..http import errors
from ..http.access import token_in
from ..http.app import spoken_by
from ..http.connections import HttpLimits
from ..http.json_reading import object_of
from ..http.requests import Bodies, ClientLeft
from ..http.sessions import PATH as SESSIONS_PATH
from ..http.turns import SESSION_HEADER, answer_in
from ..tokens import Tokens
from . import everywhere
from .keys import Key, key_of, uri_in
from .passing import REPLICA_HEADER, Answered, Order

_NAMED: Final = re.compile(rb'"id":\s*"([a-z]{2,4}_[0-9a-f]{32})"')
"""The id of an answer, in the first bytes of it."""

_PASSED: Final = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


_OF_ALL: Final = {
    ("GET", everywhere.PATH): everywhere.cluster,
    ("GET", SESSIONS_PATH): everywhere.sessions,
    ("GET", everywhere.METRICS_PATH): everywhere.metrics,
}
"""What every replica is asked for, and answered as one."""


class Replicas(Protocol):
    """The replicas, as one."""

    def answer(self, order: Order) -> AsyncGenerator[Message]:
        """The answer to a request, as messages of ASGI. Raises ReplicaLost."""


class Door:
    """The ASGI app of all requests."""

    def __init__(self, replicas: Replicas, tokens: Path) -> None:
        """tokens: the file that tells whose sessions a request may name; the replicas refuse what it does not."""
        self._replicas = replicas
        self._tokens = Tokens(tokens)
        self._tokens.make()
        self._bodies = Bodies(HttpLimits())
        self._answered = Answered()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._answer(Request(scope, receive), send)

    async def _answer(self, request: Request, send: Send) -> None:
        begun = False
        request.state.speaks = spoken_by(request)
        try:
            async with self._bodies.whole(request) as body:
                namespace = self._tokens.namespace_of(token_in(request.headers))
                key = Key() if namespace is None else await _key(namespace, request, body)
                brings = not request.url.path.startswith(SESSIONS_PATH)  # these verbs say themselves whether they wake
                scope = {name: request.scope[name] for name in _PASSED}
                order = Order(scope, body, self._answered.wanted(key), brings)
                if of_all := _OF_ALL.get((request.method, request.url.path)):
                    answer = await of_all(self._replicas.answer, replace(order, brings=False))
                    await answer(request.scope, _receive_nothing, send)
                    return
                async with aclosing(self._replicas.answer(order)) as messages:
                    head: Headers | None = None
                    async for message in messages:
                        if not begun:
                            begun, head = True, Headers(raw=message["headers"])
                        elif namespace is not None and head is not None:
                            self._learn(namespace, key, head, message)
                            head = None
                        await send(message)
        except ClientLeft:
            return
        except TorporError as error:
            if begun:  # the connection ends, by which the client knows that the answer is not whole
                raise
            await errors.response(error, request.state.speaks)(request.scope, _receive_nothing, send)

    def _learn(self, namespace: str, key: Key, headers: Headers, first: Message) -> None:
        session, found = headers.get(SESSION_HEADER), _NAMED.search(first.get("body", b""))
        self._answered.learn(
            key,
            session=None if session is None else uri_in(namespace, session),
            replica=headers[REPLICA_HEADER].partition(";")[0],
            answer=None if found is None else answer_in(found[1].decode("ascii")),
        )


async def _key(namespace: str, request: Request, body: bytes) -> Key:
    """The key of a request; of one whose body is no JSON, that of one without."""

    def read() -> Key:
        values: Mapping[str, Any] = {}
        if request.method == "POST":
            with suppress(InvalidRequest):  # the replica refuses it
                values = object_of(body)
        return key_of(namespace, request.scope["raw_path"].decode("ascii"), request.headers, values)

    return await asyncio.to_thread(read)


async def _receive_nothing() -> Message:
    """What a client sends behind its request."""
    await asyncio.Future()
    raise AssertionError


async def _live(receive: Receive, send: Send) -> None:
    """The protocol of a start and a stop, at which there is nothing to do."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
