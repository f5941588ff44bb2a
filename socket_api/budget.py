"""A bound on the bytes of requests that are held at once, kept by making those wait who would pass it (threat 44).

Owns the count and the queue. Does not know what is held: `served.py` takes a frame's bytes as they come and gives them
back when its request has been answered.

What is only announced counts for nothing, so whoever announces much and sends little keeps no room from others. Frames
of which not all has come leave room for one of the largest size: the oldest of them can always be read to its end, so
that no number of halves keeps all from becoming whole.
"""

from __future__ import annotations

import asyncio
from collections import deque


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
        self._coming: dict[Held, None] = {}  # frames of which not all has come, the oldest first
        self._waiting: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @property
    def is_short(self) -> bool:
        """Whether anybody waits for room."""
        return bool(self._waiting)

    async def take(self, held: Held, size_bytes: int) -> None:
        """Wait until there is room for so many bytes more of a frame. One larger than all there is counts as all."""
        self._coming[held] = None
        wanted = min(size_bytes, self._limit_bytes - held.size_bytes)
        if self._fits(held, wanted) and (not self._waiting or self._is_oldest(held)):
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
        self._coming.pop(held, None)
        self._grant()

    def give_back(self, held: Held) -> None:
        """Return all that a frame holds."""
        self._coming.pop(held, None)
        self.used_bytes -= held.size_bytes
        held.size_bytes = 0
        self._grant()

    def _fits(self, held: Held, wanted: int) -> bool:
        if self.used_bytes + wanted > self._limit_bytes:
            return False
        coming_bytes = sum(each.size_bytes for each in self._coming)
        return self._is_oldest(held) or coming_bytes + wanted <= self._for_halves_bytes

    def _is_oldest(self, held: Held) -> bool:
        return next(iter(self._coming), None) is held

    def _give(self, held: Held, wanted: int) -> None:
        held.size_bytes += wanted
        self.used_bytes += wanted

    def _grant(self) -> None:
        """Give to those that wait, in their order, as far as they fit; the oldest frame needs no turn."""
        left: deque[tuple[Held, int, asyncio.Future[None]]] = deque()
        for held, wanted, granted in self._waiting:
            if self._fits(held, wanted) and (not left or self._is_oldest(held)):
                self._give(held, wanted)
                granted.set_result(None)
            else:
                left.append((held, wanted, granted))
        self._waiting = left
