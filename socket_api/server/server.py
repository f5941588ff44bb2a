"""Accepts connections on the Unix socket, and hands each to a `ServedConnection`.

Owns the listening socket, the check of the peer, the cap on connections, and the graceful stop or its refusal. Takes
any `Backend`, and never closes it: its maker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from ... import __version__
from ...daemon.api.process import ShutdownResult
from ..errors import PeerRefused, ProtocolError, StopRefused, TooManyConnections
from ..limits import MAX_REQUEST_FRAME_BYTES, ServerLimits
from ..wire.connection import ServerConnection
from ..wire.listener import Listener, open_listener
from ..wire.peer import FindPeerUid, peer_uid
from .budget import RequestBudget
from .dispatch import Backend
from .served import ServedConnection

_LOG = logging.getLogger(__name__)
_STREAM_BUFFER_BYTES = 64 * 1024
_ACCEPTS_PER_TURN = 16
"""So that many new clients do not keep the loop from the connected ones."""
_ACCEPT_PAUSE_S = 0.5
"""After accept failed, for example without free file descriptors."""


class GivesWay(Protocol):
    """Holds work that may be cancelled."""

    def give_way(self) -> None: ...


class ApiServer:
    """Serves `backend` on `socket_path` between `start` and `stop`, or as an async context manager."""

    def __init__(
        self,
        backend: Backend,
        socket_path: str | os.PathLike[str],
        *,
        limits: ServerLimits | None = None,
        find_peer_uid: FindPeerUid = peer_uid,
        on_shutdown: Callable[[], None] = lambda: None,
        beside: Sequence[GivesWay] = (),
    ) -> None:
        """on_shutdown: called when a client asks the daemon to stop; `quiesce`, `announce` and `stop` should follow.
        beside: other servers over the same service; they give way to the stop as the connections here do.
        """
        self._backend = backend
        self._socket_path = socket_path
        self._limits = limits or ServerLimits()
        self._find_peer_uid = find_peer_uid
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: set[ServedConnection] = set()
        self._stopping = False
        self._budget = RequestBudget(self._limits.max_request_bytes, largest_bytes=MAX_REQUEST_FRAME_BYTES)
        self._checking = asyncio.Lock()
        self._evicted: set[ServedConnection] = set()
        self._full: Listener | None = None
        self._on_shutdown = on_shutdown
        self._beside = beside
        self._report: asyncio.Future[ShutdownResult] | None = None

    @property
    def connections(self) -> int:
        """Connections that are open, or have left work that still runs."""
        return len(self._tasks)

    async def start(self) -> None:
        """Make the socket and accept; once for each server. Raises SocketPathTooLong, UnsafeSocketPath, SocketInUse:
        see `listener.py`."""
        self._listener = await asyncio.to_thread(open_listener, self._socket_path)  # may wait for a lock
        self._watch(self._listener)

    async def quiesce(self) -> None:
        """The first half of a stop: accept no more, remove the socket, cancel generations, wait for work in flight.
        Connections stay open, so that clients that asked for the stop get its report (`announce`). The socket goes
        first: a new client learns at once that no daemon is there.
        """
        self._stopping = True
        if self._listener is not None:
            self._accept(self._listener)  # a waiting client may ask for the stop, too
            asyncio.get_running_loop().remove_reader(self._listener.socket)
            self._listener.remove()
            self._listener = None
        await asyncio.gather(*(served.quiesce() for served in self._served))

    def announce(self, report: ShutdownResult) -> None:
        """Send the report to all clients that ask for the stop, until `stop`."""
        if not self._reported().done():
            self._reported().set_result(report)

    async def stop(self) -> None:
        """Accept no more, remove the socket, cancel generations, answer work in flight, close. Idempotent. Without
        `announce`, a client that asked for the stop hears only that the daemon is stopping.
        """
        await self.quiesce()
        self._reported().cancel()
        for served in self._served:
            served.shut_down()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # Accepted here and not by asyncio's server: closed in the same turn of the loop, that one loses a connection it has
    # accepted. Nor can it check the peer before it makes buffers.

    def _watch(self, listener: Listener) -> None:
        if not self._stopping:
            asyncio.get_running_loop().add_reader(listener.socket, self._accept, listener)

    def _accept(self, listener: Listener) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._evicted and len(self._tasks) >= self._limits.max_connections + self._limits.reserved_connections:
                self._full = listener  # there is room as soon as an evicted one has gone
                asyncio.get_running_loop().remove_reader(listener.socket)
                return
            try:
                connected, _address = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _LOG.error("cannot accept connections: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.socket)
                loop.call_later(_ACCEPT_PAUSE_S, self._watch, listener)
                return
            self._admit(connected)

    def _admit(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        refusal = self._find_refusal(connected)
        if refusal is None:
            task = asyncio.create_task(self._serve(connected, reserved=not self._find_place()))
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            return
        _LOG.warning("connection refused: %s", refusal.code)
        with connected, contextlib.suppress(OSError):  # a small frame fits into the socket's empty buffer
            connected.send(ServerConnection(max_in_flight=0).send_fatal(refusal))

    def _find_refusal(self, connected: socket.socket) -> ProtocolError | None:
        try:
            uid = self._find_peer_uid(connected)
        except OSError:
            return PeerRefused("The system does not say which user connects, and without that no client is served.")
        if uid != os.geteuid():
            return PeerRefused(f"This daemon serves user {os.geteuid()} only, and you are {uid}. Start your own.")
        limit = self._limits.max_connections + self._limits.reserved_connections
        if len(self._tasks) >= limit and self._find_idle() is None:
            return TooManyConnections(
                f"{limit} connections are open, and all of them work. Close or share one: requests can overlap on it.",
                limit=limit,
            )
        return None

    def _find_place(self) -> bool:
        """Whether there is room for one more; an idle connection is evicted for it if needed."""
        if len(self._tasks) - len(self._evicted) < self._limits.max_connections:
            return True
        oldest = self._find_idle()
        if oldest is None:
            return False
        oldest.evict()
        self._evicted.add(oldest)
        return not oldest.reserved

    def _find_idle(self) -> ServedConnection | None:
        """The connection that has been idle longest, if any is idle."""
        idle = [(since, served) for served in self._served if (since := served.idle_since) is not None]
        return min(idle, key=lambda one: one[0])[1] if idle else None

    async def _serve(self, connected: socket.socket, *, reserved: bool) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_STREAM_BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connected)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        served = ServedConnection(
            self._backend,
            reader,
            writer,
            shut_down=self._shut_down,
            budget=self._budget,
            checking=self._checking,
            reserved=reserved,
            server_name=f"torpor {__version__}",
            limits=self._limits,
        )
        self._served.add(served)
        if self._stopping:
            served.refuse_work()
        if self._reported().done():
            served.shut_down()
        try:
            await served.serve()
        finally:
            self._served.discard(served)
            if served not in self._evicted:
                self._fill_place(reserved=served.reserved)
            self._evicted.discard(served)

    def _fill_place(self, *, reserved: bool) -> None:
        """Give the place of a closed connection to one in reserve."""
        if not reserved:
            for served in self._served:
                if served.reserved:
                    served.reserved = False
                    return

    async def _shut_down(self, *, force: bool) -> ShutdownResult:
        if not force and not self._stopping:
            for each in (*self._served, *self._beside):
                each.give_way()
            report = await self._backend.prepare_close()
            if report.failed and not self._stopping:  # else a signal has ended the daemon meanwhile
                _LOG.warning("a stop was refused: %d sessions cannot be put to sleep", len(report.failed))
                raise StopRefused.of(report.failed)
        self._on_shutdown()
        return await asyncio.shield(self._reported())

    def _reported(self) -> asyncio.Future[ShutdownResult]:
        if self._report is None:
            self._report = asyncio.get_running_loop().create_future()
        return self._report

    def _forget(self, done: asyncio.Task[None]) -> None:
        self._tasks.discard(done)
        if self._full is not None:
            self._watch(self._full)
            self._full = None
        if not done.cancelled() and (fault := done.exception()) is not None:
            _LOG.error("fault in a connection", exc_info=fault)
