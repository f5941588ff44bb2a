"""Sessions that were not used for a while are put to sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from ...memvid.uri import SessionUri
from ..residency.residency import Residency
from ..sessions.sessions import Session
from .loop import Job, Upkeep


class Idling(Job):
    """Puts one session after the other to sleep, the longest idle first. idle_s: gives the seconds without use that
    hold now; None: never. Where it fails, that session comes again after the same time.
    """

    name: ClassVar = "idle sleep"

    def __init__(self, upkeep: Upkeep, residency: Residency, idle_s: Callable[[], float | None]) -> None:
        self._residency = residency
        self._idle_s = idle_s
        self._tried: dict[SessionUri, float] = {}
        super().__init__(upkeep)

    def due(self) -> float | None:
        """A session that is not awake yet is due after the whole time at the earliest."""
        idle_s = self._idle_s()
        if idle_s is None:
            return None
        return idle_s + min((self._since(session) for session in self._awake()), default=time.monotonic())

    async def piece(self) -> None:
        session = min(self._awake(), key=self._since, default=None)
        idle_s, now = self._idle_s(), time.monotonic()
        if session is not None and idle_s is not None and self._since(session) + idle_s <= now:
            self._tried = {uri: tried for uri, tried in self._tried.items() if uri in self._residency.awake}
            self._tried[session.uri] = now
            await self._residency.idled(session.uri)

    def _awake(self) -> list[Session]:
        return [session for session in self._residency.awake.values() if session.state.tokens]

    def _since(self, session: Session) -> float:
        return max(session.stay.last_used, self._tried.get(session.uri, session.stay.last_used))
