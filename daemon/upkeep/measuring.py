"""What the store holds in the four coins, counted now and then for `status` and `/metrics`: each count reads all
manifests and the directories of all packs. Nobody asks, nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar, Final

from ...memvid.disk.clock import now_ns
from ...memvid.store import Store
from ..api.process import StoreCoins
from .loop import Job, Upkeep

WAIT_S: Final = 5.0
"""From the question to the count: many ask once, at a start, and do not ask again."""

EVERY_S: Final = 600.0
"""The shortest time between two counts."""


class _Stopped(Exception):
    pass


class Measuring(Job[None]):
    """Counts the store for who asks for its coins."""

    name: ClassVar = "measure"

    def __init__(self, upkeep: Upkeep, store: Store) -> None:
        self._store = store
        self._coins: StoreCoins | None = None
        self._due_at: float | None = None
        self._not_before = 0.0
        super().__init__(upkeep)

    def coins(self) -> StoreCoins | None:
        """The last count; None before the first one. Has the next one made."""
        if self._due_at is None:
            self._due_at = max(time.monotonic() + WAIT_S, self._not_before)
            self.look_again()
        return self._coins

    def due(self) -> Iterable[tuple[None, float]]:
        return [] if self._due_at is None else [(None, self._due_at)]

    async def piece(self, _: None) -> float:
        async with self._thread.piece():
            begun = time.monotonic()
            counted = await self._thread.run(self._count)
        if counted is None:
            self._due_at = time.monotonic() + WAIT_S
        else:
            self._coins, self._due_at, self._not_before = counted, None, time.monotonic() + EVERY_S
        return time.monotonic() - begun

    def _count(self) -> StoreCoins | None:
        """A count; None if something else has to go first."""
        try:
            found = self._store.usage(at_each_file=self._go_on)
        except _Stopped:
            return None
        return StoreCoins(
            logical_bytes=found.logical_bytes,
            stored_bytes=found.stored_bytes,
            shared_bytes=found.shared_bytes,
            alone_bytes=found.alone_bytes,
            rest_bytes=found.rest_bytes,
            counted_ns=now_ns(),
        )

    def _go_on(self) -> None:
        """Between two files: let other threads have the interpreter."""
        time.sleep(0)
        if self._thread.must_stop():
            raise _Stopped
