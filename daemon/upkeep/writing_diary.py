"""Writes the store's diary, some seconds behind what it tells of: no request waits for it, and it is not flushed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar, Final

from ...memvid.store import Store
from .loop import Job, Upkeep

BEHIND_S: Final = 5.0
"""So much of it a kill of the daemon costs."""


class WritingDiary(Job[None]):
    """Appends what requests have cost."""

    name: ClassVar = "diary"

    def __init__(self, upkeep: Upkeep, disk: Store) -> None:
        self._disk = disk
        self._due: float | None = None
        super().__init__(upkeep)

    def note(self) -> None:
        """There is something to write."""
        if self._due is None:
            self._due = time.monotonic() + BEHIND_S
            self.look_again()

    def due(self) -> Iterable[tuple[None, float]]:
        return () if self._due is None else ((None, self._due),)

    async def piece(self, _: None) -> None:
        self._due = None
        try:
            async with self._thread.piece():
                await self._thread.run(self._disk.write_diary)
        finally:
            if self._disk.diary.has_unwritten:  # deletes are not let go where a write fails
                self._due = time.monotonic() + BEHIND_S
