"""The messages still to send on one connection: bounded, and written at the pace of the client.

Owns the queue, the two bounds and the stall deadline (threat 44). Does not know what the frames say.

Rules: events come from a running generation that cannot wait, so too many of them drop the client. Results can wait:
`wait_for_room` holds them back, unencoded. The daemon's events can wait too: they have a queue of their own that may
lose some (`wait_for_quiet`). A client that takes no byte for `stall_timeout_s` is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..limits import ServerLimits

_CHUNK_BYTES = 256 * 1024  # the deadline holds for each chunk, so a large frame needs no longer one


class ClientStalled(Exception):
    """The client does not read its answers. Never leaves the server."""


class Outbox:
    """A queue of frames and the task that empties it (`run`)."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._frames: deque[tuple[bytes, bool]] = deque()
        self._event_bytes = 0
        self._reply_bytes = 0
        self._finished = False
        self._work = asyncio.Event()
        self._room = asyncio.Event()

    def put_event(self, frame: bytes) -> None:
        """Queue an event. Raises ClientStalled: too much waits already; the frame is not queued."""
        if self._finished:
            return
        if self._event_bytes + len(frame) > self._limits.max_waiting_event_bytes:
            raise ClientStalled(f"{self._event_bytes} bytes of events wait for the client")
        self._event_bytes += len(frame)
        self._put(frame, is_event=True)

    def put_reply(self, frame: bytes) -> None:
        """Queue any other message; a caller that can wait calls `wait_for_room` first."""
        if self._finished:
            return
        self._reply_bytes += len(frame)
        self._put(frame, is_event=False)

    async def wait_for_room(self) -> None:
        """Wait until fewer bytes of replies wait than the bound."""
        while self._reply_bytes >= self._limits.max_waiting_reply_bytes and not self._finished:
            self._room.clear()
            await self._room.wait()

    async def wait_for_quiet(self) -> None:
        """Wait until few events wait: an endless subscription leaves the room to generations."""
        while self._event_bytes >= self._limits.max_waiting_notice_bytes and not self._finished:
            self._room.clear()
            await self._room.wait()

    def finish(self) -> None:
        """Ignore further frames; `run` returns when the last is written."""
        self._finished = True
        self._work.set()
        self._room.set()

    async def run(self, writer: asyncio.StreamWriter) -> None:
        """Write until finished.

        Raises:
            ClientStalled: the client took nothing for too long.
            OSError: the client is gone.
        """
        while True:
            while self._frames:
                await self._write(writer, *self._frames.popleft())
            if self._finished:
                return
            self._work.clear()
            await self._work.wait()

    async def _write(self, writer: asyncio.StreamWriter, frame: bytes, is_event: bool) -> None:
        view = memoryview(frame)
        for start in range(0, len(frame), _CHUNK_BYTES):
            writer.write(view[start : start + _CHUNK_BYTES])
            try:
                async with asyncio.timeout(self._limits.stall_timeout_s):
                    await writer.drain()
            except TimeoutError:
                raise ClientStalled("the client takes no bytes") from None
        if is_event:
            self._event_bytes -= len(frame)
        else:
            self._reply_bytes -= len(frame)
        self._room.set()

    def _put(self, frame: bytes, *, is_event: bool) -> None:
        self._frames.append((frame, is_event))
        self._work.set()
