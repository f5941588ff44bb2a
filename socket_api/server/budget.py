"""A bound on the bytes of all requests: a request that would exceed it waits (threat 44).

`served.py` takes a frame's bytes as they come, and gives them back when its request is answered.

Announced bytes do not count, so a client that announces much and sends little takes no room from others. Incomplete
frames leave room for one frame of the largest size. The first that needs this room has it until it is whole, so
incomplete frames cannot block each other for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection


class Held:
    """The bytes that one frame has taken: more with each piece that comes."""

    __slots__ = ("size_bytes",)

    def __init__(self) -> None:
        self.size_bytes = 0


class RequestBudget:
    """Bytes to take and to give back, first come first served. largest_bytes: of one frame."""

    def __init__(self, limit_bytes: int, *, largest_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._for_halves_bytes = limit_bytes - largest_bytes
        self._coming: set[Held] = set()  # incomplete frames
        self._last_room: Held | None = None  # the frame with the room that incomplete frames leave
        self._waiting: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @property
    def is_short(self) -> bool:
        """Whether a frame waits for room."""
        return bool(self._waiting)

    async def take(self, held: Held, size_bytes: int) -> None:
        """Wait for room for more bytes of a frame. A frame above the limit counts as the limit."""
        self._coming.add(held)
        wanted = min(size_bytes, self._limit_bytes - held.size_bytes)
        if self._may_take(held, wanted, before=self._waiting):
            self._give(held, wanted)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((held, wanted, granted))
        try:
            await granted
        except asyncio.CancelledError:
            self._waiting = deque(each for each in self._waiting if each[2] is not granted)
            self._grant()  # those behind it may fit
            raise

    def complete(self, held: Held) -> None:
        """Note that a frame is whole."""
        self._leave(held)
        self._grant()

    def give_back(self, held: Held, *, but_bytes: int = 0) -> None:
        """Return what a frame holds. but_bytes: of that, what is still needed of it."""
        self._leave(held)
        kept = min(but_bytes, held.size_bytes)
        self.used_bytes -= held.size_bytes - kept
        held.size_bytes = kept
        self._grant()

    def _leave(self, held: Held) -> None:
        self._coming.discard(held)
        if self._last_room is held:
            self._last_room = None

    def _may_take(self, held: Held, wanted: int, *, before: Collection[object]) -> bool:
        """Whether there is room, and no frame waits before it. The frame with the last room need not wait its turn."""
        if self.used_bytes + wanted > self._limit_bytes:
            return False
        if before or self._last_room is held:
            return self._last_room is held
        if sum(each.size_bytes for each in self._coming) + wanted > self._for_halves_bytes:
            if self._last_room is not None:
                return False
            self._last_room = held
        return True

    def _give(self, held: Held, wanted: int) -> None:
        held.size_bytes += wanted
        self.used_bytes += wanted

    def _grant(self) -> None:
        """Give room to waiting frames, in their order."""
        left: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        for held, wanted, granted in self._waiting:
            if self._may_take(held, wanted, before=left):
                self._give(held, wanted)
                granted.set_result(None)
            else:
                left.append((held, wanted, granted))
        self._waiting = left
