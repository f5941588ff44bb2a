"""The asynchronous client: the same verbs as `client.py`, for many requests at once on one connection.

A thin shell: `link.py` owns the connection, `pieces.py` the answers, and `awaiting.py` how a task waits. Imports no
MLX, and only the records of verbs from the daemon (tests/socket_api/test_imports.py).

Rules: as in the synchronous client, nothing is ever sent twice. Cancelling the awaiting task cancels the request in the
daemon. An instance belongs to the event loop on which it was connected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from ...daemon.api.events import NoticeEvent, OnEvent, Reporting, ignore
from ...daemon.api.process import SubscribeRequest
from ...daemon.api.reading import ChatRequest, GenerateRequest
from ...daemon.api.records import Request
from ...daemon.api.verb import Awaiting, Opened, Verb
from ...daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs
from ..wire.address import default_socket_path
from ..wire.asking import Call, R, call_of
from ..wire.messages import HelloReply
from .awaiting import AwaitingTransport
from .ensuring import ensure_daemon
from .link import DEFAULT_TIMEOUT_S, Link
from .pieces import Generation, Notices, Pieces, T, answered


def _stream(client: AsyncClient, request: GenerateRequest | ChatRequest) -> AsyncTextStream:
    verb = VERBS["chat" if isinstance(request, ChatRequest) else "generate"]
    return AsyncTextStream(client._link, client._call(verb, request), request.on_event)


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
        transport = AwaitingTransport(timeout_s)
        self._link = Link(self.socket_path, transport, client_name="torpor-python-async", timeout_s=timeout_s)
        self._start: Callable[[], object] | None = None

    @classmethod
    def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        models: Mapping[str, str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        on_event: OnEvent = ignore,
    ) -> Self:
        """A client that starts a daemon in the background when it connects, if none answers; as `Client.ensure`, and
        on_event is called on another thread. `connect` then also raises DaemonNotStarted.
        """
        client = cls(socket_path, namespace=namespace, timeout_s=timeout_s)
        client._start = partial(
            ensure_daemon, client.socket_path, store=store, config=config, models=models, on_event=on_event
        )
        return client

    # --- asking

    stream_generate = Opened(
        GenerateRequest,
        _stream,
        "As `generate`, piece by piece; asked for when the stream is first iterated or entered.",
    )
    stream_chat = Opened(
        ChatRequest, _stream, "As `chat`, piece by piece; asked for when the stream is first iterated or entered."
    )
    events = Opened(SubscribeRequest, _events)

    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send a request of the table of verbs; each method calls this with its record."""
        emit = request.emit if isinstance(request, Reporting) else ignore
        return await answered(self._link, self._call(verb, request), emit)

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


class _Awaited(Pieces[T]):
    """Pieces for `async for` and `async with`."""

    async def close(self) -> None:
        """End it; late events are dropped. A generation is cancelled if unfinished, and its end waited for: `result`
        may then hold the generated part. Idempotent."""
        await self._close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        piece = await self._piece()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncTextStream(_Awaited[str], Generation):
    """A generation as it happens: `async for` pieces of text, then read `result`. See `TextStream`.

    `async with` cancels an unfinished generation, and so does the collection of a dropped stream.
    """


class AsyncSubscription(_Awaited[NoticeEvent], Notices):
    """As `Subscription`, for `async for` and `async with`; it begins when first entered or iterated."""
