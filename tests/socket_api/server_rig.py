"""What the tests of the wire share: servers over a service without a model, on a test's loop or on a thread of their
own; a client that sends whatever a test wants; and a daemon that says whatever a test wants."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.process import ShutdownResult
from torpor.socket_api import AsyncClient
from torpor.socket_api.limits import REPLY_LIMITS, REQUEST_LIMITS, ServerLimits
from torpor.socket_api.server.server import ApiServer
from torpor.socket_api.server.serving import _serve
from torpor.socket_api.wire.framing import FrameDecoder, encode_frame
from torpor.tests.socket_api.fake_service import FakeService

HELLO = {
    "type": "hello",
    "protocol": 1,
    "server": "x",
    "pid": 1,
    "limits": {"max_request_frame_bytes": 1000, "max_reply_frame_bytes": 1000, "max_in_flight": 1},
}
"""What a double of the daemon greets with."""


def quick(**limits: Any) -> ServerLimits:
    """Limits of a server that says goodbye quickly."""
    return ServerLimits(**{"goodbye_timeout_s": 0.3, **limits})


def frame(message: dict[str, object]) -> bytes:
    return encode_frame(message, max_frame_bytes=2**26)


async def poll(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; fails the test if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


class LoopThread:
    """An event loop on a thread of its own, on which `start` makes a server."""

    server: Any

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self.start)

    async def start(self) -> None:
        raise NotImplementedError

    def do(self, action: Callable[[], Any]) -> Any:
        """Run a function or coroutine function on the loop."""

        async def run() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=20)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the service holds; fails the test if it never does."""
        self.do(lambda: poll(condition))

    def stop(self) -> None:
        self.do(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=20)
        self._loop.close()


class ServerThread(LoopThread):
    """A server with a FakeService, for the blocking client."""

    def __init__(self, socket_path: Path, limits: ServerLimits | None = None) -> None:
        self.socket_path = socket_path
        self._limits = limits or quick()
        self.service: FakeService
        super().__init__()

    async def start(self) -> None:
        self.service = FakeService()
        self.server = ApiServer(self.service, self.socket_path, limits=self._limits)
        await self.server.start()


class RawClient:
    """A connection that sends whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder(REPLY_LIMITS)

    def send(self, **message: object) -> None:
        self.writer.write(frame(message))

    def ask(self, request_id: int, method: str, **params: object) -> None:
        self.send(type="request", id=request_id, method=method, params=params)

    async def hello(self) -> dict[str, Any]:
        self.send(type="hello", protocol=1, client="raw")
        return await self.read()

    async def read(self) -> dict[str, Any]:
        """The next message; an empty map at the end of the stream."""
        while (frame := self._decoder.next_frame()) is None:
            try:
                data = await asyncio.wait_for(self.reader.read(65536), 10)
            except ConnectionResetError:
                return {}
            if not data:
                return {}
            self._decoder.feed(data)
        return frame

    async def answer(self, request_id: int) -> dict[str, Any]:
        """The result or error of a request; events are passed over."""
        while (message := await self.read())["type"] == "event" or message["id"] != request_id:
            pass
        return message

    async def error_code(self, request_id: int) -> str:
        """The code of the error that answers a request."""
        return str((await self.answer(request_id))["error"]["code"])

    async def error_code_then_end(self) -> str:
        code = (await self.read())["error"]["code"]
        assert await self.read() == {}
        return str(code)

    def close(self) -> None:
        self.writer.transport.abort()


class Running:
    """A server on this loop, its service, and the clients of a test."""

    def __init__(self, server: ApiServer, service: FakeService, path: Path) -> None:
        self.server, self.service, self.path = server, service, path
        self.clients: list[RawClient] = []

    async def connect(self, session: str | None = None, *, greet: bool = True) -> RawClient:
        """A client, greeted; it has made a session by its first request, if one is named."""
        client = RawClient(*await asyncio.open_unix_connection(str(self.path)))
        self.clients.append(client)
        if greet:
            assert (await client.hello())["type"] == "hello"
        if session is not None:
            client.ask(1, "create", session=session)
            await client.answer(1)
        return client

    @contextmanager
    def deaf(self, max_tokens: int) -> Iterator[socket.socket]:
        """A client that asks for so many tokens, and reads none of them."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.path))
            asked = {"session": "s", "max_tokens": max_tokens}
            for message in (
                {"type": "hello", "protocol": 1},
                {"type": "request", "id": 1, "method": "create", "params": {"session": "s"}},
                {"type": "request", "id": 2, "method": "generate", "params": asked},
            ):
                client.sendall(frame(message))
            yield client

    async def until_asked(self, verb: str, times: int = 1) -> None:
        """Wait until the service was asked a verb so often."""
        await poll(lambda: self.asked(verb) == times)

    def asked(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.service.calls)

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are read or carried out."""
        return self.server._budget.used_bytes

    async def until_held(self, size_bytes: int) -> None:
        await poll(lambda: self.held_bytes == size_bytes)

    async def until_left(self, connections: int = 0) -> None:
        """Wait until so many connections are left."""
        await poll(lambda: self.server.connections == connections)

    async def assert_serves_others(self) -> None:
        other = await self.connect()
        other.ask(1, "status")
        assert (await other.read())["type"] == "result"
        other.close()


@asynccontextmanager
async def running(folder: Path, limits: ServerLimits | None = None, **arguments: Any) -> AsyncIterator[Running]:
    service = FakeService()
    server = ApiServer(service, folder / "t.sock", limits=limits or quick(), **arguments)
    await server.start()
    state = Running(server, service, folder / "t.sock")
    try:
        yield state
    finally:
        service.release()
        await server.stop()
        for client in state.clients:
            client.close()
        await asyncio.sleep(0)


def serving(**given: Any) -> pytest.MarkDecorator:
    """What the fixture `state` is given for a test: limits, and `find_peer_uid`."""
    return pytest.mark.parametrize("state", [given], indirect=True, ids=["limited"])


class Here:
    """A whole daemon over a FakeService on the loop of a test, and a client of it. reports: what it told at its end."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self.path, self._arguments = path, arguments
        self.service = FakeService()
        self.reports: list[ShutdownResult] = []

    async def __aenter__(self) -> Here:
        ready = asyncio.Event()

        async def open_backend() -> FakeService:
            return self.service

        told = (lambda _socket: ready.set(), self.reports.append)
        self.serving = asyncio.create_task(_serve(open_backend, self.path, *told, **self._arguments))
        await ready.wait()
        self.client = await self.other().connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()
        self.service.close_gate.set()
        if exc[0] is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait({self.serving})
        if exc[0] is None:
            assert len(self.reports) == 1

    def other(self) -> AsyncClient:
        return AsyncClient(self.path, timeout_s=20)

    async def until_asked(self, verb: str) -> None:
        await poll(lambda: any(name == verb for name, _ in self.service.calls))


async def turns(count: int = 20) -> None:
    """Let other tasks do so many steps."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- a daemon that says whatever a test wants


class Last(bytes):
    """What a scripted daemon says before it ends a connection."""


Reply = Callable[[list[dict[str, Any]]], bytes]


def answer(request_id: int, **result: object) -> bytes:
    return frame({"type": "result", "id": request_id, "result": result})


def refusal(request_id: int | None, code: str) -> bytes:
    error = {"code": code, "message": "Not now.", "details": {}}
    return frame({"type": "error", "id": request_id, "error": error})


EVICTION = Last(refusal(None, "connection_evicted"))


@contextmanager
def scripted(
    path: Path, *replies: Reply, hello: bytes | Sequence[bytes] = frame(HELLO)
) -> Iterator[list[dict[str, Any]]]:
    """A daemon that takes so many connections, one after the other. replies: what it says on each behind a request, of
    all the requests so far. hello: its greeting, on each or on all. Gives the requests."""
    asked: list[dict[str, Any]] = []
    greetings = [hello] * len(replies) if isinstance(hello, bytes) else hello

    def serve(connected: socket.socket, greeting: bytes, reply: Reply) -> None:
        decoder = FrameDecoder(REQUEST_LIMITS)
        while data := connected.recv(65536):
            decoder.feed(data)
            while (message := decoder.next_frame()) is not None:
                if message["type"] == "hello":
                    connected.sendall(greeting)
                    if isinstance(greeting, Last):
                        return
                elif message["type"] == "request":
                    asked.append(message)
                    said = reply(asked)
                    connected.sendall(said)
                    if isinstance(said, Last):
                        return

    def serve_all() -> None:
        for greeting, reply in zip(greetings, replies, strict=True):
            with suppress(OSError), listener.accept()[0] as connected:
                serve(connected, greeting, reply)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        daemon = threading.Thread(target=serve_all, daemon=True)
        daemon.start()
        try:
            yield asked
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # where fewer connections were made than replies are there
            daemon.join(timeout=10)
