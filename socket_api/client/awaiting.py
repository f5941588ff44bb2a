"""The transport of the asynchronous client: a stream of an event loop, and the task that reads it.

A message is given to the link as it arrives, whether or not somebody waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable

from ..wire.peer import has_left
from .reaching import Inbox
from .transport import READ_BYTES, Receiver, Transport


class AwaitingTransport(Transport):
    """It belongs to the loop on which it was opened."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self.one_at_a_time = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.StreamReader | None = None  # None once the connection was given up
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, connected: socket.socket, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=connected)
        except BaseException:
            connected.close()
            raise
        self._reading = asyncio.create_task(self._read(self._reader, receiver))

    def close(self) -> None:
        self._reader = None
        if self._writer is not None:
            self._writer.transport.abort()

    async def closed(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, receiver: Receiver) -> None:
        reason = "reading it stopped"  # for any other error: no task may wait forever
        try:
            while data := await reader.read(READ_BYTES):
                if reader is not self._reader:
                    return
                receiver.received(data)
            if reader is self._reader:
                receiver.received(b"")
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            if reader is self._reader:
                receiver.lost(reason)

    def write(self, data: bytes) -> None:
        assert self._writer is not None, "only a connected client gets here"
        if not has_left(self._writer.get_extra_info("socket")):  # else a failed write would hide the daemon's reason
            self._writer.write(data)  # queued whole, so a cancelled task never leaves half a frame

    async def flush(self) -> None:
        assert self._writer is not None, "only a connected client gets here"
        with contextlib.suppress(OSError):  # reading gives the reason: a daemon sends it before it hangs up
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()

    async def wait(self, inbox: Inbox, until: float, arrived: list[bytes]) -> None:
        news = inbox.news = inbox.news or asyncio.Event()
        news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
                await news.wait()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def alone(self) -> contextlib.nullcontext[None]:
        """Its tasks share one thread."""
        return contextlib.nullcontext()

    def later(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(action)
