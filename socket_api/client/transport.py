"""How a link moves bytes and waits: what differs between the blocking client and the asynchronous one.

Owns the contract. `blocking.py` and `awaiting.py` keep it, each in its own way. Does not know frames or requests.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from .reaching import Inbox

READ_BYTES = 256 * 1024


class Receiver(Protocol):
    """The link, as a transport that reads by itself sees it."""

    def received(self, data: bytes) -> None:
        """Take bytes that arrived; none: the stream has ended."""

    def lost(self, reason: str) -> None:
        """Note that no more bytes come."""


class Transport(ABC):
    """One connection after another. timeout_s: the longest wait until sent bytes are taken."""

    one_at_a_time: AbstractAsyncContextManager[object]
    """Held by the one that makes a new connection."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    @abstractmethod
    async def open(self, connected: socket.socket, receiver: Receiver) -> None:
        """Use a connected, non-blocking socket from now on. It is closed if this fails."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection up. Nothing of it arrives any more. Idempotent."""

    async def closed(self) -> None:
        """Wait until a connection that was given up has gone."""
        return

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send bytes. Raises OSError."""

    async def flush(self) -> None:
        """Wait until the daemon has taken most of the sent bytes, or the connection or the time has ended."""
        return

    def farewell(self) -> bytes:
        """What the daemon sent before it hung up, behind a write that failed: it tells the reason."""
        return b""

    @abstractmethod
    async def wait(self, inbox: Inbox, until: float, arrived: list[bytes]) -> None:
        """Wait for bytes, for news of an inbox, or for a time (monotonic; infinity: never). Raises OSError.

        arrived: gets bytes that the receiver was not given, none at the end of the stream. An interrupt loses none.
        """

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Refuse a second thread meanwhile. Raises ClientBusy."""

    @abstractmethod
    def later(self, action: Callable[[], None]) -> None:
        """Do something soon, asked by a finaliser: in any thread, at any point, even after a loop has gone."""
        return
