"""Sessions that no request uses go to sleep, or are kept as ledgers, each in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..events.events import SleepCause
from ..memory.memory import Memory
from ..sessions.sessions import Turns
from ..tasks.cancellation import to_the_end
from ..tasks.door import Door
from ..versions.writing import Terms
from .awake import AwakeSessions
from .putting_away import PuttingAway


@dataclass(eq=False, repr=False)
class IdleSleeps:
    _putting_away: PuttingAway
    _awake: AwakeSessions
    _turns: Turns
    _memory: Memory
    _door: Door

    async def put_away(self, uri: SessionUri, cause: SleepCause) -> bool:
        """Put a session to sleep behind its running requests. False if it is no longer in memory. Raises as
        `PuttingAway.put_away_idle`."""
        try:
            async with self._turns.take(uri):
                return await to_the_end(self._putting_away.put_away_idle(uri, cause))
        finally:
            self._memory.look_again()

    async def put_all_away(self, cause: SleepCause, within_s: float) -> None:
        """Put all sessions to sleep, those in use last, behind their requests. Begins none after so many seconds. One
        that fails stays awake, as its event tells."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                in_use = self._turns.in_use()
                for uri in sorted(self._awake, key=lambda uri: uri in in_use):
                    with contextlib.suppress(Exception):
                        await self.put_away(uri, cause)

    async def put_away_idle(self, uri: SessionUri) -> None:
        """Put an idle session to sleep, unless it is used now, a client wants it awake, or the daemon stops: a stop has
        an order of its own. Raises as `put_away`."""
        live = self._awake.get(uri)
        if live is None or live.stay.awake_until > time.monotonic() or uri in self._turns.in_use():
            return
        if self._door.is_working and await self.put_away(uri, "idle"):
            self._memory.slept_by_idling += 1

    async def keep_ledger(self, uri: SessionUri) -> None:
        """Make durable the ledger alone of a session, which stays in memory, unless it is used now or the daemon stops.
        Raises as `PuttingAway.keep`."""
        if uri in self._turns.in_use() or not self._door.is_working:
            return
        async with self._turns.take(uri):
            live = self._awake.get(uri)
            if live is not None and live.is_single_question:
                await self._putting_away.keep(live, ignore, "ledger", Terms(ledger_alone=True))
