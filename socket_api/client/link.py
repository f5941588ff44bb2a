"""The connection of a client: requests in flight, their answers, and another connection when one was taken away.

Owns an inbox for each request in flight. Written once, as coroutines: a `Transport` decides whether a wait blocks the
thread (`blocking.py`) or is one of an event loop (`awaiting.py`). Does not know the verbs (`client.py`, `aclient.py`).

Rules: a request that the daemon has begun is never sent twice. The first failure ends the connection, and later calls
name it as their cause. There are two exceptions, and in both the daemon has begun nothing. After an eviction the next
use connects again and sends the unanswered requests. A request refused on a reserve connection is sent again after a
pause; answers to others are read meanwhile. Requests to send again are noted first, so an interrupt or a cancelled task
loses none: the next wait sends them.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import (
    ApiError,
    ClientClosed,
    ConnectionLost,
    DaemonUnreachable,
    InvalidRequest,
    LocalProtocolError,
    ProtocolError,
    RequestTimeout,
)
from ..wire.address import default_socket_path, require_path_fits
from ..wire.asking import Call, remote_error
from ..wire.connection import ClientConnection
from ..wire.messages import EventMessage, HelloReply, ServerMessage
from ..wire.peer import peer_pid
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
from .transport import Transport

DEFAULT_TIMEOUT_S = 600.0
"""The longest silence: long work reports progress, so this is for a daemon that hangs or a long queue."""

MAX_TIMEOUT_S = 31_536_000
"""A year. Python refuses more than its system's timers take, with an error of another kind."""


def require_timeout(timeout_s: float | None) -> None:
    """Refuse a timeout of zero, less, NaN, or more than a system's timer takes. Raises InvalidRequest: with the field
    `timeout_s`."""
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {timeout_s!r}. Give seconds above 0 up to {MAX_TIMEOUT_S:,}, or None to wait forever.",
            field="timeout_s",
        )


class Link:
    """A connection, greeted once `connect` returns. timeout_s: the longest silence about one request."""

    def __init__(self, socket_path: Path, transport: Transport, *, client_name: str, timeout_s: float | None) -> None:
        require_timeout(timeout_s)
        self.socket_path = socket_path
        self.peer_pid: int | None = None
        self._transport = transport
        self._timeout_s = timeout_s
        self._connection = ClientConnection(client_name=client_name)
        self._hello: HelloReply | None = None
        self._greeting = Inbox()  # woken by the greeting
        self._inboxes: dict[int, Inbox] = {}
        self._unanswered: dict[int, Unanswered] = {}
        self._evictions = 0  # after which there was another connection, since a request was last answered
        self._failure: ApiError | None = None
        self._has_begun = False
        self._arrived: list[bytes] = []  # and not yet sorted

    @property
    def hello(self) -> HelloReply:
        """The daemon's greeting. Raises LocalProtocolError before `connect`."""
        if self._hello is None:
            raise _not_connected()
        return self._hello

    async def connect(self) -> None:
        """Connect and wait for the greeting; once for each client.

        Raises:
            DaemonUnreachable: no daemon answers there.
            RemoteError: the daemon refused the connection.
        """
        if isinstance(self._failure, ClientClosed):
            raise self._failure
        if self._has_begun:
            raise LocalProtocolError("This client has been connected already.")
        self._has_begun = True
        try:
            async with self._transport.one_at_a_time:
                await self._open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; the daemon stops its generations. Idempotent."""
        self._failure = ClientClosed("This client was closed. Make a new one.")
        self._transport.close()
        self._wake_all()
        await self._transport.closed()

    async def begin(self, call: Call[Any]) -> int:
        """Send a request, and return its id."""
        with self._transport.alone():
            await self._require_open()
            request_id = 0
            try:
                request_id, data = self._connection.send_request(call.verb.name, call.params)
                self._inboxes[request_id] = Inbox()
                self._unanswered[request_id] = Unanswered(call)
                self._send(data)
                await self._transport.flush()
                if self._failure is not None and not self._is_evicted and not self._inboxes.get(request_id):
                    raise self._failure
            except BaseException:
                self.abandon(request_id)  # the caller gets no id to abandon, so no renewal may send it
                raise
            return request_id

    def cancel(self, request_id: int) -> None:
        """Ask the daemon to stop a request; its answer still comes."""
        with self._transport.alone():
            if request_id in self._unanswered:
                self._unanswered[request_id].is_cancelled = True
            self._send_cancel(request_id)

    def abandon(self, request_id: int) -> None:
        """Forget a request; if it is still in flight, ask the daemon to stop it. Late messages are dropped."""
        with self._transport.alone():
            self._unanswered.pop(request_id, None)
            if self._inboxes.pop(request_id, None) is not None:
                self._send_cancel(request_id)

    def drop(self, request_id: int) -> None:
        """As `abandon`, from a finaliser: in any thread and at any point."""
        self._transport.later(partial(self.abandon, request_id))

    async def wait_for(self, request_id: int, *, silence_is_fine: bool = False) -> ServerMessage:
        """Return the next message about a request. Raises ApiError if there will be none.

        silence_is_fine: wait without a timeout, until a message comes or the connection ends.
        """
        with self._transport.alone():
            is_endless = silence_is_fine or self._timeout_s is None
            deadline = math.inf if is_endless else time.monotonic() + (self._timeout_s or 0)
            inbox = self._inboxes.get(request_id)
            while not inbox:
                if inbox is not None and self._failure is not None and not self._is_evicted:
                    raise self._failure
                await self._require_open()
                if inbox is None:
                    raise LocalProtocolError("This request is over.")
                self._send_owed()
                await self._wait(inbox, min(deadline, self._first_owed()[0]))
                if not inbox and time.monotonic() >= deadline:
                    raise _silent(self._timeout_s)
            return inbox.take()

    # --- what arrives

    def received(self, data: bytes) -> None:
        """Put received messages into their inboxes. No bytes: the daemon has closed the connection."""
        self._arrived.append(data)
        self._sort_arrived()

    def _sort_arrived(self) -> None:
        try:
            while self._arrived and self._failure is None:
                data = self._arrived.pop(0)
                if not data:
                    self._connection.require_clean_end()
                    self.lost("the daemon closed it")
                self._connection.feed(data)
                while self._failure is None and (message := self._connection.next_message()) is not None:
                    self._sort(message)
        except ProtocolError as error:
            self._lose(error)
        except BaseException:
            self.lost("reading was interrupted")  # a message may be gone that a request waits for
            raise

    def lost(self, reason: str) -> None:
        """Note that the connection has ended. The error warns, so that no append is repeated blindly."""
        self._lose(
            ConnectionLost(
                f"The connection to the daemon ended ({reason}). Whether a request in flight was carried out is"
                " unknown: look at the session with show before asking again."
            )
        )

    def _sort(self, message: ServerMessage) -> None:
        if isinstance(message, HelloReply):
            self._hello = message
            self._greeting.wake()
            return
        if message.id is None:
            self._lose(remote_error(message.error))
            return
        inbox, request = self._inboxes.get(message.id), self._unanswered.get(message.id)
        if request is not None and request.is_put_off_by(message):
            request.owed_at = time.monotonic() + pause_s(request.refusals - 1)
            if inbox is not None:
                inbox.wake()  # it is sent again by who waits for it
            return
        self._evictions = 0
        if not isinstance(message, EventMessage):
            self._unanswered.pop(message.id, None)
        if inbox is not None:
            inbox.put(message)

    async def _wait(self, inbox: Inbox, until: float) -> None:
        """Wait for news of an inbox, or for a time."""
        try:
            if not (inbox or self._arrived or self._failure):
                await self._transport.wait(inbox, until, self._arrived)
        except OSError as error:
            self.lost(error.strerror or str(error))
        self._sort_arrived()

    def _lose(self, failure: ApiError) -> None:
        """Give the connection up; the first reason is kept for later calls."""
        if self._failure is None:
            self._failure = failure
            self._transport.close()
            self._wake_all()

    def _wake_all(self) -> None:
        for inbox in (self._greeting, *self._inboxes.values()):
            inbox.wake()

    # --- what is sent

    def _send(self, data: bytes) -> None:
        try:
            self._transport.write(data)
        except OSError as error:
            if farewell := self._transport.farewell():
                self.received(farewell)
            self.lost(error.strerror or str(error))
        except BaseException:
            self.lost("sending was interrupted")  # half a frame may be out
            raise

    def _send_cancel(self, request_id: int) -> None:
        """A lost connection stops it, too; after an eviction the cancel is sent with its request."""
        if self._failure is None and (data := self._connection.send_cancel(request_id)):
            self._send(data)

    def _first_owed(self) -> tuple[float, int]:
        """The time of the next request to send again (infinity if there is none), and its id."""
        owed = ((request.owed_at, request_id) for request_id, request in tuple(self._unanswered.items()))
        return min(owed, default=(math.inf, 0))

    def _send_owed(self) -> None:
        """Send again the requests that are due."""
        while self._failure is None and (owed := self._first_owed())[0] <= time.monotonic():
            if (request := self._unanswered.get(owed[1])) is not None:  # else a signal handler gave it up just now
                self._send_again(owed[1], request)

    def _send_again(self, request_id: int, request: Unanswered) -> None:
        data = self._connection.send_again(request_id, request.call.verb.name, request.call.params)
        if request.is_cancelled:
            data += self._connection.send_cancel(request_id)
        try:
            self._send(data)
            request.owed_at = math.inf
        except BaseException:
            self.lost("sending was interrupted")  # it may be out, so it is not sent again
            raise

    # --- connections

    async def _require_open(self) -> None:
        """Wait for a greeted connection, and make one after an eviction. Raises ApiError: the connection has ended."""
        if self._failure is not None or self._connection.hello is None:
            async with self._transport.one_at_a_time:
                await self._renew()
        if isinstance(self._failure, ClientClosed):
            raise self._failure
        if self._failure is not None:
            raise ConnectionLost(
                f"This client's connection has ended: {self._failure.message} Make a new client.",
                cause=self._failure.code,
            ) from self._failure
        if not self._has_begun:
            raise _not_connected()

    @property
    def _is_evicted(self) -> bool:
        """Whether another connection may be made in place of this one."""
        return is_eviction(self._failure) and self._evictions < MOST_REPEATS

    async def _renew(self) -> None:
        """After an eviction, connect again and send the unanswered requests."""
        while self._is_evicted:
            evicted = self._failure
            for request in self._unanswered.values():
                request.owed_at = time.monotonic()
            if self._evictions:
                await self._transport.sleep(pause_s(self._evictions - 1))
            try:
                await self._open()
            except BaseException:
                if not isinstance(self._failure, ClientClosed):
                    self._failure = evicted
                raise
            self._evictions += 1
            self._send_owed()  # the loop goes on if it was evicted again

    async def _open(self) -> None:
        """Connect and be greeted; try again for a while if many clients do so at once."""
        path = require_path_fits(self.socket_path)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        refused: ApiError | None = None
        for between_s in pauses():
            connected = _connected(path)
            if connected is not None:
                refused = await self._refusal_on(connected, deadline)
                if refused is None:
                    return
            if time.monotonic() > deadline:
                break
            await self._transport.sleep(between_s)
        raise refused or DaemonUnreachable(
            f"A daemon listens on {path}, and for {CONNECT_TIMEOUT_S:g} s more clients have waited than it lets"
            " wait. Try again.",
            path=path,
        )

    async def _refusal_on(self, connected: socket.socket, deadline: float) -> ApiError | None:
        """Wait for the daemon's greeting. Returns its refusal if too many are connected; None: it has greeted."""
        if isinstance(self._failure, ClientClosed):  # by another task
            connected.close()
            raise self._failure
        self._connection = connection = self._connection.renewed()
        self._failure = None
        self._arrived.clear()
        try:
            self.peer_pid = peer_pid(connected)
            await self._transport.open(connected, self)
            self._send(connection.send_hello())
            while connection.hello is None and self._failure is None:
                if time.monotonic() >= deadline:
                    raise DaemonUnreachable(
                        f"A process listens on {self.socket_path} and did not greet within {CONNECT_TIMEOUT_S:g} s."
                        " Is it a Torpor daemon, and is it alive?",
                        path=str(self.socket_path),
                    )
                await self._wait(self._greeting, deadline)
        except BaseException:
            self._transport.close()
            raise
        failure: ApiError | None = self._failure  # news, which a type checker cannot see
        if failure is not None and not is_crowded(failure):
            raise failure
        return failure


def _connected(path: str) -> socket.socket | None:
    """As `try_to_connect`. Raises DaemonUnreachable."""
    try:
        return try_to_connect(path)
    except OSError as error:
        raise unreachable(path, error) from error


def unreachable(path: str, error: OSError) -> DaemonUnreachable:
    """The error of a connection that could not be made."""
    absent = error.errno in (errno.ENOENT, errno.ECONNREFUSED)
    advice = f"Start a daemon with `{start_command(path)}`."
    if not absent:
        advice = "Only the user who runs a daemon may use its socket: work as that one, or name your own (--socket)."
    return DaemonUnreachable(f"No daemon answers on {path} ({error.strerror or error}). {advice}", path=path)


def start_command(path: str | os.PathLike[str]) -> str:
    """The command that starts a daemon there; it names the socket unless that is the default."""
    absolute = os.path.abspath(path)
    is_default = absolute == os.path.abspath(default_socket_path())
    return "torpor ensure" if is_default else f"torpor ensure --socket {shlex.quote(absolute)}"


def _silent(timeout_s: float | None) -> RequestTimeout:
    """The error of a request without a message for so long."""
    return RequestTimeout(
        f"The daemon was silent for {timeout_s:g} s. The request is cancelled; look at the session with show before"
        " asking again, or make the client with a longer timeout_s.",
        timeout_s=timeout_s,
    )


def _not_connected() -> LocalProtocolError:
    return LocalProtocolError("This client is not connected. Use it with: async with AsyncClient() as torpor")
