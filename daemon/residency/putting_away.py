"""Making awake sessions durable, and freeing their memory. The caller holds the session's turn."""

from __future__ import annotations

from dataclasses import dataclass

from ...memvid.answers import VersionInfo
from ...memvid.errors import BudgetExceeded
from ...memvid.store import Receipt, Store
from ...memvid.uri import SessionUri
from ..api.events import OnEvent, ignore
from ..disk.making_room import Room
from ..engine.buffers import Buffers
from ..errors import EmptyContext
from ..events.bus import Bus
from ..events.events import SleepCause
from ..sessions.sessions import Session
from ..sessions.tracing import tell_sleep
from ..versions.writing import ORDINARY, Terms, Versions
from .awake import AwakeSessions
from .standing import Standing


def require_read(live: Session) -> None:
    """Raises EmptyContext: the session has read nothing."""
    if not live.state.tokens:
        raise EmptyContext(
            f"{live.uri} has read nothing, so there is nothing to keep; append to it first.", session=str(live.uri)
        )


@dataclass(eq=False, repr=False)
class PuttingAway:
    _store: Store
    _versions: Versions
    _awake: AwakeSessions
    _standing: Standing
    _buffers: Buffers
    _room: Room
    _bus: Bus

    async def put_away(
        self, live: Session, emit: OnEvent, cause: SleepCause, *, stays: bool = False, as_ledger: bool = False
    ) -> Receipt:
        """Make a session durable and free its memory, unless it `stays`. If it is durable already, nothing is written,
        and the receipt is that of its last version. The caller runs this to its end. cause: for the events. as_ledger:
        it is durable also as a ledger alone. Raises EmptyContext, and as `Versions.sleep`; the session then stays
        awake."""
        if live.durable is not None and await self._is_durable(live, as_ledger=as_ledger):
            with tell_sleep(self._bus, live, cause) as tell_end:
                tell_end(receipt := live.durable.repeated())
        else:
            receipt = await self.keep(live, emit, cause)
        if not stays:
            self._awake.drop(live.uri)
        return receipt

    async def put_away_idle(self, uri: SessionUri, cause: SleepCause) -> bool:
        """Free the memory of a session. False if it is no longer in memory. By pressure, others need that memory: where
        a budget refuses its sleep, it is kept as its ledger, if its keys and values may be stripped."""
        live = self._awake.get(uri)
        if live is None or not live.state.tokens:
            return False
        if live.is_mere_look:
            await self._put_look_away(live, cause)
        else:
            try:
                await self.put_away(live, ignore, cause, as_ledger=True)
            except BudgetExceeded as error:
                if cause != "pressure" or not self._room.may_strip(unnamed=live.unnamed):
                    raise
                await self._versions.keep_ledger(live, error.code)
                self._awake.drop(uri)
        await self._buffers.hand_back()
        return True

    async def _put_look_away(self, live: Session, cause: SleepCause) -> None:
        """Free the memory of a look and write nothing: its version has all of it.

        Raises StoreError: that version cannot be read, or is not stored any more. The look then stays in memory, as it
        may be the only copy."""
        assert live.durable is not None, "what is looked at has slept"
        with tell_sleep(self._bus, live, cause) as tell_end:
            self._standing.row_of_awake(live)
            await self._versions.require_kept(live)
            self._awake.drop(live.uri)
            tell_end(live.durable.repeated())

    async def keep_changed(self, live: Session, emit: OnEvent, cause: SleepCause) -> VersionInfo:
        """As `keep`, unless its newest version is up to date. Gives the version. Raises as `keep` and
        `Standing.row_of_awake`."""
        if not await self._is_durable(live):
            await self.keep(live, emit, cause)
        return self._standing.row_of_awake(live)

    async def keep(self, live: Session, emit: OnEvent, cause: SleepCause, terms: Terms = ORDINARY) -> Receipt:
        """Make a session durable; it stays in memory. cause, terms: as of `Versions.sleep`. Raises EmptyContext, and
        as `Versions.sleep`."""
        require_read(live)
        return await self._versions.sleep(live, emit, cause=cause, terms=terms)

    async def needs_last_sleep(self, live: Session) -> bool:
        return not await self._is_durable(live, as_ledger=True)

    async def _is_durable(self, live: Session, *, as_ledger: bool = False) -> bool:
        """Whether the next wake gives the session back without a sleep now. as_ledger: it may read it again. A mere
        look is durable by the newest version, in any state: a new version with the look's fewer tokens would hide that
        one from reads, heals and repairs. So a look is written only if no other version is left."""
        if live.dirty or live.durable is None:
            return False
        if not live.is_mere_look:
            return (as_ledger or not live.durable.unread_tokens) and await self._versions.is_kept(live)
        newest = self._store.find_session(live.uri)
        if newest is not None and newest.bundle_id != live.durable.bundle_id:
            return True
        return not await self._versions.is_gone(live)
