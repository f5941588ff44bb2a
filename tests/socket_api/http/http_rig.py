"""An HTTP server over a service without a model, on a thread of its own, and plain requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.socket_api.http.server import HttpServer
from torpor.tests.socket_api.fake_service import FakeService
from torpor.tests.socket_api.server_rig import LoopThread


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def asked(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Ask, and read the whole answer. headers: an underscore stands for a hyphen."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with contextlib.suppress(BrokenPipeError):  # refused before all was sent; the answer is there to read
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


class HttpThread(LoopThread):
    """An HTTP server with a FakeService, on both addresses."""

    def __init__(self, folder: Path, *, seen_as: Callable[[Any], Any] = lambda service: service, **arguments: Any):
        self.seen_as = seen_as
        self.socket_path = folder / "h.sock"
        self.tokens_path = folder / "config" / "http-tokens"
        self.service: FakeService
        self._arguments = arguments
        super().__init__()

    @property
    def port(self) -> int:
        return int(self.server.port)

    @property
    def token(self) -> str:
        return self.tokens_path.read_text().split()[-1]

    def on_unix(self) -> http.client.HTTPConnection:
        return UnixConnection(self.socket_path)

    def on_port(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Ask on the Unix socket, on a connection of its own."""
        connection = self.on_unix()
        try:
            return asked(connection, method, path, body, **headers)
        finally:
            connection.close()

    def renew(self) -> None:
        """Let the service forget all that it was asked, when that has ended."""
        self.do(self.service.release)
        self.wait_until(lambda: self.server.works == 0)
        self.do(self.service.__init__)  # type: ignore[misc]

    async def start(self) -> None:
        self.service = FakeService()
        self.server = HttpServer(socket_path=self.socket_path, port=0, tokens_path=self.tokens_path, **self._arguments)
        await self.server.start(self.seen_as(self.service))


Begin = Callable[..., HttpThread]
