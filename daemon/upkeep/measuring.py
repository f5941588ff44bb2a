"""What the store holds in the four coins, counted now and then for `status` and `/metrics`, and when it is asked for:
each count reads all manifests and the directories of all packs. Nobody asks, nothing is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable
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


Steps = Generator[None, None, UsageReport]


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
        self._begun: Steps | None = None  # a count that was interrupted
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
                self._report = await self._thread.order(self._store.usage)
                self._good_until = time.monotonic() + SHARE * (time.monotonic() - begun)
            return self._report

    def due(self) -> Iterable[tuple[None, float]]:
        return [] if self._due_at is None else [(None, self._due_at)]

    async def piece(self, _: None) -> float:
        steps, self._begun = self._begun or self._store.usage_in_steps(), None
        async with self._thread.piece():
            begun = time.monotonic()
            counted = await self._thread.run(partial(_gone_on, steps, self._thread.must_stop))
        if counted is None:
            self._begun, self._due_at = steps, time.monotonic() + WAIT_S
        else:
            self._report, self._due_at, self._not_before = counted, None, time.monotonic() + EVERY_S
        return time.monotonic() - begun


def _gone_on(steps: Steps, must_stop: Callable[[], bool]) -> UsageReport | None:
    """The report of a count, which goes on at its next step; None if it has to stop before its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report: UsageReport = end.value
            return report
        if must_stop():
            return None
        time.sleep(0)  # other threads have the interpreter


def _coins_in(report: UsageReport) -> StoreCoins:
    return StoreCoins(**{each.name: getattr(report, each.name) for each in fields(StoreCoins)})
