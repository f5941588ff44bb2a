"""Upkeep: work on the event loop that comes in rounds, until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod


class Rounds(ABC):
    """Does one round of its work after the other, from its construction on."""

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._closing = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    @abstractmethod
    async def _round(self) -> float | None:
        """Do a round. Gives the seconds until the next one; None: it waits for `look_again`. Raises nothing."""

    def look_again(self) -> None:
        """Begin the next round now, or behind the running one."""
        self._wanted.set()

    async def close(self) -> None:
        """Wait for the running round, and end."""
        self._closing.set()
        self._wanted.set()
        await self._task

    async def _run(self) -> None:
        while not self._closing.is_set():
            self._wanted.clear()
            seconds = await self._round()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), seconds)

    async def _rest(self, seconds: float) -> None:
        """Pause within a round; the close ends it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
