"""The HTTP server in the daemon's own event loop: its two addresses, its start and its stop.

The Unix socket is made as the daemon's own one. The port is taken before a model is loaded, so that one in use is told
at once. uvicorn serves both; its signal handlers are left out, for the signals are the daemon's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn

from ...daemon.api.process import HttpInfo
from ..errors import PortInUse
from ..server.descriptors import BESIDE_CONNECTIONS, raise_limit
from ..server.dispatch import Backend
from ..tokens import Tokens, default_tokens_path
from ..wire.listener import Listener, open_listener, require_free
from ..wire.peer import FindPeerUid, peer_uid
from .access import Access
from .app import app_of
from .connections import Config, Connection, HttpLimits
from .sign_in import Codes
from .work import Desk

_HOST = "127.0.0.1"
_BACKLOG = 1024


class _Server(uvicorn.Server):
    """uvicorn's, but it does not wake ten times a second: it is told of its end, and `connections.py` sets the date of
    an answer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    async def main_loop(self) -> None:
        await self._end.wait()

    def end(self) -> None:
        """Close what is open."""
        self._end.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """Serves a service over HTTP, between `start` and `stop`."""

    def __init__(
        self,
        *,
        socket_path: str | os.PathLike[str] | None = None,
        port: int | None = None,
        tokens_path: Path | None = None,
        limits: HttpLimits | None = None,
        find_peer_uid: FindPeerUid = peer_uid,
        inspector: bool = True,
    ) -> None:
        """Take the port, so that it is known to be free; 0: any free one. tokens_path: by default the user's.
        inspector: whether its page is on the port.

        Raises:
            PortInUse, UnsafeTokenFile, and the errors of a socket's path.
        """
        limits = limits or HttpLimits()
        self._addresses = max(1, (socket_path is not None) + (port is not None))
        share = max(1, (raise_limit() - BESIDE_CONNECTIONS) // 4 // self._addresses)
        self.limits = replace(limits, max_connections=min(limits.max_connections, share))
        self._socket_path = socket_path
        self._find_peer_uid = find_peer_uid
        self._inspector = inspector and port is not None
        self._listener: Listener | None = None
        self._bound: socket.socket | None = None
        self._desk: Desk | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._tokens: Tokens | None = None
        if socket_path is not None:
            require_free(socket_path)
        if port is not None:
            self._tokens = Tokens(tokens_path or default_tokens_path())
            self._tokens.make()
            self._bound = _take_port(port)

    @property
    def max_connections(self) -> int:
        """How many connections it may have open: a quarter of what the daemon may, or fewer."""
        return self.limits.max_connections * self._addresses

    @property
    def port(self) -> int | None:
        """Its port."""
        return None if self._bound is None else int(self._bound.getsockname()[1])

    @property
    def works(self) -> int:
        """How many requests the service carries out for it."""
        return 0 if self._desk is None else len(self._desk.works)

    @property
    def info(self) -> HttpInfo:
        """Where it serves."""
        by_socket = None if self._socket_path is None else os.path.abspath(self._socket_path)
        if self._tokens is None:
            return HttpInfo(socket=by_socket)
        return HttpInfo(f"http://{_HOST}:{self.port}", str(self._tokens.path), by_socket)

    def addresses(self) -> list[str]:
        """Where it serves, a sentence each."""
        info = self.info
        by_port = [f"HTTP on {info.url}/v1, with a token of {info.tokens}"] if info.url else []
        return by_port + ([f"HTTP on the Unix socket {info.socket}"] if info.socket else [])

    async def start(self, backend: Backend) -> None:
        """Serve, once. Raises the errors of a socket's path."""
        access = Access(self._tokens, self.port, has_page=self._inspector)
        self._desk = Desk(backend, access, self.limits, codes=Codes() if self._inspector else None)
        sockets = [] if self._bound is None else [self._bound]
        if self._socket_path is not None:
            self._listener = await asyncio.to_thread(open_listener, self._socket_path)
            sockets.append(self._listener.socket)
        config = Config(app_of(self._desk), self.limits, self._find_peer_uid)
        config.backlog = _BACKLOG
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=sockets))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0)

    def give_way(self) -> None:
        """Cancel the work that may be cancelled, for a stop that may still be refused."""
        if self._desk is not None:
            self._desk.works.give_way()

    async def quiesce(self) -> None:
        """Accept no more, refuse further requests, cancel those that may be cancelled, wait for the others. Streams end
        with the error of their API."""
        for server in self._server.servers if self._server is not None and self._server.started else ():
            server.close()
        if self._listener is not None:
            self._listener.remove()
        if self._desk is not None:
            await self._desk.works.quiesce()

    async def stop(self) -> None:
        """As `quiesce`; then give clients a moment to take their answers, and close. Idempotent."""
        await self.quiesce()
        if self._server is not None and self._serving is not None:
            self._server.end()
            await asyncio.wait({self._serving})
            for each in list(self._server.server_state.connections):
                if isinstance(each, Connection):
                    each.abort()
        if self._bound is not None:
            self._bound.close()


def _take_port(port: int) -> socket.socket:
    # With its protocol named: without, asyncio leaves Nagle's algorithm on, and each answer takes 44 ms.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((_HOST, port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise PortInUse(
            f"Port {port} of {_HOST} cannot be used: {error.strerror}. Choose another with --http, or 0 for any free"
            " one.",
            port=port,
        ) from error
    return bound
