"""The asyncio shell around the protocol core: one connection of the asynchronous client.

Owns the stream, the task that reads it, and a queue for each request in flight. Does not know the verbs (`aclient.py`).

Rules: nothing is ever sent twice. The first failure of the connection ends it; later calls name that failure as cause.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from .address import require_path_fits
from .calls import Call, remote_error
from .connection import ClientConnection
from .errors import (
    ApiError,
    ClientClosed,
    ConnectionLost,
    DaemonUnreachable,
    LocalProtocolError,
    ProtocolError,
    RequestTimeout,
)
from .inbox import Inbox
from .link import CONNECT_TIMEOUT_S, connection_lost, require_timeout, unreachable
from .messages import HelloReply, ServerMessage
from .peer import peer_pid, peer_uid, require_own_peer

_READ_BYTES = 256 * 1024


class AsyncLink:
    """A connection, greeted once `connect` returns. `timeout_s` is the longest silence about one request."""

    def __init__(self, socket_path: Path, *, timeout_s: float | None) -> None:
        require_timeout(timeout_s)
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._connection = ClientConnection(client_name="torpor-python-async")
        self._inboxes: dict[int, _Awaited] = {}
        self._failure: ApiError | None = None
        self._greeted = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.peer_pid: int | None = None

    @property
    def hello(self) -> HelloReply:
        """What the daemon said of itself. Raises LocalProtocolError before `connect`."""
        if self._connection.hello is None:
            raise LocalProtocolError("This client is not connected. Use it with: async with AsyncClient() as torpor")
        return self._connection.hello

    async def connect(self) -> None:
        """Connect and wait to be greeted; once for each client.

        Raises:
            DaemonUnreachable: nobody answers there.
            RemoteError: the daemon refused the connection.
        """
        self._require_usable()
        if self._reading is not None:
            raise LocalProtocolError("This client has been connected already.")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, self._writer = await _connect(self.socket_path)
                self.peer_pid = peer_pid(self._writer.get_extra_info("socket"))
                self._loop = asyncio.get_running_loop()
                self._reading = asyncio.create_task(self._read(reader))
                await self._send(self._connection.send_hello())
                await self._greeted.wait()
        except TimeoutError:
            await self.close()
            raise DaemonUnreachable(
                f"No daemon greeted on {self.socket_path} within {CONNECT_TIMEOUT_S:g} s."
                " Is it a Torpor daemon, and is it alive?",
                path=str(self.socket_path),
            ) from None
        except BaseException:
            await self.close()
            raise
        if self._failure is not None:
            failure = self._failure
            await self.close()
            raise failure

    async def close(self) -> None:
        """Close the connection; the daemon stops the generations that were asked for on it. Idempotent."""
        self._failure = ClientClosed("This client was closed. Make a new one.")
        self._tell_all(self._failure)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            self._writer.transport.abort()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def begin(self, call: Call[Any]) -> int:
        """Begin a request without waiting: a frame is queued whole, so a cancelled task never leaves half of one."""
        self._require_open()
        request_id, data = self._connection.send_request(call.method, call.params)
        self._inboxes[request_id] = _Awaited()
        self._write(data)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ask the daemon to stop a request; its answer still comes."""
        if self._failure is None:
            self._write(self._connection.send_cancel(request_id))

    def abandon(self, request_id: int) -> None:
        """Forget a request; if it is still in flight, ask the daemon to stop it. What comes late is dropped."""
        if self._inboxes.pop(request_id, None) is not None:
            self.cancel(request_id)

    def drop(self, request_id: int) -> None:
        """As `abandon`, from a finaliser, which may run in any thread, and when the loop has gone."""
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.abandon, request_id)

    async def wait_for(self, request_id: int, *, silence_is_fine: bool = False) -> ServerMessage:
        """Return the next message about a request. Raises ApiError if there will be none. silence_is_fine: as of
        `Link.wait_for`."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            self._require_open()
            raise LocalProtocolError("This request is over.")
        try:
            async with asyncio.timeout(None if silence_is_fine else self._timeout_s):
                return await inbox.take()
        except TimeoutError:
            raise RequestTimeout(
                f"The daemon was silent for {self._timeout_s:g} s. The request is cancelled; look at the session with"
                " show before asking again, or make the client with a longer timeout_s.",
                timeout_s=self._timeout_s,
            ) from None

    # --- the connection

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                self._connection.feed(data)
                while (message := self._connection.next_message()) is not None:
                    self._sort(message)
            self._connection.require_clean_end()
            self._lose(connection_lost("the daemon closed it"))
        except OSError as error:
            self._lose(connection_lost(str(error)))
        except ProtocolError as error:
            self._lose(error)
        finally:
            self._lose(connection_lost("reading it stopped"))  # whatever happens, nobody waits forever

    def _sort(self, message: ServerMessage) -> None:
        if isinstance(message, HelloReply):
            self._greeted.set()
        elif message.id is None:
            self._lose(remote_error(message.error))
        elif message.id in self._inboxes:
            self._inboxes[message.id].put(message)

    def _write(self, data: bytes) -> None:
        assert self._writer is not None, "only a connected client gets here"
        if data:
            self._writer.write(data)

    async def flush(self) -> None:
        """Wait until the daemon has taken most of what was sent."""
        assert self._writer is not None, "only a connected client gets here"
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except (OSError, TimeoutError):
            pass  # reading says why: a daemon that hangs up sends the reason first

    async def _send(self, data: bytes) -> None:
        self._write(data)
        await self.flush()

    def _lose(self, failure: ApiError) -> None:
        """Give the connection up; the first reason counts."""
        if self._failure is None:
            self._failure = failure
            self._tell_all(failure)
            self._greeted.set()
            if self._writer is not None:
                self._writer.transport.abort()

    def _tell_all(self, failure: ApiError) -> None:
        for inbox in self._inboxes.values():
            inbox.end(failure)

    def _require_open(self) -> None:
        self._require_usable()
        if self._connection.hello is None:
            raise LocalProtocolError("This client is not connected. Use it with: async with AsyncClient() as torpor")

    def _require_usable(self) -> None:
        if isinstance(self._failure, ClientClosed):
            raise self._failure
        if self._failure is not None:
            raise ConnectionLost(
                f"This client's connection has ended: {self._failure.message} Make a new client.",
                cause=self._failure.code,
            ) from self._failure


class _Awaited:
    """An inbox whose next message can be waited for, by one task."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    def put(self, message: ServerMessage) -> None:
        self._inbox.put(message)
        self._changed.set()

    def end(self, failure: ApiError) -> None:
        """There will be no more messages; the first reason counts."""
        self._failure = self._failure or failure
        self._changed.set()

    async def take(self) -> ServerMessage:
        """Raises ApiError once the last message has been taken and there will be none."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._inbox.take()


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    absolute = require_path_fits(path)
    try:
        reader, writer = await asyncio.open_unix_connection(absolute)
    except OSError as error:
        raise unreachable(absolute, error) from error
    try:
        require_own_peer(writer.get_extra_info("socket"), absolute, peer_uid)
    except OSError as error:
        writer.transport.abort()
        raise unreachable(absolute, error) from error
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer
