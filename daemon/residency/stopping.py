"""The last sleeps of a daemon that stops: every changed session becomes durable, whole or as a ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from ...memvid.errors import BudgetExceeded
from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..api.process import ShutdownResult
from ..errors import ServiceClosed, StopDeadline, sentence_of
from ..events.bus import code_of
from ..memory.memory import Memory
from ..sessions.sessions import Session, Turns
from ..tasks.door import LastSleep
from ..versions.writing import Terms, Versions
from .awake import AwakeSessions
from .putting_away import PuttingAway

PATIENCE_S: Final = 1.0
"""The longest wait for a session with just cancelled requests, before others with less to lose go first: most model
calls are over by then."""


@dataclass(slots=True)
class Keeping:
    """The results of a stop so far; see `ShutdownResult`. seen: the sessions that are done."""

    slept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    ledgers: dict[str, str] = field(default_factory=dict)
    seen: set[SessionUri] = field(default_factory=set)

    @classmethod
    def after(cls, report: ShutdownResult) -> Keeping:
        """Go on after a stop that may be refused: sessions kept then stay kept."""
        kept = {SessionUri.parse(uri) for uri in report.ledgers}
        return cls(slept=list(report.slept), ledgers=dict(report.ledgers), seen=kept)

    def report(self) -> ShutdownResult:
        return ShutdownResult(tuple(self.slept), dict(self.failed), tuple(self.empty), dict(self.ledgers))


@dataclass(eq=False, repr=False)
class LastSleeps:
    """Keeps all awake sessions, in an order of its own."""

    _versions: Versions
    _putting_away: PuttingAway
    _awake: AwakeSessions
    _turns: Turns
    _memory: Memory

    async def keep_all(self, order: LastSleep, keeping: Keeping, *, give_up: bool) -> None:
        """Put every changed session to sleep while no new work is taken; they all stay in memory. First the sessions
        that cost most to compute again, then those used last. A session that is held for long does not delay the
        others.

        A session without time for its sleep, or without room in a budget, is kept as a ledger. give_up: so is a session
        that cannot sleep for another reason. keeping: gets the results; its seen sessions are skipped.
        """
        self._memory.line.refuse_all(
            lambda: ServiceClosed("The daemon was told to stop, and has no memory to wait for; try again in a moment.")
        )
        patient_until = time.monotonic() + order.share(PATIENCE_S)
        # Running requests may wake sessions meanwhile: go on until every awake or held session has been seen. Requests
        # that still wait for a turn are refused when they get it.
        while uris := (self._awake.keys() | self._turns.in_use()) - keeping.seen:
            seen = len(keeping.seen)
            for uri in sorted(uris, key=self._stake):
                if self._turns.users(uri):
                    if time.monotonic() < patient_until:
                        break
                    continue
                await self._keep_free(uri, order, keeping, give_up=give_up)
                await asyncio.sleep(0)  # nothing is awaited for one that is empty
            if len(keeping.seen) == seen:
                patience_s = patient_until - time.monotonic()
                await self._turns.released(patience_s if patience_s > 0 else None)

    async def _keep_free(self, uri: SessionUri, order: LastSleep, keeping: Keeping, *, give_up: bool) -> None:
        """As `_keep_last`, of a session that no request holds."""
        try:
            async with self._turns.take(uri, always=True):
                keeping.seen.add(uri)
                live = self._awake.get(uri)
                if live is not None:
                    await self._keep_last(live, order, keeping, give_up=give_up)
        finally:
            self._memory.look_again()

    def _stake(self, uri: SessionUri) -> tuple[int, float, SessionUri]:
        """The order of a stop: most tokens that are not durable first, then the last used."""
        live = self._awake.get(uri)
        if live is None:
            return 0, 0.0, uri
        durable = live.unchanged_tokens if live.durable is not None else 0
        return durable - len(live.state.tokens), -live.stay.last_used, uri

    async def _keep_last(self, live: Session, order: LastSleep, keeping: Keeping, *, give_up: bool) -> None:
        """Make a session, or at least its ledger, durable, unless its newest version is up to date."""
        uri = str(live.uri)
        if not live.state.tokens:
            keeping.empty.append(uri)
            return
        try:
            if await self._putting_away.needs_last_sleep(live):
                await self._putting_away.keep(live, ignore, "shutdown", Terms(last=order))
                keeping.slept.append(uri)
        except Exception as error:  # noqa: BLE001 - one session's failure must not cost the others
            if give_up or isinstance(error, StopDeadline | BudgetExceeded):
                await self._keep_ledger(live, error, keeping)
            else:
                keeping.failed[uri] = sentence_of(error)

    async def _keep_ledger(self, live: Session, unslept: Exception, keeping: Keeping) -> None:
        uri = str(live.uri)
        try:
            await self._versions.keep_ledger(live, code_of(unslept))
            keeping.ledgers[uri] = sentence_of(unslept)
        except Exception as error:  # noqa: BLE001 - as above
            is_the_same = code_of(error) == code_of(unslept)
            why = "for the same reason." if is_the_same else f"for another reason: {sentence_of(error)}"
            keeping.failed[uri] = f"{sentence_of(unslept)} Not even its ledger could be kept, {why}"
