"""What nobody named and nobody came back to within ten minutes costs its ledger on the disk, and no keys and values.

It stays in memory while there is room. So a question that goes on later costs nothing while it is awake; behind that it
is read again.
"""

from __future__ import annotations

import time
from typing import ClassVar, Final

from ...memvid.uri import SessionUri
from ..residency.awake import AwakeSessions
from ..residency.idle_sleeps import IdleSleeps
from .loop import RecurringJob, Upkeep

QUIET_S: Final = 600.0
"""For so long a client may come back to its first question, also behind a crash or a stop, at no more cost than to
another session."""


class SingleQuestions(RecurringJob[SessionUri | None]):
    """Makes the ledgers of single questions durable, one after the other. What of one was written behind goes then, as
    any stand-in does (`retaining.py`).
    """

    name: ClassVar = "single questions"

    def __init__(self, upkeep: Upkeep, awake: AwakeSessions, sleeps: IdleSleeps) -> None:
        self._awake = awake
        self._sleeps = sleeps
        super().__init__(upkeep)

    def uses(self) -> dict[SessionUri | None, tuple[float, float]]:
        single = [live for live in self._awake.values() if live.dirty and live.is_single_question]
        uses: dict[SessionUri | None, tuple[float, float]] = {
            live.uri: (live.stay.last_used, QUIET_S) for live in single
        }
        return uses | {None: (time.monotonic(), QUIET_S)}  # one that is asked from now on is due no earlier

    async def look_at(self, uri: SessionUri | None) -> None:
        if uri is not None:
            await self._sleeps.keep_ledger(uri)
