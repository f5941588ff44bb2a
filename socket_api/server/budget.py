"""A bound on the bytes of requests held at once: requests that would exceed it wait (threat 44).

Owns the count and the queue. Does not know what is held: `served.py` takes a frame's bytes as they come and gives them
back when its request has been answered.

Announced bytes do not count, so a client that announces much and sends little takes no room from others. Incomplete
frames leave room for one frame of the largest size: the first that needs this room has it until it is whole, so that
incomplete frames cannot block each other for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection


class Held:
    """What one frame has taken of a budget: more with each piece that comes."""

    __slots__ = ("size_bytes",)

    def __init__(self) -> None:
        self.size_bytes = 0


class RequestBudget:
    """Bytes to take and to give back, first come first served. largest_bytes: of one frame."""

    def __init__(self, limit_bytes: int, *, largest_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._for_halves_bytes = limit_bytes - largest_bytes
        self._coming: set[Held] = set()  # frames that have come in part
        self._last_room: Held | None = None  # whose the room is that halves leave
        self._waiting: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @property
    def is_short(self) -> bool:
        """Whether anybody waits for room."""
        return bool(self._waiting)

    async def take(self, held: Held, size_bytes: int) -> None:
        """Wait until there is room for so many bytes more of a frame. One larger than all there is counts as all."""
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
        """All of a frame has come: what it holds is given back as soon as its request is answered."""
        self._leave(held)
        self._grant()

    def give_back(self, held: Held) -> None:
        """Return all that a frame holds."""
        self._leave(held)
        self.used_bytes -= held.size_bytes
        held.size_bytes = 0
        self._grant()

    def _leave(self, held: Held) -> None:
        self._coming.discard(held)
        if self._last_room is held:
            self._last_room = None

    def _may_take(self, held: Held, wanted: int, *, before: Collection[object]) -> bool:
        """Whether there is room, and none before it that waits. Who has the last room need not wait for its turn."""
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
        """Give to those that wait, in their order, as far as there is room."""
        left: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        for held, wanted, granted in self._waiting:
            if self._may_take(held, wanted, before=left):
                self._give(held, wanted)
                granted.set_result(None)
            else:
                left.append((held, wanted, granted))
        self._waiting = left
