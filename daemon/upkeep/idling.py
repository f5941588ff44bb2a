"""Sessions that were not used for a while are put to sleep."""

from __future__ import annotations

import time
from typing import ClassVar

from ...memvid.uri import SessionUri
from ..options.current import CurrentOptions
from ..residency.awake import AwakeSessions
from ..residency.idle_sleeps import IdleSleeps
from .loop import RecurringJob, Upkeep


class Idling(RecurringJob[SessionUri | None]):
    """Puts one session after the other to sleep, the longest idle first, after the seconds without use that an option
    says. One that a request uses then, or a client wants awake, comes again after the same time.
    """

    name: ClassVar = "idle sleep"

    def __init__(self, upkeep: Upkeep, awake: AwakeSessions, sleeps: IdleSleeps, options: CurrentOptions) -> None:
        self._awake = awake
        self._sleeps = sleeps
        self._options = options
        super().__init__(upkeep)

    def uses(self) -> dict[SessionUri | None, tuple[float, float]]:
        idle_s = self._options.now.idle_sleep
        if idle_s is None:
            return {}
        uses: dict[SessionUri | None, tuple[float, float]] = {
            live.uri: (live.stay.last_used, idle_s) for live in self._awake.values() if live.state.tokens
        }
        return uses | {None: (time.monotonic(), idle_s)}  # one that wakes from now on is due no earlier

    async def look_at(self, uri: SessionUri | None) -> None:
        if uri is not None:
            await self._sleeps.put_away_idle(uri)
