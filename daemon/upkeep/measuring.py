"""What the store holds in the four coins, counted now and then for `status` and `/metrics`, and when it is asked for:
each count reads all manifests and the directories of all packs. Nobody asks, nothing is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from typing import ClassVar, Final

from ...memvid.answers import UsageReport
from ...memvid.store import Store
from ..api.process import StoreCoins
from .loop import Job, Upkeep

WAIT_S: Final = 5.0
"""From the question to the count: many ask once, at a start, and do not ask again."""

EVERY_S: Final = 600.0
"""The shortest time between two counts that nobody waits for."""

SHARE: Final = 20
"""A count that is asked for is good for as long as so many counts take."""


class _Stopped(Exception):
    pass


class Measuring(Job[None]):
    """Counts the store for who asks for its coins."""

    name: ClassVar = "measure"

    def __init__(self, upkeep: Upkeep, store: Store) -> None:
        self._store = store
        self._report: UsageReport | None = None
        self._good_until = 0.0
        self._counting = asyncio.Lock()
        self._due_at: float | None = None
        self._not_before = 0.0
        super().__init__(upkeep)

    def coins(self) -> StoreCoins | None:
        """The last count; None before the first one. Has the next one made."""
        if self._due_at is None:
            self._due_at = max(time.monotonic() + WAIT_S, self._not_before)
            self.look_again()
        return None if self._report is None else _coins_in(self._report)

    async def report(self) -> UsageReport:
        """The usage of the store, counted now, or a moment ago. Raises ServiceClosed and the errors of a count."""
        async with self._counting:
            if self._report is None or time.monotonic() >= self._good_until:
                begun = time.monotonic()
                self._report = await self._thread.order(partial(self._store.usage, at_each_file=_yield))
                self._good_until = time.monotonic() + SHARE * (time.monotonic() - begun)
            return self._report

    def due(self) -> Iterable[tuple[None, float]]:
        return [] if self._due_at is None else [(None, self._due_at)]

    async def piece(self, _: None) -> float:
        async with self._thread.piece():
            begun = time.monotonic()
            counted = await self._thread.run(self._count)
        if counted is None:
            self._due_at = time.monotonic() + WAIT_S
        else:
            self._report, self._due_at, self._not_before = counted, None, time.monotonic() + EVERY_S
        return time.monotonic() - begun

    def _count(self) -> UsageReport | None:
        """A count; None if something else has to go first."""
        try:
            return self._store.usage(at_each_file=self._go_on)
        except _Stopped:
            return None

    def _go_on(self) -> None:
        _yield()
        if self._thread.must_stop():
            raise _Stopped


def _yield() -> None:
    """Between two files: let other threads have the interpreter."""
    time.sleep(0)


def _coins_in(report: UsageReport) -> StoreCoins:
    return StoreCoins(**{each.name: getattr(report, each.name) for each in fields(StoreCoins)})
