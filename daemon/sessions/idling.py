"""Finds sessions that were not used for a while, to put them to sleep."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from ...memvid.uri import SessionUri
from ..engine.rounds import Rounds
from .sessions import Session

_LOG = logging.getLogger(__name__)

Clock = Callable[[], float]


class Idling(Rounds):
    """Works on awake sessions when they are due. work: does so, unless the session is in use. What
    fails is logged, and tried again after the same time.
    """

    def __init__(
        self,
        awake: Mapping[SessionUri, Session],
        idle_s: float,
        work: Callable[[SessionUri], Awaitable[None]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._awake = awake
        self._idle_s = idle_s
        self._work = work
        self._clock = clock
        self._tried: dict[SessionUri, float] = {}
        super().__init__()

    async def _round(self) -> float:
        for uri in self._due():
            if self._closing.is_set():
                break
            self._tried[uri] = self._clock()
            try:
                await self._work(uri)
            except Exception as error:  # noqa: BLE001 - it stays awake, and the others have their turn
                _LOG.warning("nothing could be done for %s, which is idle: %s", uri, error)
        self._tried = {uri: tried for uri, tried in self._tried.items() if uri in self._awake}
        return max(0.0, self._next() - self._clock())

    def _due(self) -> list[SessionUri]:
        """The sessions that are due, the longest idle first."""
        now = self._clock()
        found = [(self._deadline(session), uri) for uri, session in self._awake.items() if session.state.tokens]
        return [uri for deadline, uri in sorted(found) if deadline <= now]

    def _next(self) -> float:
        """When the next session may be due; one that is not awake yet is due after the whole time at the earliest."""
        deadlines = [self._deadline(session) for session in self._awake.values() if session.state.tokens]
        return min(deadlines, default=self._clock() + self._idle_s)

    def _deadline(self, session: Session) -> float:
        return max(session.stay.last_used, self._tried.get(session.uri, session.stay.last_used)) + self._idle_s
