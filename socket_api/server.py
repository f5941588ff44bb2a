"""The daemon's front door: accepts connections on the Unix socket and hands each to a `ServedConnection`.

Owns the listening socket, the check of who connects, the cap on connections, and the graceful stop. Does not know what
the service does (it takes any `Backend`), and never closes it: who made it closes it.
"""

from __future__ import annotations

import asyncio
import logging
import os

from .. import __version__
from .connection import ServerConnection
from .dispatch import Backend
from .errors import PeerRefused, ProtocolError, TooManyConnections
from .limits import ServerLimits
from .listener import Listener, open_listener
from .peer import FindPeerUid, peer_uid
from .served import ServedConnection

_LOG = logging.getLogger(__name__)
_STREAM_BUFFER_BYTES = 64 * 1024


class ApiServer:
    """Serves `backend` on `socket_path` between `start` and `stop`, or as an async context manager."""

    def __init__(
        self,
        backend: Backend,
        socket_path: str | os.PathLike[str],
        *,
        limits: ServerLimits | None = None,
        find_peer_uid: FindPeerUid = peer_uid,
    ) -> None:
        self._backend = backend
        self._socket_path = socket_path
        self._limits = limits or ServerLimits()
        self._find_peer_uid = find_peer_uid
        self._served: dict[ServedConnection, asyncio.Task[None]] = {}
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Connections that are open, or gone with work of theirs still running."""
        return len(self._served)

    async def start(self) -> None:
        """Make the socket and accept.

        Raises:
            SocketPathTooLong, UnsafeSocketPath, SocketInUse: see `listener.py`.
        """
        self._listener = open_listener(self._socket_path)
        self._server = await asyncio.start_unix_server(
            self._accept, sock=self._listener.socket, limit=_STREAM_BUFFER_BYTES
        )

    async def stop(self) -> None:
        """Accept no more, remove the socket, cancel generations, answer what is in flight, close. Idempotent.

        The socket goes first: a client that comes now is told at once that nobody is there.
        """
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.remove()
        for served in list(self._served):
            served.shut_down()
        while self._served:
            await asyncio.wait(set(self._served.values()))
        self._server = self._listener = None

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refusal = self._find_refusal(writer)
        if refusal is not None:
            _LOG.warning("connection refused: %s", refusal.code)
            writer.write(ServerConnection(max_in_flight=0).send_fatal(refusal))
            writer.close()
            return
        served = ServedConnection(
            self._backend, reader, writer, server_name=f"torpor {__version__}", limits=self._limits
        )
        task = asyncio.create_task(served.serve())
        self._served[served] = task
        task.add_done_callback(lambda done: self._forget(served, done))
        if self._server is None or not self._server.is_serving():
            served.shut_down()  # accepted by the loop while it was stopping

    def _find_refusal(self, writer: asyncio.StreamWriter) -> ProtocolError | None:
        try:
            uid = self._find_peer_uid(writer.get_extra_info("socket"))
        except OSError:
            return PeerRefused("The system does not say who connects. Nobody is served without that.")
        if uid != os.geteuid():
            return PeerRefused(f"This daemon serves user {os.geteuid()} only, and you are {uid}. Start your own.")
        if len(self._served) >= self._limits.max_connections:
            return TooManyConnections(
                f"{self._limits.max_connections} connections are open. Close or share one: requests can overlap on it.",
                limit=self._limits.max_connections,
            )
        return None

    def _forget(self, served: ServedConnection, done: asyncio.Task[None]) -> None:
        del self._served[served]
        if not done.cancelled() and (fault := done.exception()) is not None:
            _LOG.error("fault in a connection", exc_info=fault)
