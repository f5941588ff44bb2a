"""A bound on the bytes of requests that are held at once, kept by making those wait who would pass it (threat 44).

Owns the count and the queue. Does not know what is held: `served.py` takes a frame's bytes when its length is known,
before it is read, and gives them back when its request has been answered.
"""

from __future__ import annotations

import asyncio
from collections import deque


class RequestBudget:
    """Bytes to take and to give back, first come first served, so that small takers do not starve a large one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def take(self, size_bytes: int) -> int:
        """Wait until there is room; return what was taken, to be given back. More than there is counts as all."""
        wanted = min(size_bytes, self._limit_bytes)
        if not self._waiting and self.used_bytes + wanted <= self._limit_bytes:
            self.used_bytes += wanted
            return wanted
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(wanted)
            self._grant()  # those behind it may fit
            raise
        return wanted

    def give_back(self, size_bytes: int) -> None:
        """Return what `take` returned."""
        self.used_bytes -= size_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.done():
                if self.used_bytes + wanted > self._limit_bytes:
                    return
                self.used_bytes += wanted
                granted.set_result(None)
            self._waiting.popleft()
