"""The awake sessions and the loaded models: requests bring them back, and sessions go to sleep, each in its turn.

Everything here runs on the event loop. A request that reads or changes a session holds its turn; other requests for it
wait. All memory is reserved before use (`memory.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...memvid.answers import VersionInfo
from ...memvid.errors import StoreError
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...snapshot.memory import require_available
from ..api.events import OnEvent, ignore
from ..api.waking import WakeResult
from ..engine.generation import PREFILL_CHUNK_TOKENS
from ..events.accounts import note_recomputed, timed
from ..events.bus import Bus
from ..events.events import RequestQueued, SessionDeleted
from ..memory.line import Use
from ..memory.loading import Loading
from ..memory.memory import Memory
from ..memory.model_registry import Place
from ..models.models import LoadedModel
from ..sessions.sessions import Session, Turns
from ..tasks.cancellation import in_any_case, to_the_end
from ..tasks.door import Door
from ..versions.journal import TurnJournal
from ..versions.orders import WakeOrder
from ..versions.writing import Versions
from . import listing
from .awake import AwakeSessions
from .putting_away import PuttingAway
from .standing import Standing

if TYPE_CHECKING:
    from ..disk.remote import Remote, Taken

_LOG = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Residency:
    """The sessions, for requests: their turns, and how they come into memory."""

    _store: Store
    _versions: Versions
    journal: TurnJournal
    awake: AwakeSessions
    turns: Turns
    standing: Standing
    putting_away: PuttingAway
    memory: Memory
    models: Loading
    _door: Door
    _bus: Bus
    _remote: Remote | None

    @asynccontextmanager
    async def turn(self, uri: SessionUri, *, briefly: bool = False) -> AsyncIterator[Use]:
        """Hold the session alone. briefly: as of `Turns.take`.

        Raises SessionBusy: too many requests wait for it. ServiceClosed: no more work is taken."""
        self._door.require_working()
        try:
            if ahead := self.turns.users(uri):
                self._bus.publish(RequestQueued(uri, ahead))
            async with AsyncExitStack() as stack:
                with timed("waited_seconds"):
                    await stack.enter_async_context(self.turns.take(uri, briefly=briefly))
                self._door.require_working()
                use = Use(uri, next(self.memory.numbers))
                try:
                    yield use
                finally:
                    self.journal.give_back_room(uri)
                    if self.awake.drop_if_lost(uri):
                        # The turns that only the journal has become a version, so that every request finds them. If
                        # that fails, the session's next use tries again.
                        with suppress(StoreError):
                            await in_any_case(self.journal.replay(uri))
                    self.memory.settle(use)
        finally:
            self.memory.look_again()

    @asynccontextmanager
    async def turn_with_name(self, uri: SessionUri, name: SessionUri) -> AsyncIterator[Use]:
        """Hold a session alone, and a name that no session has.

        The name comes first: a request that holds it and waits for the session has no memory that others could need. No
        requests wait in a circle, as no other request can wait for a free name.

        Raises SessionExists: a session has the name. SessionNotFound: there is no such session any more."""
        self.standing.require_new(name)
        async with self.turn(name) as named, AsyncExitStack() as stack:
            await self.hold(name)
            self.standing.require_new(name)
            if uri not in self.awake:
                self.standing.require_row(uri)
            with self.memory.waiting_for_another(named, lambda: True):
                use = await stack.enter_async_context(self.turn(uri, briefly=True))
            use.also = name
            yield use

    @asynccontextmanager
    async def woken(
        self, uri: SessionUri, emit: OnEvent, begin: Callable[[Use], Awaitable[object]] | None = None
    ) -> AsyncIterator[tuple[Use, Session]]:
        """Hold the session alone, awake. begin: makes it if there is none. It is removed again if the request fails
        before anything was read."""
        async with self.turn(uri) as use:
            await self.hold(uri)
            live = self.awake.get(uri)
            if live is None:
                await self.journal.replay(uri)
            if live is None and begin is not None and self._store.find_session(uri) is None:
                async with self._gone_if_empty(uri):
                    await begin(use)
                    yield use, self.awake[uri]
                return
            if live is None:
                await self.bring_back(use, WakeOrder(), emit)
            elif not live.model.is_loaded:
                await self._begin_anew(use, live)
            yield use, self.awake[uri]

    async def hold(self, uri: SessionUri, *, asking: OnEvent | None = None) -> Taken | None:
        """Before a session is used: no other machine has it, and its newest version is here. asking, what it gives and
        raises: as of `Remote.hold`; and StoreError: its turns cannot be made a version."""
        if self._remote is None or self._remote.has(uri):
            return None
        live = self.awake.get(uri)
        if live is None:
            await self.journal.replay(uri)
        elif live.dirty and live.state.tokens and not self.journal.keeps(live) and uri in self._remote.leases:
            # Its lease has run out. If another machine has gone on with it, what it has read since stays a version.
            await to_the_end(self.putting_away.keep(live, ignore, "handover"))
        with timed("waited_seconds"):
            taken = await self._remote.hold(uri, asking=asking, is_new=self.standing.is_free(uri))
        if taken is not None and taken.has_gone_on:
            self.awake.drop(uri)
        return taken

    @asynccontextmanager
    async def _gone_if_empty(self, uri: SessionUri) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            live = self.awake.get(uri)
            if live is not None and not live.state.tokens:
                self.awake.drop(uri)
                self._bus.publish(SessionDeleted(uri, 0, 0))
            raise

    async def room_for(self, use: Use, count: int, emit: OnEvent) -> Session:
        """Give the session, awake, once there is memory for `count` more tokens, beside what its request has reserved.
        During the wait the session may sleep and wake, so that others can go on: then it is another object. The model
        may be unloaded and loaded, too.

        Raises:
            MemoryBudgetExceeded: it can never fit. MemoryBusy: too many requests wait. NotEnoughMemory: the budget has
                it, the system has not. And the errors of a wake.
        """
        while True:
            live = self.awake.get(use.uri)
            if live is None:
                await self.bring_back(use, use.look or WakeOrder(), emit)
                continue
            if not live.model.is_loaded:
                self.memory.settle(use)
                await self._begin_anew(use, live)
                continue
            growth = live.growth_of(PREFILL_CHUNK_TOKENS)(len(live.state.tokens) + count) - use.reserved
            if not await self.memory.reserve(use, growth, grows=True):
                await self.memory.give_way(use, live, grows=True)
                if use.uri not in self.awake:
                    self.memory.release(use, use.reserved)
            elif live.model.is_loaded:
                require_available(growth)
                return live

    @asynccontextmanager
    async def room_to_wake(
        self, use: Use, row: VersionInfo, at_token: int | None = None, *, times: int = 1
    ) -> AsyncIterator[LoadedModel]:
        """Hold the model of a version, with memory to wake it beside all awake sessions, `times` over. at_token: how
        many of its tokens; None: all.

        Raises as `Loading.using`. MemoryBudgetExceeded, MemoryBusy: as `room_for`."""
        while True:
            async with self.models.holding(row.model, use) as place:
                wanted = times * _bytes_to_wake(place, row, at_token)
                await self.memory.take(use, wanted)
                if place.model is not None:
                    yield place.model
                    return
            self.memory.release(use, wanted)  # the model was unloaded meanwhile for others

    async def _begin_anew(self, use: Use, live: Session) -> None:
        """Load the model of a session that has read nothing, after the model was unloaded."""
        async with self.models.using(live.model.name, use) as model:
            key = live.state.random_key
            live.state = await to_the_end(self._versions.waking.begin(model, lambda: key))
            live.model = model

    async def bring_back(self, use: Use, order: WakeOrder, emit: OnEvent, started: float | None = None) -> WakeResult:
        """Wake a sleeping session. A begun wake runs to its end even if the caller is cancelled. started: when the
        report's seconds begin, by the monotonic clock; None: now.

        Raises SessionNotFound, and as `Versions.wake` and `room_to_wake`."""
        started = started or time.monotonic()
        await self.hold(use.uri)
        await self.journal.replay(use.uri)
        if await self.write_ledger(use, order.version, order.at_token, emit):
            order = replace(order, version=None)
        row = self.standing.row_of(use.uri, order.version)
        fetched = await self.fetch_back(row)
        async with self.room_to_wake(use, row, order.at_token) as model:
            woken = await self._bring_back(use, order, model, emit, started)
        self.memory.settle(use)
        use.woken = replace(woken, bytes_fetched=fetched)
        return use.woken

    def is_fetched_back(self, row: VersionInfo) -> bool:
        """Whether a version is stripped here, and the remote has its keys and values, as far as is known. Raises
        CorruptMarks, MarksLost."""
        is_there = self._remote is not None and self._remote.has_version(row)
        return is_there and row.bundle_id in self._store.marks(row.uri).stripped

    async def fetch_back(self, row: VersionInfo) -> int:
        """Before such a version is read: its keys and values come back; the bytes that came. Where they cannot, the
        model computes them."""
        try:
            if self._remote is None or not self.is_fetched_back(row):
                return 0
            return await self._remote.fetch_back(row)
        except StoreError as error:
            _LOG.warning("%s is computed, and not fetched: %s: %s", row.uri, error.code, error.message)
            return 0

    async def write_ledger(self, use: Use, version: int | None, at_token: int | None, emit: OnEvent) -> bool:
        """If a token is asked for that stands in a ledger alone, compute the ledger and sleep again, so that the new
        newest version has it; else False. Raises as `bring_back`, and the errors of a sleep."""
        if not self.standing.is_in_ledger_alone(use.uri, version, at_token):
            return False
        await self.bring_back(use, WakeOrder(), emit)
        await to_the_end(self.putting_away.put_away(self.awake[use.uri], emit, "fork"))
        return True

    async def _bring_back(
        self, use: Use, order: WakeOrder, model: LoadedModel, emit: OnEvent, started: float
    ) -> WakeResult:
        """Wake a session with its whole ledger, in reserved memory. It goes back to sleep if not all of its ledger is
        read. Otherwise it stays awake even if the caller is cancelled, and `use.woken` has the report."""
        try:
            woken = await to_the_end(self._wake(use, order, model, emit, started))
            use.woken = await self._read_on(use.uri, woken)
            note_recomputed(use.woken.tokens_prefilled, use.woken.recomputed_because)
        except BaseException:
            live = self.awake.get(use.uri)
            if live is not None and live.unread is not None:
                self.awake.drop(use.uri)
            raise
        return use.woken

    async def _read_on(self, uri: SessionUri, woken: WakeResult) -> WakeResult:
        """Read the unread end of a just woken session's ledger, in reserved memory. Raises as `Waking.read_on`."""
        begun, live = time.monotonic(), self.awake[uri]
        if live.unread is None:
            return woken
        again = await self._versions.waking.read_on(live)
        return replace(
            woken,
            token_count=len(live.state.tokens),
            tokens_prefilled=woken.tokens_prefilled + (again.tokens if again else 0),
            provenance=replace(woken.provenance, recomputed=again or woken.provenance.recomputed),
            look=None,  # it stood before its end while it was read
            seconds=woken.seconds + time.monotonic() - begun,
        )

    async def warm(self, use: Use, emit: OnEvent) -> str | None:
        """Wake a sleeping session ahead of a request, in free memory only: no other session goes to sleep, and no model
        is loaded. Gives None if it is awake now, else the reason: `model_not_loaded` or `no_room`. Raises
        SessionNotFound, and as `Versions.wake`."""
        await self.hold(use.uri)
        await self.journal.replay(use.uri)
        order, row = WakeOrder(cause="warm"), self.standing.require_row(use.uri)
        await self.fetch_back(row)
        place = self.models.place(row.model)
        if place.model is None:
            return "model_not_loaded"
        if not self.memory.take_free(use, _bytes_to_wake(place, row, order.at_token)):
            return "no_room"
        async with self.models.using(row.model, use) as model:
            await self._bring_back(use, order, model, emit, time.monotonic())
        self.memory.settle(use)
        return None

    async def _wake(self, use: Use, order: WakeOrder, model: LoadedModel, emit: OnEvent, started: float) -> WakeResult:
        unreadable = await self._versions.threads.on_io(self._store.unreadable)
        newest = self.standing.require_row(use.uri)
        woken = await self._versions.waking.wake(use.uri, order, model, emit)
        woken.session.rewound = order.version not in (None, newest.version)
        woken.session.unnamed = newest.unnamed  # an earlier version may be of before it had a name
        self.awake.admit(woken.session)
        use.woken = listing.wake_result(
            woken.session,
            newest,
            bytes_read=woken.bytes_read,
            tokens_prefilled=woken.session.state.computed_tokens,
            seconds=time.monotonic() - started,
            canary=woken.canary,
            canary_seconds=woken.canary_seconds,
            unreadable=unreadable,
            because=woken.because,
        )
        return use.woken


def _bytes_to_wake(place: Place, row: VersionInfo, at_token: int | None) -> int:
    assert place.model is not None
    layout = place.model.layout
    return layout.most_bytes(layout.tokens_to_wake(row.token_count, at_token), PREFILL_CHUNK_TOKENS)
