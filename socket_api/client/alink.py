"""The asyncio shell around the protocol core: one connection of the asynchronous client.

Owns the stream, the task that reads it, and a queue for each request in flight. Does not know the verbs (`aclient.py`).

Rules: those of `link.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from ..errors import ApiError, ClientClosed, DaemonUnreachable, LocalProtocolError, ProtocolError
from ..wire.address import require_path_fits
from ..wire.asking import Call, remote_error
from ..wire.connection import ClientConnection
from ..wire.messages import EventMessage, HelloReply, ServerMessage
from ..wire.peer import peer_pid
from .link import connection_lost, has_ended, require_timeout, silent, unreachable
from .reaching import (
    CONNECT_TIMEOUT_S,
    MOST_REPEATS,
    Inbox,
    Unanswered,
    is_crowded,
    is_eviction,
    pause_s,
    pauses,
    try_to_connect,
)

_READ_BYTES = 256 * 1024


class AsyncLink:
    """A connection, greeted once `connect` returns. timeout_s: the longest silence about one request."""

    def __init__(self, socket_path: Path, *, timeout_s: float | None) -> None:
        require_timeout(timeout_s)
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._connection = ClientConnection(client_name="torpor-python-async")
        self._inboxes: dict[int, _Awaited] = {}
        self._unanswered: dict[int, Unanswered] = {}
        self._evictions = 0  # since a request was last answered
        self._renewing: asyncio.Task[None] | None = None
        self._failure: ApiError | None = None
        self._greeted = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.peer_pid: int | None = None

    @property
    def hello(self) -> HelloReply:
        """The daemon's greeting. Raises LocalProtocolError before `connect`."""
        if self._connection.hello is None:
            raise LocalProtocolError("This client is not connected. Use it with: async with AsyncClient() as torpor")
        return self._connection.hello

    async def connect(self) -> None:
        """Connect and wait for the greeting; once for each client.

        Raises:
            DaemonUnreachable: no daemon answers there.
            RemoteError: the daemon refused the connection.
        """
        self._require_usable()
        if self._reading is not None:
            raise LocalProtocolError("This client has been connected already.")
        self._loop = asyncio.get_running_loop()
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; the daemon stops its generations. Idempotent."""
        self._failure = ClientClosed("This client was closed. Make a new one.")
        self._tell_all(self._failure)
        for task in (self._renewing, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._writer is not None:
            self._writer.transport.abort()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def begin(self, call: Call[Any]) -> int:
        """Begin a request without waiting: a frame is queued whole, so a cancelled task never leaves half of one."""
        self._require_open()
        request_id, data = self._connection.send_request(call.verb.name, call.params)
        self._inboxes[request_id] = _Awaited()
        self._unanswered[request_id] = Unanswered(call)
        if not self._renew():
            self._write(data)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ask the daemon to stop a request; its answer still comes."""
        if request_id in self._unanswered:
            self._unanswered[request_id].is_cancelled = True
        if self._failure is None and self._renewing is None:
            self._write(self._connection.send_cancel(request_id))

    def abandon(self, request_id: int) -> None:
        """Forget a request; if it is still in flight, ask the daemon to stop it. Late messages are dropped."""
        self._unanswered.pop(request_id, None)
        if self._inboxes.pop(request_id, None) is not None:
            self.cancel(request_id)

    def drop(self, request_id: int) -> None:
        """As `abandon`, from a finaliser: in any thread, and even after the loop has gone."""
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
            raise silent(self._timeout_s) from None

    # --- the connection

    async def _open(self) -> None:
        """Connect and be greeted; try again for a while if many clients do so at once."""
        path = require_path_fits(self.socket_path)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for between_s in pauses():
                    if await self._greeted_on(path):
                        return
                    await asyncio.sleep(between_s)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise DaemonUnreachable(
                    f"No daemon greeted on {self.socket_path} within {CONNECT_TIMEOUT_S:g} s."
                    " Is it a Torpor daemon, and is it alive? If many wait for it, try again.",
                    path=str(self.socket_path),
                ) from None
            raise unreachable(path, error) from error

    async def _greeted_on(self, path: str) -> bool:
        """Whether a daemon has greeted us; False if too many clients wait for it."""
        connected = try_to_connect(path)
        if connected is None:
            return False
        self._connection = self._connection.renewed()
        self._failure = None
        self._greeted.clear()
        reader, self._writer = await asyncio.open_unix_connection(sock=connected)
        self.peer_pid = peer_pid(connected)
        self._reading = asyncio.create_task(self._read(reader))
        self._write(self._connection.send_hello())
        await self._greeted.wait()
        failure: ApiError | None = self._failure
        if failure is not None and not is_crowded(failure):
            raise failure
        return failure is None

    def _renew(self) -> bool:
        """After an eviction, start another connection. Gives whether one is being made."""
        if self._renewing is None and is_eviction(self._failure):
            self._renewing = asyncio.create_task(self._open_again())
        return self._renewing is not None

    async def _open_again(self) -> None:
        self._evictions += 1
        try:
            if self._evictions > MOST_REPEATS and self._failure is not None:
                raise self._failure
            if self._evictions > 1:
                await asyncio.sleep(pause_s(self._evictions - 2))
            await self._open()
        except ApiError as error:
            self._failure = connection_lost(error.message)
            self._tell_all(self._failure)
        else:
            for request_id in self._unanswered:
                self._send_again(request_id, self._connection)
        finally:
            self._renewing = None

    def _send_again(self, request_id: int, connection: ClientConnection) -> None:
        """Send again a request that was not begun, unless it was given up or the connection was replaced."""
        request = self._unanswered.get(request_id)
        if request is None or self._failure is not None or connection is not self._connection:
            return
        self._write(connection.send_again(request_id, request.call.verb.name, request.call.params))
        if request.is_cancelled:
            self._write(connection.send_cancel(request_id))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        mine = self._connection
        failure: ApiError = connection_lost("reading it stopped")  # for any other error: no task may wait forever
        try:
            while data := await reader.read(_READ_BYTES):
                mine.feed(data)
                while (message := mine.next_message()) is not None:
                    self._sort(message)
            mine.require_clean_end()
            failure = connection_lost("the daemon closed it")
        except OSError as error:
            failure = connection_lost(error.strerror or str(error))
        except ProtocolError as error:
            failure = error
        finally:
            if mine is self._connection:  # else another connection has replaced it
                self._lose(failure)

    def _sort(self, message: ServerMessage) -> None:
        if isinstance(message, HelloReply):
            self._greeted.set()
        elif message.id is None:
            self._lose(remote_error(message.error))
        elif (request := self._unanswered.get(message.id)) is not None and request.is_put_off_by(message):
            pause = pause_s(request.refusals - 1)
            asyncio.get_running_loop().call_later(pause, self._send_again, message.id, self._connection)
        else:
            self._evictions = 0
            if not isinstance(message, EventMessage):
                self._unanswered.pop(message.id, None)
            if message.id in self._inboxes:
                self._inboxes[message.id].put(message)

    def _write(self, data: bytes) -> None:
        assert self._writer is not None, "only a connected client gets here"
        if data:
            self._writer.write(data)

    async def flush(self) -> None:
        """Wait until the daemon has taken most of the sent bytes."""
        if self._renewing is not None:
            await asyncio.wait({self._renewing}, timeout=self._timeout_s)
        assert self._writer is not None, "only a connected client gets here"
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except (OSError, TimeoutError):
            pass  # reading gives the reason: a daemon sends it before it hangs up

    def _lose(self, failure: ApiError) -> None:
        """Give the connection up; the first reason counts."""
        if self._failure is None:
            self._failure = failure
            was_greeted = self._greeted.is_set()
            self._greeted.set()
            if self._writer is not None:
                self._writer.transport.abort()
            if not is_eviction(failure):
                self._tell_all(failure)
            elif was_greeted and self._unanswered:
                self._renew()  # else with the next use

    def _tell_all(self, failure: ApiError) -> None:
        for inbox in self._inboxes.values():
            inbox.end(failure)

    def _require_open(self) -> None:
        self._require_usable()
        if self._writer is None:
            raise LocalProtocolError("This client is not connected. Use it with: async with AsyncClient() as torpor")

    def _require_usable(self) -> None:
        if isinstance(self._failure, ClientClosed):
            raise self._failure
        if self._failure is not None and not is_eviction(self._failure):
            raise has_ended(self._failure) from self._failure


class _Awaited:
    """An inbox. One task can wait for its next message."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    def put(self, message: ServerMessage) -> None:
        self._inbox.put(message)
        self._changed.set()

    def end(self, failure: ApiError) -> None:
        """Note that no more messages come; the first reason counts."""
        self._failure = self._failure or failure
        self._changed.set()

    async def take(self) -> ServerMessage:
        """Wait for the next message. Raises ApiError if there will be none."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._inbox.take()
