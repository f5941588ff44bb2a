"""Sessions that were not used for a while are put to sleep."""

from __future__ import annotations

import time
from typing import ClassVar

from ...memvid.uri import SessionUri
from ..options.current import CurrentOptions
from ..residency.awake import AwakeSessions
from ..residency.idle_sleeps import IdleSleeps
from ..sessions.sessions import Session
from .loop import Job, Upkeep


class Idling(Job):
    """Puts one session after the other to sleep, the longest idle first, after the seconds without use that an option
    says. Where it fails, that session comes again after the same time.
    """

    name: ClassVar = "idle sleep"

    def __init__(self, upkeep: Upkeep, awake: AwakeSessions, sleeps: IdleSleeps, options: CurrentOptions) -> None:
        self._awake = awake
        self._sleeps = sleeps
        self._options = options
        self._tried: dict[SessionUri, float] = {}
        super().__init__(upkeep)

    def due(self) -> float | None:
        """A session that is not awake yet is due after the whole time at the earliest."""
        idle_s = self._options.now.idle_sleep
        if idle_s is None:
            return None
        return idle_s + min((self._since(session) for session in self._with_tokens()), default=time.monotonic())

    async def piece(self) -> None:
        session = min(self._with_tokens(), key=self._since, default=None)
        idle_s, now = self._options.now.idle_sleep, time.monotonic()
        if session is not None and idle_s is not None and self._since(session) + idle_s <= now:
            self._tried = {uri: tried for uri, tried in self._tried.items() if uri in self._awake}
            self._tried[session.uri] = now
            await self._sleeps.put_away_idle(session.uri)

    def _with_tokens(self) -> list[Session]:
        return [session for session in self._awake.values() if session.state.tokens]

    def _since(self, session: Session) -> float:
        return max(session.stay.last_used, self._tried.get(session.uri, session.stay.last_used))
