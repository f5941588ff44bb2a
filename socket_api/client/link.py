"""The blocking shell around the protocol core: one connection of the synchronous client.

Owns the socket and an inbox for each request in flight. Does not know the verbs (`client.py`).

Rules: a request that the daemon has begun is never sent twice. The first failure ends the connection, and later calls
name it as their cause. There are two exceptions, and in both the daemon has begun nothing. After an eviction the next
use connects again and sends the unanswered requests. A request refused on a reserve connection is sent again after a
pause; answers to others are read meanwhile. Requests to send again are noted first, so an interrupt loses none: the
next wait sends them.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import (
    ApiError,
    ClientBusy,
    ClientClosed,
    ConnectionLost,
    DaemonUnreachable,
    InvalidRequest,
    ProtocolError,
    RemoteError,
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

DEFAULT_TIMEOUT_S = 600.0
"""The longest silence: long work reports progress, so this is for a daemon that hangs or a long queue."""

MAX_TIMEOUT_S = 31_536_000
"""A year. Python refuses more than its system's timers take, with an error of another kind."""

_READ_BYTES = 256 * 1024


def require_timeout(timeout_s: float | None) -> None:
    """Refuse a timeout of zero, less, NaN, or more than a system's timer takes. Raises InvalidRequest: with the field
    `timeout_s`."""
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {timeout_s!r}. Give seconds above 0 up to {MAX_TIMEOUT_S:,}, or None to wait forever.",
            field="timeout_s",
        )


class Link:
    """A greeted connection. timeout_s: the longest silence about one request. Raises as `Client`."""

    def __init__(self, socket_path: Path, *, timeout_s: float | None) -> None:
        require_timeout(timeout_s)
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._connection = ClientConnection(client_name="torpor-python")
        self._inboxes: dict[int, Inbox] = {}
        self._unanswered: dict[int, Unanswered] = {}
        self._evictions = 0  # since a request was last answered
        self._failure: ApiError | None = None
        self._users = threading.RLock()  # a signal handler may cancel while its own thread waits
        self._depth = 0
        self._dropped: deque[int] = deque()
        self._open()

    @property
    def hello(self) -> HelloReply:
        """The daemon's greeting."""
        assert self._connection.hello is not None, "the constructor waits for it"
        return self._connection.hello

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._failure = ClientClosed("This client was closed. Make a new one.")
        self._inboxes.clear()
        self._socket.close()

    def begin(self, call: Call[Any]) -> int:
        """Send a request, and return its id."""
        with self._alone():
            self._require_open()
            request_id, data = self._connection.send_request(call.verb.name, call.params)
            self._inboxes[request_id] = Inbox()
            self._unanswered[request_id] = Unanswered(call)
            try:
                self._send_or_renew(data)
            except BaseException:
                self._abandon(request_id)  # the caller gets no id to abandon, so no renewal may send it
                raise
            return request_id

    def _send_or_renew(self, data: bytes) -> None:
        try:
            self._send(data)
        except RemoteError:
            self._require_open()  # after an eviction this sends it again

    def cancel(self, request_id: int) -> None:
        """Ask the daemon to stop a request; its answer still comes."""
        with self._alone():
            if request_id in self._unanswered:
                self._unanswered[request_id].is_cancelled = True
            if self._failure is None:
                self._send_cancel(request_id)

    def _send_cancel(self, request_id: int) -> None:
        try:
            self._send(self._connection.send_cancel(request_id))
        except RemoteError as error:
            if not is_eviction(error):  # else it is sent with its request
                raise

    def abandon(self, request_id: int) -> None:
        """Forget a request; if it is still in flight, ask the daemon to stop it. Late messages are dropped."""
        with self._alone():
            self._abandon(request_id)

    def _abandon(self, request_id: int) -> None:
        self._unanswered.pop(request_id, None)
        if self._inboxes.pop(request_id, None) is not None and self._failure is None:
            with contextlib.suppress(ApiError):  # a lost connection stops it, too
                self._send(self._connection.send_cancel(request_id))

    def drop(self, request_id: int) -> None:
        """As `abandon`, from a finaliser: in any thread and at any point, so it only leaves a note. The request is
        cancelled here if the client is not in use, else at its next use."""
        self._dropped.append(request_id)
        with contextlib.suppress(ApiError), self._alone():
            pass

    def wait_for(self, request_id: int, *, silence_is_fine: bool = False) -> ServerMessage:
        """Return the next message about a request. Raises ApiError if there will be none.

        silence_is_fine: wait without a timeout, until a message comes or the connection ends.
        """
        with self._alone():
            return self._wait_for(request_id, None if silence_is_fine else self._timeout_s)

    def _wait_for(self, request_id: int, timeout_s: float | None) -> ServerMessage:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        inbox = self._inboxes.get(request_id)
        while not inbox:
            self._require_open()
            assert inbox is not None, "an open client keeps the inbox of a request that is waited for"
            try:
                self._send_owed()
                self._read(min(deadline, self._first_owed()[0]))
            except ApiError:
                if not inbox and not is_eviction(
                    self._failure
                ):  # an answer may come just before the end, as after a shutdown
                    raise
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                raise silent(self._timeout_s) from None
        return inbox.take()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread: two would take each other's answers, and wait forever for their own."""
        if not self._users.acquire(blocking=False):
            raise ClientBusy("Another thread uses this client now. Make a client for each thread; they are cheap.")
        self._depth += 1
        try:
            while self._dropped and self._depth == 1:  # deeper in, a frame may be half sent
                self._abandon(self._dropped.popleft())
            yield
        finally:
            self._depth -= 1
            self._users.release()

    # --- the socket

    def _open(self) -> None:
        """Connect and be greeted; try again for a while if many clients do so at once."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        between = pauses()
        while True:
            self._connection = self._connection.renewed()
            self._socket = _connect(self.socket_path, deadline)
            self._failure = None
            try:
                self.peer_pid = peer_pid(self._socket)
                self._greet(deadline)
                return
            except BaseException as error:
                self._socket.close()
                if not is_crowded(error) or time.monotonic() > deadline:
                    raise
            time.sleep(next(between))

    def _renew(self) -> None:
        """After an eviction, connect again and send the unanswered requests."""
        while is_eviction(self._failure):
            self._evictions += 1
            if self._evictions > MOST_REPEATS:
                return
            evicted = self._failure
            for request in self._unanswered.values():
                request.owed_at = time.monotonic()
            if self._evictions > 1:
                time.sleep(pause_s(self._evictions - 2))
            try:
                self._open()
            except BaseException:
                self._failure = evicted
                raise
            with contextlib.suppress(RemoteError):  # the loop goes on if it was evicted again
                self._send_owed()

    def _first_owed(self) -> tuple[float, int]:
        """The time of the next request to send again (infinity if there is none), and its id."""
        owed = ((request.owed_at, request_id) for request_id, request in tuple(self._unanswered.items()))
        return min(owed, default=(math.inf, 0))

    def _send_owed(self) -> None:
        """Send again the requests that are due."""
        while (owed := self._first_owed())[0] <= time.monotonic():
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
            self._lose(connection_lost("sending was interrupted"))  # it may be out, so it is not sent again
            raise

    def _greet(self, deadline: float) -> None:
        self._send(self._connection.send_hello())
        while self._connection.hello is None:
            try:
                self._read(deadline)
            except TimeoutError:
                raise DaemonUnreachable(
                    f"A process listens on {self.socket_path} and did not greet within {CONNECT_TIMEOUT_S:g} s."
                    " Is it a Torpor daemon, and is it alive?",
                    path=str(self.socket_path),
                ) from None

    def _read(self, deadline: float) -> None:
        """Wait for at least a byte, and put received messages into their inboxes. Raises TimeoutError."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(None if left_s == math.inf else left_s)
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._lose(connection_lost(error.strerror or str(error))) from error
        try:
            if not data:
                self._connection.require_clean_end()
                raise self._lose(connection_lost("the daemon closed it"))
            self._connection.feed(data)
            self._sort_messages()
        except ProtocolError as error:
            self._lose(error)
            raise
        except KeyboardInterrupt:
            self._lose(connection_lost("reading was interrupted"))  # a message may be gone that a request waits for
            raise

    def _sort_messages(self) -> None:
        while (message := self._connection.next_message()) is not None:
            if isinstance(message, HelloReply):
                continue
            if message.id is None:
                raise self._lose(remote_error(message.error))
            request = self._unanswered.get(message.id)
            if request is not None and request.is_put_off_by(message):
                request.owed_at = time.monotonic() + pause_s(request.refusals - 1)
                continue
            self._evictions = 0
            if not isinstance(message, EventMessage):
                self._unanswered.pop(message.id, None)
            if message.id in self._inboxes:
                self._inboxes[message.id].put(message)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            self._read_farewell()
            raise self._lose(connection_lost(error.strerror or str(error))) from error
        except BaseException:
            self._lose(connection_lost("sending was interrupted"))  # half a frame may be out
            raise

    def _read_farewell(self) -> None:
        """Read the reason for a hang-up: the daemon's last frame may wait behind our failed write."""
        try:
            while self._failure is None:
                self._read(time.monotonic() + 1.0)
        except RemoteError:
            raise
        except (ApiError, TimeoutError):
            return

    def _lose(self, failure: ApiError) -> ApiError:
        """Give the connection up; the first reason is kept for later calls."""
        if self._failure is None:
            self._failure = failure
            self._socket.close()
        return failure

    def _require_open(self) -> None:
        self._renew()
        if self._failure is None:
            return
        if isinstance(self._failure, ClientClosed):
            raise self._failure
        raise has_ended(self._failure) from self._failure


def _connect(path: Path, deadline: float) -> socket.socket:
    absolute = require_path_fits(path)
    for between_s in pauses():
        try:
            connected = try_to_connect(absolute)
        except OSError as error:
            raise unreachable(absolute, error) from error
        if connected is not None:
            return connected
        if time.monotonic() > deadline:
            break
        time.sleep(between_s)
    raise DaemonUnreachable(
        f"A daemon listens on {absolute}, and for {CONNECT_TIMEOUT_S:g} s more clients have waited than it lets"
        " wait. Try again.",
        path=absolute,
    )


def unreachable(path: str, error: OSError) -> DaemonUnreachable:
    """The error of a connection that could not be made."""
    absent = error.errno in (errno.ENOENT, errno.ECONNREFUSED)
    advice = f"Start a daemon with `{start_command(path)}`." if absent else "Check who may use the socket."
    return DaemonUnreachable(f"No daemon answers on {path} ({error.strerror or error}). {advice}", path=path)


def start_command(path: str | os.PathLike[str]) -> str:
    """The command that starts a daemon there; it names the socket unless that is the default."""
    absolute = os.path.abspath(path)
    is_default = absolute == os.path.abspath(default_socket_path())
    return "torpor ensure" if is_default else f"torpor ensure --socket {shlex.quote(absolute)}"


def silent(timeout_s: float | None) -> RequestTimeout:
    """The error of a request without a message for so long."""
    return RequestTimeout(
        f"The daemon was silent for {timeout_s:g} s. The request is cancelled; look at the session with show before"
        " asking again, or make the client with a longer timeout_s.",
        timeout_s=timeout_s,
    )


def has_ended(failure: ApiError) -> ConnectionLost:
    """The error of a call after the connection ended."""
    return ConnectionLost(
        f"This client's connection has ended: {failure.message} Make a new client.", cause=failure.code
    )


def connection_lost(reason: str) -> ConnectionLost:
    """The error of a connection that ended. It warns, so that no append is repeated blindly."""
    return ConnectionLost(
        f"The connection to the daemon ended ({reason}). Whether a request in flight was carried out is unknown:"
        " look at the session with show before asking again."
    )
