"""The asynchronous client: the same verbs as `client.py`, for many requests at once on one connection.

Owns the sending of a verb and the stream of a generation; `alink.py` owns the connection. Imports no MLX, and only the
records of verbs from the daemon (tests/socket_api/test_imports.py).

Rules: as in the synchronous client, nothing is ever sent twice. Cancelling the awaiting task cancels the request in the
daemon. An instance belongs to the event loop on which it was connected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from ...daemon.api.events import Reporting, ignore
from ...daemon.api.process import SubscribeRequest
from ...daemon.api.reading import ChatRequest, GenerateRequest
from ...daemon.api.records import Request
from ...daemon.api.verb import Awaiting, Opened, Verb
from ...daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs
from ..errors import ApiError
from ..wire.address import default_socket_path
from ..wire.asking import Call, R, call_of
from ..wire.messages import HelloReply, ServerMessage
from .alink import AsyncLink
from .ensuring import ensure_daemon
from .generating import Generation, answer_in
from .link import DEFAULT_TIMEOUT_S
from .subscription import AsyncSubscription


def _stream_generate(client: AsyncClient, request: GenerateRequest) -> AsyncTextStream:
    return AsyncTextStream(client._link, client._call(VERBS["generate"], request), request.on_event)


def _stream_chat(client: AsyncClient, request: ChatRequest) -> AsyncTextStream:
    return AsyncTextStream(client._link, client._call(VERBS["chat"], request), request.on_event)


def _events(client: AsyncClient, request: SubscribeRequest) -> AsyncSubscription:
    return AsyncSubscription(client._link, client._call(SUBSCRIBE, request))


class AsyncClient(DaemonVerbs, Awaiting):
    """A connection to the daemon: `async with AsyncClient() as torpor`, or `connect` and `close`.

    `async with AsyncClient.ensure() as torpor` starts a daemon first if none answers. Args and errors are those of
    `Client`; `connect` makes the connection.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.socket_path = Path(default_socket_path() if socket_path is None else socket_path)
        self.namespace = namespace
        self._link = AsyncLink(self.socket_path, timeout_s=timeout_s)
        self._start: Callable[[], object] | None = None

    @classmethod
    def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """A client that starts a daemon in the background when it connects, if none answers. store, config: for a
        daemon that is started. `connect` then also raises DaemonNotStarted: with the reason; nothing is left running.
        """
        client = cls(socket_path, namespace=namespace, timeout_s=timeout_s)
        client._start = partial(ensure_daemon, client.socket_path, store=store, config=config)
        return client

    # --- asking

    stream_generate = Opened(
        GenerateRequest,
        _stream_generate,
        "As `generate`, piece by piece; asked for when the stream is first iterated or entered.",
    )
    stream_chat = Opened(
        ChatRequest, _stream_chat, "As `chat`, piece by piece; asked for when the stream is first iterated or entered."
    )
    events = Opened(SubscribeRequest, _events)

    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send a request of the table of verbs; each method calls this with its record."""
        call = self._call(verb, request)
        emit = request.emit if isinstance(request, Reporting) else ignore
        request_id = self._link.begin(call)
        try:
            await self._link.flush()
            while (answer := answer_in(await self._link.wait_for(request_id), call, emit)) is None:
                pass
            return answer
        finally:
            self._link.abandon(request_id)

    def _call(self, verb: Verb[Any, R], request: Request) -> Call[R]:
        """The message of a request: checked, and with names in this client's namespace."""
        return call_of(verb, request, self.namespace)

    # --- life

    @property
    def hello(self) -> HelloReply:
        """The daemon's greeting. Raises LocalProtocolError before `connect`."""
        return self._link.hello

    async def connect(self) -> Self:
        """Connect and wait for the greeting; once for each client.

        Raises:
            DaemonUnreachable: no daemon answers there.
            RemoteError: the daemon refused the connection.
        """
        if self._start is not None:
            await asyncio.to_thread(self._start)
        await self._link.connect()
        return self

    @property
    def peer_pid(self) -> int | None:
        """As `Client.peer_pid`; None before the connection is made."""
        return self._link.peer_pid

    async def close(self) -> None:
        """Close the connection; the daemon stops its generations. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncTextStream(Generation):
    """A generation as it happens: `async for` pieces of text, then read `result`. See `TextStream`.

    `async with` cancels an unfinished generation, and so does the collection of a dropped stream.
    """

    _link: AsyncLink

    async def close(self) -> None:
        """Cancel if unfinished, and wait for the end. `result` may then hold the generated part. Idempotent."""
        if self._ended:
            return
        try:
            self.cancel()
            async for _ in self:
                pass
        except ApiError:
            pass  # the generation is over either way, and the caller did not wait for its failure
        finally:
            self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            if piece := self._take(await self._next_message()):
                return piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _begin(self) -> int:
        if self._id is None:
            self._id = self._link.begin(self._call)
        return self._id

    async def _next_message(self) -> ServerMessage:
        try:
            request_id = self._begin()
            await self._link.flush()
            return await self._link.wait_for(request_id)
        except BaseException:
            self._end()  # also when cancelled while waiting: the daemon stops with its reader
            raise
