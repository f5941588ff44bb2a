"""The asynchronous client: the same verbs as `client.py`, for many requests at once on one connection.

Owns how a verb is asked, and the stream of a generation; the connection is `alink.py`'s. Imports no MLX, and of the
daemon the records of its verbs (tests/socket_api/test_imports.py).

Rules: as for the synchronous client, nothing is ever sent twice. A request whose awaiting task is cancelled is
cancelled in the daemon. An instance belongs to the event loop on which it was connected.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...daemon.api.events import NoticeEvent, OnEvent, Reporting, TokenEvent, ignore
from ...daemon.api.process import SubscribeRequest
from ...daemon.api.reading import ChatRequest, GenerateRequest, GenerateResult
from ...daemon.api.records import Request
from ...daemon.api.verb import Awaiting, Opened, Verb
from ...daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs
from ..errors import ApiError, LocalProtocolError
from ..wire.address import default_socket_path
from ..wire.asking import Call, R, call_of, committed_of, remote_error
from ..wire.messages import ErrorMessage, EventMessage, HelloReply, ResultMessage, ServerMessage
from .alink import AsyncLink
from .ensuring import ensure_daemon
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

    Args and errors are those of `Client`; the connection is made by `connect`.
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

    @classmethod
    async def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """As `Client.ensure`: connected, to a daemon that was started if none answered."""
        socket = await asyncio.to_thread(ensure_daemon, socket_path, store=store, config=config)
        return await cls(socket, namespace=namespace, timeout_s=timeout_s).connect()

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
        """Ask what a row of the table of verbs says; each of the methods does this with its record."""
        call = self._call(verb, request)
        emit = request.emit if isinstance(request, Reporting) else ignore
        request_id = self._link.begin(call)
        try:
            await self._link.flush()
            while True:
                message = await self._link.wait_for(request_id)
                if isinstance(message, EventMessage):
                    if not isinstance(message.event, NoticeEvent):
                        emit(message.event)
                elif isinstance(message, ResultMessage):
                    return call.load_result(message.result)
                else:
                    assert isinstance(message, ErrorMessage)
                    raise remote_error(message.error)
        finally:
            self._link.abandon(request_id)

    def _call(self, verb: Verb[Any, R], request: Request) -> Call[R]:
        """What is sent of a request: checked, and with names as this client's namespace has them."""
        return call_of(verb, request, self.namespace)

    # --- life

    @property
    def hello(self) -> HelloReply:
        """What the daemon said of itself. Raises LocalProtocolError before `connect`."""
        return self._link.hello

    async def connect(self) -> Self:
        """Connect and wait to be greeted; once for each client.

        Raises:
            DaemonUnreachable: no daemon answers there.
            RemoteError: the daemon refused the connection.
        """
        await self._link.connect()
        return self

    @property
    def peer_pid(self) -> int | None:
        """As `Client.peer_pid`; None before the connection is made."""
        return self._link.peer_pid

    async def close(self) -> None:
        """Close the connection; the daemon stops the generations that were asked for on it. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncTextStream:
    """A generation as it happens: `async for` pieces of text, then read `result`. See `TextStream`.

    As there, `async with` cancels what is unfinished, and so does dropping it, when it is collected.
    """

    def __init__(self, link: AsyncLink, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        self._link = link
        self._call = call
        self._on_event = on_event
        self._result: GenerateResult | None = None
        self._id: int | None = None
        self._ended = False
        self._cancelled = False
        self._committed: dict[str, Any] = {}

    @property
    def result(self) -> GenerateResult:
        """The whole generation, once the stream has ended. Raises LocalProtocolError before."""
        if self._result is None:
            raise LocalProtocolError(
                "This stream was cancelled before it had a result."
                if self._ended
                else "This stream has not ended. Iterate to its end, or call cancel and iterate on.",
                **self._committed,
            )
        return self._result

    def cancel(self) -> None:
        """Ask the daemon to stop. Iteration goes on until it has: a few more pieces may come. Idempotent."""
        if self._ended or self._cancelled:
            return
        self._cancelled = True
        if self._id is None:
            self._ended = True
        else:
            self._link.cancel(self._id)

    async def close(self) -> None:
        """Cancel if unfinished, and wait for the end. `result` may then say what was generated. Idempotent."""
        if self._ended:
            return
        try:
            self.cancel()
            async for _ in self:
                pass
        except ApiError:
            pass  # the generation is over either way, and its failure was not waited for
        finally:
            self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            message = await self._next_message()
            if isinstance(message, EventMessage):
                if self._on_event is not None and not isinstance(message.event, NoticeEvent):
                    self._on_event(message.event)
                if isinstance(message.event, TokenEvent) and message.event.text:
                    return message.event.text
            else:
                self._finish(message)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and self._id is not None:
            self._link.drop(self._id)

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
            self._end()  # cancelled while waiting, too: the daemon stops with its reader
            raise

    def _finish(self, message: ServerMessage) -> None:
        self._end()
        if isinstance(message, ResultMessage):
            self._result = self._call.load_result(message.result)
        elif isinstance(message, ErrorMessage):
            if not (self._cancelled and message.error.code == "cancelled"):
                raise remote_error(message.error)
            self._committed = committed_of(message.error)

    def _end(self) -> None:
        self._ended = True
        if self._id is not None:
            self._link.abandon(self._id)
