"""The transport of the blocking client: a socket, on which each wait blocks the calling thread.

A coroutine over it never waits for a loop, so `wait` carries it out in one go. Imports no asyncio: a command need not
wait for that.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import ClientBusy
from .link import Link
from .reaching import Inbox
from .transport import READ_BYTES, Receiver, Transport

T = TypeVar("T")

_FAREWELL_S: Final = 1.0


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Carry out a coroutine over a blocking link."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("each wait of a blocking link blocks")


def blocking_link(socket_path: Path, *, timeout_s: float | None) -> Link:
    """A greeted connection; `wait` waits for it. Raises as `Client`."""
    link = Link(socket_path, BlockingTransport(timeout_s), client_name="torpor-python", timeout_s=timeout_s)
    wait(link.connect())
    return link


class BlockingTransport(Transport):
    """It reads while something waits, and only then."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self.one_at_a_time = contextlib.nullcontext()
        self._socket: socket.socket | None = None
        self._users = threading.RLock()  # a signal handler may cancel while its own thread waits
        self._depth = 0
        self._notes: deque[Callable[[], None]] = deque()

    async def open(self, connected: socket.socket, receiver: Receiver) -> None:
        self._socket = connected

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def write(self, data: bytes) -> None:
        assert self._socket is not None, "only a connected client gets here"
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(data)

    def farewell(self) -> bytes:
        arrived: list[bytes] = []
        until = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(OSError):
            while self._read(until, arrived) and arrived[-1]:
                pass
        return b"".join(arrived)

    async def wait(self, inbox: Inbox, until: float, arrived: list[bytes]) -> None:
        self._read(until, arrived)

    def _read(self, until: float, arrived: list[bytes]) -> bool:
        """Read once. Returns whether there was anything, and be it the end, before that time."""
        assert self._socket is not None, "only a connected client gets here"
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        self._socket.settimeout(None if left_s == math.inf else left_s)
        try:
            # One call into C, within which no interrupt is raised: else an answer could be gone, and its request sent
            # again after the next eviction.
            arrived.extend(map(self._socket.recv, (READ_BYTES,)))
        except TimeoutError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Two threads would take each other's answers, and wait forever for their own."""
        if not self._users.acquire(blocking=False):
            raise ClientBusy("Another thread uses this client now. Make a client for each thread; they are cheap.")
        self._depth += 1
        try:
            while self._notes and self._depth == 1:  # deeper in, a frame may be half sent
                self._notes.popleft()()
            yield
        finally:
            self._depth -= 1
            self._users.release()

    def later(self, action: Callable[[], None]) -> None:
        """At once if the client is not in use, else at its next use."""
        self._notes.append(action)
        with contextlib.suppress(ClientBusy), self.alone():
            pass
