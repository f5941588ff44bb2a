"""Which sessions are awake, and which models are loaded: requests bring them back, in turns, and what is awake goes to
sleep in its own turn.

Everything here runs on the event loop. A request that looks at a session or changes it holds its turn; whatever else
is asked of a session meanwhile waits. Nothing takes memory that has not been reserved (`memory.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from ...memvid.errors import SessionNotFound
from ...memvid.store import IndexRow, Receipt, Store
from ...memvid.uri import SessionUri, not_found
from ...snapshot.memory import require_available
from ..api.events import OnEvent
from ..api.process import ShutdownResult
from ..api.waking import WakeResult
from ..engine.admission import apart
from ..engine.buffers import Buffers
from ..engine.cancellation import to_the_end
from ..engine.generation import PREFILL_CHUNK_TOKENS
from ..errors import EmptyContext, ModelInUse, ServiceClosed, SessionExists, StopDeadline, sentence_of
from ..events.bus import Bus, code_of
from ..events.events import ModelUnloaded, RequestQueued, SessionDeleted, SleepCause, UnloadCause
from ..memory.claims import Claim, Use
from ..memory.loading import Loader, Loading
from ..memory.memory import Memory
from ..memory.model_registry import Place, Shelf
from ..memory.model_unloading import Disuse
from ..memory.watching import ChangePolicy, Watching
from ..models.models import LoadedModel
from ..sessions.idling import Idling
from ..sessions.sessions import Durable, Session, Turns
from ..sessions.tracing import tell_sleep
from ..sleep.hibernation import Hibernation, LastSleep, WakeOrder
from ..sleep.ledgers import Ledgers
from . import listing
from .looks import LeftLook, Looks

_MAX_TOLD: Final = 4
"""Sessions that a refusal names."""

PATIENCE_S: Final = 1.0
"""For how long a stop waits, at most, for sessions whose requests have just been cancelled, while it could put others
to sleep whose loss would cost less: most model calls are over by then."""


@dataclass(slots=True)
class Keeping:
    """What has become of the sessions of a daemon that stops, so far; see `ShutdownResult`. seen: those that were seen
    to."""

    slept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    ledgers: dict[str, str] = field(default_factory=dict)
    seen: set[SessionUri] = field(default_factory=set)

    @classmethod
    def after(cls, report: ShutdownResult) -> Keeping:
        """To go on after a stop that may be refused: what could be kept then is kept."""
        kept = {SessionUri.parse(uri) for uri in report.ledgers}
        return cls(slept=list(report.slept), ledgers=dict(report.ledgers), seen=kept)

    def report(self) -> ShutdownResult:
        """As it is told."""
        return ShutdownResult(tuple(self.slept), dict(self.failed), tuple(self.empty), dict(self.ledgers))


def require_read(live: Session) -> None:
    """Raises EmptyContext: the session has read nothing."""
    if not live.state.tokens:
        raise EmptyContext(
            f"{live.uri} has read nothing, so there is nothing to keep; append to it first.", session=str(live.uri)
        )


class Residency:
    """The sessions that are awake, and the turns of all; the models that they are on.

    require_working: raises where the daemon takes no more work. budget: bytes of memory that models and sessions share.
    idle_s: after how long unused sessions go to sleep, never if None. stop_within_s: how long the last sleeps
        may take, None: as long as they do. on_model_change: what becomes of a
        model whose files have changed.
    """

    def __init__(
        self,
        store: Store,
        hibernation: Hibernation,
        ledgers: Ledgers,
        shelf: Shelf,
        loader: Loader,
        require_working: Callable[[], None],
        budget: int,
        buffers: Buffers,
        bus: Bus,
        idle_s: float | None = None,
        on_model_change: ChangePolicy = "refuse",
        stop_within_s: float | None = None,
    ) -> None:
        self._store = store
        self._hibernation = hibernation
        self.ledgers = ledgers
        self._shelf = shelf
        self._require_working = require_working
        self.turns = Turns()
        self.awake: dict[SessionUri, Session] = {}
        self.looks = Looks()
        self._bus = bus
        self.memory = Memory(budget, shelf, self.awake, self.turns, self._make_room, self._unload_for_others, bus)
        self.models = Loading(shelf, self.memory, loader, self._reserve, bus)
        self.stop_within_s = stop_within_s
        self._buffers = buffers
        self._numbers = itertools.count()
        self._idling = None if idle_s is None else Idling(self.awake, idle_s, self._idled)
        self._disuse = Disuse(shelf, self.last_use, partial(self._retire, cause="unused"))
        self.watching = Watching(shelf, loader.digests, partial(self._retire, cause="changed"), bus, on_model_change)

    @asynccontextmanager
    async def turn(self, uri: SessionUri) -> AsyncIterator[Use]:
        """Hold the session alone.

        Raises:
            SessionBusy: too many requests wait for it. ServiceClosed: no more work is taken.
        """
        self._require_working()
        try:
            if ahead := self.turns.users(uri):
                self._bus.publish(RequestQueued(uri, ahead))
            async with self.turns.take(uri):
                self._require_working()
                use = Use(uri, next(self._numbers))
                try:
                    yield use
                finally:
                    self._drop_if_lost(uri)
                    self.memory.settle(use)
        finally:
            self.memory.look_again()

    @asynccontextmanager
    async def turn_with_name(self, uri: SessionUri, name: SessionUri) -> AsyncIterator[Use]:
        """Hold a session alone, and a name that no session has.

        The name comes first: a request that has it and waits for the session has no memory that others could want. None
        waits in a circle, for a name that is held is no session that somebody else could wait for.

        Raises:
            SessionExists: a session has the name. SessionNotFound: there is no such session any more.
        """
        self.require_new(name)
        async with self.turn(name) as named, AsyncExitStack() as stack:
            self.require_new(name)
            if uri not in self.awake:
                self.require_row(uri)
            with self.memory.waiting_for_another(named, lambda: True):
                use = await stack.enter_async_context(self.turn(uri))
            use.also = name
            yield use

    @asynccontextmanager
    async def woken(
        self, uri: SessionUri, emit: OnEvent, begin: Callable[[Use], Awaitable[object]] | None = None
    ) -> AsyncIterator[tuple[Use, Session]]:
        """Hold the session alone, awake. begin: makes it where there is none; it goes again where what it was made for
        fails before anything was read."""
        async with self.turn(uri) as use:
            live = self.live(uri)
            if live is None and begin is not None and self._store.find_session(uri) is None:
                await begin(use)
                async with self._gone_if_empty(uri):
                    yield use, self.awake[uri]
                return
            if live is None:
                await self.bring_back(use, WakeOrder(), emit)
            elif not live.model.is_loaded:
                await self._begin_anew(use, live)
            yield use, self.awake[uri]

    @asynccontextmanager
    async def _gone_if_empty(self, uri: SessionUri) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            live = self.awake.get(uri)
            if live is not None and not live.state.tokens:
                self.drop(uri)
                self._bus.publish(SessionDeleted(uri, 0, 0))
            raise

    async def room_for(self, use: Use, count: int, emit: OnEvent) -> Session:
        """The session, awake, once there is memory for that many tokens more in it. While the request waits for some,
        the session may have been put to sleep and woken, so that others could go on: then it is another object; and
        the model may have been unloaded and loaded.

        Raises:
            MemoryBudgetExceeded: there can never be so much. MemoryBusy: too many requests wait. NotEnoughMemory: the
            budget has it, the system has not. What a wake raises.
        """
        while True:
            live = self.awake.get(use.uri)
            if live is None:
                await self.bring_back(use, WakeOrder(), emit)
                continue
            if not live.model.is_loaded:
                self.memory.settle(use)
                await self._begin_anew(use, live)
                continue
            growth = live.growth_bytes(len(live.state.tokens) + count, PREFILL_CHUNK_TOKENS)
            if not await self.memory.reserve(use, growth, grows=True):
                await to_the_end(apart(self._give_way(live)))
            elif live.model.is_loaded:
                require_available(growth)
                return live

    @asynccontextmanager
    async def room_to_wake(
        self, use: Use, row: IndexRow, at_token: int | None = None, *, times: int = 1
    ) -> AsyncIterator[LoadedModel]:
        """Hold the model of a version of a session, with memory to wake that beside all that is awake; `times` over.
        at_token: how many of its tokens, all if None.

        Raises:
            What `Loading.using` raises. MemoryBudgetExceeded, MemoryBusy: as `room_for`.
        """
        while True:
            async with self.models.holding(row.model, use) as place:
                wanted = times * _bytes_to_wake(place, row, at_token)
                await self._reserve(use, wanted)
                if place.model is not None:
                    yield place.model
                    return
            self.memory.release(use, wanted)  # it was unloaded meanwhile, so that others could go on

    async def _reserve(self, claim: Claim, wanted: int) -> None:
        """Memory for a claim. Its session, if it is awake, gives way where others must go on first."""
        while not await self.memory.reserve(claim, wanted):
            live = None if claim.uri is None else self.awake.get(claim.uri)
            if live is not None:
                await to_the_end(apart(self._give_way(live, claim)))

    async def _begin_anew(self, use: Use, live: Session) -> None:
        """Give a session that has read nothing its model back, which was unloaded meanwhile."""
        async with self.models.using(live.model.name, use) as model:
            key = live.state.random_key
            live.state = await to_the_end(self._hibernation.begin(model, lambda: key))
            live.model = model

    def live(self, uri: SessionUri) -> Session | None:
        """The session if it is awake; one that is superseded is so no more, for its sleep would hide a fuller one."""
        live = self.awake.get(uri)
        if live is not None and self._hibernation.is_superseded(live):
            self.drop(uri)
            return None
        return live

    def _drop_if_lost(self, uri: SessionUri) -> None:
        """What there was no memory to keep is no session any more; the next request finds its last sleep."""
        live = self.awake.get(uri)
        if live is not None and live.state.is_lost:
            self.set_aside(live)

    def admit(self, session: Session) -> None:
        """A new session is awake from now on."""
        self.awake[session.uri] = session

    def drop(self, uri: SessionUri) -> None:
        """Let a session's memory go, if it is awake, and end its look: its next use finds its newest version."""
        self._free(uri)
        self.looks.end(uri)

    def set_aside(self, live: Session) -> None:
        """As `drop`; but the next use of a look finds it where it stood."""
        self.leave(live.uri, LeftLook.of(live))

    def leave(self, uri: SessionUri, look: LeftLook | None) -> None:
        """Let a session's memory go, if it is awake: its next use finds it where that look stood, at its newest version
        if None."""
        self.drop(uri)
        if look is not None:
            self.looks.remember(look)

    def _free(self, uri: SessionUri) -> None:
        """Let a session's memory go. Code that knows the session still knows it without its state."""
        session = self.awake.pop(uri, None)
        if session is not None:
            session.let_go()

    async def bring_back(self, use: Use, order: WakeOrder, emit: OnEvent, started: float | None = None) -> WakeResult:
        """Wake a session that is asleep; one that was looked at, where nothing else is asked, where it stood. What has
        begun runs to its end even when the caller is cancelled.

        started: since when the report counts the seconds, by the monotonic clock; from now on if None.

        Raises:
            SessionNotFound, and what `Hibernation.wake` raises. What `room_to_wake` raises.
        """
        started = started or time.monotonic()
        order = self.order_of(use.uri, order)
        row = self.row_of(use.uri, order.version)
        async with self.room_to_wake(use, row, order.at_token) as model:
            woken = await self._bring_back(use, order, model, emit, started)
        self.memory.settle(use)
        return woken

    async def _bring_back(
        self, use: Use, order: WakeOrder, model: LoadedModel, emit: OnEvent, started: float
    ) -> WakeResult:
        """Wake a session that there is memory for, with all of its ledger. It goes back to sleep where not all of that
        is read; otherwise it stays awake even when the caller is cancelled, and `woken` of its use has the report."""
        try:
            woken = await to_the_end(self._wake(use, order, model, emit, started))
            use.woken = await self._read_on(use.uri, woken)
        except BaseException:
            live = self.awake.get(use.uri)
            if live is not None and live.unread is not None:
                self._free(use.uri)
            raise
        return use.woken

    async def _read_on(self, uri: SessionUri, woken: WakeResult) -> WakeResult:
        """Read what a session that was just woken has not read of its ledger; there is memory for it.

        Raises:
            What `Ledgers.read` raises.
        """
        begun, live = time.monotonic(), self.awake[uri]
        if live.unread is None:
            return woken
        again = await self.ledgers.read(live)
        return replace(
            woken,
            token_count=len(live.state.tokens),
            tokens_prefilled=woken.tokens_prefilled + (again.tokens if again else 0),
            recomputed=again or woken.recomputed,
            seconds=woken.seconds + time.monotonic() - begun,
        )

    async def warm(self, use: Use, emit: OnEvent) -> str | None:
        """Wake a session that is asleep, in free memory: for one that no request has asked for yet, no other
        goes to sleep and no model is loaded. None if it is awake now; else why not: `model_not_loaded` or `no_room`.

        Raises:
            SessionNotFound, and what `Hibernation.wake` raises.
        """
        order = self.order_of(use.uri, WakeOrder(cause="warm"))
        row = self.row_of(use.uri, order.version)
        place = self._shelf.place(row.model)
        if place.model is None:
            return "model_not_loaded"
        if not self.memory.take_free(use, _bytes_to_wake(place, row, order.at_token)):
            return "no_room"
        async with self.models.using(row.model, use) as model:
            await self._bring_back(use, order, model, emit, time.monotonic())
        self.memory.settle(use)
        return None

    def standing(self, uri: SessionUri) -> tuple[IndexRow, int | None]:
        """Where the next use of a session that is not awake finds it: a version, and how many of its tokens, all if
        None.

        Raises:
            SessionNotFound: there is no version, or not any more the one that was looked at. NoSuchPosition: what was
            looked at is a ledger alone now.
        """
        newest, look = self.require_row(uri), self.looks.find(uri)
        if look is None:
            return newest, None
        row = look.row_in(self._store.versions(uri))
        return row, look.token_in(row)

    def order_of(self, uri: SessionUri, order: WakeOrder) -> WakeOrder:
        """An order to wake a session: without a version it is for the one that a look stood at, and for its tokens.

        Raises:
            SessionNotFound: the version that was looked at is not stored any more. NoSuchPosition: as of `standing`.
        """
        look = self.looks.find(uri)
        if look is None or order.version is not None:
            return order
        row = look.row_in(self._store.versions(uri))
        return replace(
            order, version=row.version, at_token=look.token_in(row) if order.at_token is None else order.at_token
        )

    def row_of(self, uri: SessionUri, version: int | None) -> IndexRow:
        """A version as the index has it; the newest for one that it has not, as the wake will say."""
        newest = self.require_row(uri)
        if version in (None, newest.version):
            return newest
        return next((row for row in self._store.versions(uri) if row.version == version), newest)

    def find_row(self, uri: SessionUri, version: int | None) -> IndexRow | None:
        """As `row_of`; None for a session that has no version."""
        return None if self._store.find_session(uri) is None else self.row_of(uri, version)

    async def _wake(self, use: Use, order: WakeOrder, model: LoadedModel, emit: OnEvent, started: float) -> WakeResult:
        newest = self.require_row(use.uri)
        woken = await self._hibernation.wake(use.uri, order, model, emit)
        woken.session.rewound = order.version not in (None, newest.version)
        self.admit(woken.session)
        use.woken = listing.wake_result(
            woken.session,
            newest,
            bytes_read=woken.bytes_read,
            tokens_prefilled=woken.session.state.computed_tokens,
            seconds=time.monotonic() - started,
            already_awake=False,
            verified=woken.verified,
            canary=woken.canary,
            canary_seconds=woken.canary_seconds,
        )
        return use.woken

    async def put_away(self, live: Session, emit: OnEvent, cause: SleepCause) -> Receipt | Durable:
        """Make a session durable and free its memory; one that is durable already is only let go, and its last
        snapshot is what is returned. The caller holds its turn, and sees it to the end. cause: what for, as it is told.

        Raises:
            EmptyContext, and what `Hibernation.sleep` raises; the session then stays awake.
        """
        if live.durable is not None and await self._is_durable(live):
            with tell_sleep(self._bus, live, cause) as tell_end:
                self.drop(live.uri)
                tell_end(live.durable)
            return live.durable
        receipt = await self.keep(live, emit, cause)
        self.drop(live.uri)
        return receipt

    async def _make_room(self, uri: SessionUri) -> bool:
        return await self._put_away_idle(uri, "pressure")

    async def _put_away_idle(self, uri: SessionUri, cause: SleepCause) -> bool:
        """Free the memory of a session whose turn is held; False if there is none to free any more."""
        live = self.live(uri)
        if live is None or not live.state.tokens:
            return False
        if live.is_mere_look:
            await self._put_look_away(live, cause)
        else:
            await self.put_away(live, _ignore, cause)
        await self._buffers.hand_back()
        return True

    async def _put_look_away(self, live: Session, cause: SleepCause) -> None:
        """Free the memory of a look, with nothing written: its version has all of it.

        Raises:
            StoreError: that version cannot be read, or is not stored any more. So what is in memory may be nowhere
                else, and stays. NoSuchPosition: that version has a ledger alone of it; it stays, too.
        """
        look = LeftLook.of(live)
        assert look is not None
        assert live.durable is not None, "what is looked at has slept"
        with tell_sleep(self._bus, live, cause) as tell_end:
            look.token_in(self.row_of_awake(live))
            await self._hibernation.require_kept(live)
            self.set_aside(live)
            tell_end(live.durable)

    async def _give_way(self, live: Session, use: Claim | None = None) -> None:
        """Put the session of a request that waits for memory to sleep, in its turn. use: that request, if it wants the
        memory for something else."""
        try:
            if await self._make_room(live.uri):
                self.memory.slept_by_pressure += 1
        except Exception as error:  # noqa: BLE001 - it stays awake, and those that want its memory are told why
            self.memory.could_not_sleep(live.uri, error, use)

    async def _idled(self, uri: SessionUri) -> None:
        """Put a session to sleep that was not used for long, unless it is used now, or the daemon stops: that has
        an order of its own."""
        if uri in self.turns.in_use() or not self._is_working():
            return
        if await self._put_away_unasked(uri, "idle"):
            self.memory.slept_by_idling += 1

    def _is_working(self) -> bool:
        try:
            self._require_working()
        except ServiceClosed:
            return False
        return True

    def last_use(self, name: str) -> float:
        """When somebody last used a model, by the monotonic clock: it, or a session on it."""
        place = self._shelf.places[name]
        sessions, in_use = self._sessions_on(name), self.turns.in_use()
        if place.holders or any(each.uri in in_use for each in sessions):
            return time.monotonic()
        return max([place.last_used, *(each.last_used for each in sessions if each.state.tokens)])

    def facts(self, name: str) -> LoadedModel | None:
        """A model that is served, maybe without its weights; None if it has never been loaded.

        Raises:
            UnknownModel: it is not served.
        """
        place = self._shelf.place(name)
        return place.model or place.facts

    def sessions_on(self, name: str) -> int:
        """How many sessions are awake on a model."""
        return len(self._sessions_on(name))

    async def load(self, name: str) -> None:
        """Load a model, if it is not.

        Raises:
            What `Loading.using` raises.
        """
        self._require_working()
        with self.memory.apart(next(self._numbers)) as claim:
            async with self.models.using(name, claim):
                return

    async def unload(self, name: str) -> None:
        """Put the sessions on a model to sleep, and free its memory. One that is not loaded is left so. Where its files
        have changed, the next load takes what they are by then.

        Raises:
            UnknownModel. ModelInUse: a request needs it. What a sleep raises.
        """
        self._require_working()
        place = self._shelf.place(name)
        while place.loading is not None:
            await asyncio.wait([place.loading])
        for session in self._sessions_on(name) if place.model is not None else ():
            self._require_working()  # a daemon that stops has an order of its own
            if session.uri not in self.turns.in_use():
                await to_the_end(self._put_away_unasked(session.uri, "asked"))
        if place.model is not None and self._is_needed(name):
            needed = [str(each.uri) for each in self._sessions_on(name) if self._stays(each)]
            raise ModelInUse(
                f"Model {name!r} is in use{' by ' + ', '.join(needed[:_MAX_TOLD]) if needed else ''}; wait for what "
                "goes on, put such sessions to sleep, and try again.",
                model=name,
                sessions=needed,
            )
        if place.model is not None:
            await self._unload(name, "asked")
        place.changed = ()  # an unload takes what the files are now

    async def _unload_for_others(self, name: str) -> None:
        await self._unload(name, "pressure")

    async def _retire(self, name: str, cause: UnloadCause) -> bool:
        """Put the sessions on a model to sleep and unload it, unless somebody uses it now.

        Raises:
            What the sleep of one of them raises; the others sleep all the same.
        """
        place = self._shelf.places[name]
        unslept = None
        for session in self._sessions_on(name):
            if session.state.tokens:
                try:
                    await self._idled(session.uri)
                except Exception as error:  # noqa: BLE001 - the others need not stay awake for it
                    unslept = unslept or error
                    place.stays_for = f"{session.uri} cannot be put to sleep ({sentence_of(error)})"
        if unslept is not None:
            raise unslept
        place.stays_for = None
        if place.loading is not None or self._is_needed(name):
            return False
        if place.model is not None:
            await self._unload(name, cause)
        if place.leaving:
            self._shelf.forget(place)
        return True

    async def let_go(self) -> None:
        """Unload the models that are served no more, or are to be loaded from elsewhere: now, or when no request uses
        them any more, and all that is awake on them could be put to sleep."""
        for name in self._shelf.to_go():
            await self._disuse.unload(name)
        self._disuse.look_again()

    async def resize(self, budget: int) -> None:
        """Another memory budget from now on; what is idle and no longer fits goes to sleep."""
        self.memory.resize(budget)
        await self._buffers.bound(max(0, self.memory.for_sessions))

    async def set_idle(self, idle_s: float | None) -> None:
        """From now on put sessions to sleep that are not used for so long; none if None."""
        before, self._idling = self._idling, None
        if before is not None:
            await before.close()
        self._idling = None if idle_s is None else Idling(self.awake, idle_s, self._idled)

    def _sessions_on(self, name: str) -> list[Session]:
        return [session for session in self.awake.values() if session.model.name == name]

    def _stays(self, session: Session) -> bool:
        return bool(session.state.tokens) or session.uri in self.turns.in_use()

    def _is_needed(self, name: str) -> bool:
        return bool(self._shelf.places[name].holders) or any(self._stays(each) for each in self._sessions_on(name))

    async def _unload(self, name: str, cause: UnloadCause) -> None:
        """Free the memory of a model. Sessions on it that have read nothing stay, and get it back when they are used.

        No request can come to need it meanwhile: it is let go of before anything is waited for.
        """
        place = self._shelf.places[name]
        assert place.model is not None
        facts = place.model.without_weights()
        for session in self._sessions_on(name):
            assert not session.state.tokens, "a context is not left without its model"
            session.model = facts
        self._shelf.drop(place, facts, self._look_again_soon())
        self._bus.publish(ModelUnloaded(None, name, facts.weights_bytes, cause))
        self.memory.look_again()
        await self._buffers.hand_back()

    def _look_again_soon(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def look_again() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.memory.look_again)

        return look_again

    async def _put_away_unasked(self, uri: SessionUri, cause: SleepCause) -> bool:
        try:
            async with self.turns.take(uri):
                return await self._put_away_idle(uri, cause)
        finally:
            self.memory.look_again()

    async def close(self) -> None:
        """Put no more sessions to sleep; those that are awake are forgotten."""
        await self.watching.close()
        await self._disuse.close()
        if self._idling is not None:
            await self._idling.close()
        await self.memory.close()
        await self._buffers.close()
        self.awake.clear()

    async def keep_changed(self, live: Session, emit: OnEvent, cause: SleepCause) -> IndexRow:
        """As `keep`, if its newest version is not what it would be; the version that it stands in then.

        Raises:
            What `keep` and `row_of_awake` raise.
        """
        if not await self._is_durable(live):
            await self.keep(live, emit, cause)
        return self.row_of_awake(live)

    def row_of_awake(self, live: Session) -> IndexRow:
        """The version that an awake session is durable as, which of a look is not the newest.

        Raises:
            SessionNotFound: it is a look, and that version is not stored any more.
        """
        durable, rows = live.durable, self._store.versions(live.uri)
        assert durable is not None, "it has slept"
        row = next((row for row in rows if row.bundle_id == durable.bundle_id), None)
        if row is None:
            raise SessionNotFound(
                f"{live.uri} is awake for a look at version {durable.version}, which is not stored any more. Append to "
                "it and put it to sleep to keep what is in memory; or put it to sleep as it is, and the newest version "
                "is what you find.",
                session=str(live.uri),
                version=durable.version,
            )
        return row

    async def keep(self, live: Session, emit: OnEvent, cause: SleepCause, *, last: LastSleep | None = None) -> Receipt:
        """Make a session durable; it stays in memory. The caller holds its turn. cause, last: as of
        `Hibernation.sleep`.

        Raises:
            EmptyContext, and what `Hibernation.sleep` raises.
        """
        require_read(live)
        return await self._hibernation.sleep(live, emit, cause=cause, last=last)

    async def keep_all(self, order: LastSleep, keeping: Keeping, *, give_up: bool) -> None:
        """Put every changed session to sleep while no new work is taken; none of them leaves memory. First those whose
        loss would cost most to compute, then those used last; one that somebody holds for longer than a moment keeps
        none of the others waiting.

        What there is no time for is kept as a ledger. give_up: what cannot be kept whole for another reason, too.
        keeping: is told what becomes of each; those that it has seen are passed over.
        """
        self.memory.refuse_waiting(
            lambda: ServiceClosed("The daemon was told to stop, and has no memory to wait for; try again in a moment.")
        )
        patient_until = time.monotonic() + order.share(PATIENCE_S)
        # Requests that had begun may wake sessions meanwhile: go on until every session that is awake, or whose turn
        # somebody had, has been seen. Those that still wait for a turn behind this one are refused when they get it.
        while uris := (self.awake.keys() | self.turns.in_use()) - keeping.seen:
            patience_s = patient_until - time.monotonic()
            uri = self._next_to_keep(uris, patient=patience_s > 0)
            if uri is None:
                await self.turns.released(patience_s if patience_s > 0 else None)
                continue
            try:
                async with self.turns.take(uri, always=True):
                    keeping.seen.add(uri)
                    live = self.awake.get(uri)
                    if live is not None:
                        await self._keep_last(live, order, keeping, give_up=give_up)
            finally:
                self.memory.look_again()

    def _next_to_keep(self, uris: Collection[SessionUri], *, patient: bool) -> SessionUri | None:
        """The first of them by stake that no request holds; None if there is none, or, as long as there is patience, if
        somebody holds the first of all."""
        line, held = sorted(uris, key=self._stake), self.turns.in_use()
        if patient:
            line = line[:1]
        return next((uri for uri in line if uri not in held), None)

    def _stake(self, uri: SessionUri) -> tuple[int, float, SessionUri]:
        """What a stop looks at first: the session with most tokens that are not durable, then the one used last."""
        live = self.awake.get(uri)
        if live is None:
            return 0, 0.0, uri
        durable = live.unchanged_tokens if live.durable is not None else 0
        return durable - len(live.state.tokens), -live.last_used, uri

    async def _keep_last(self, live: Session, order: LastSleep, keeping: Keeping, *, give_up: bool) -> None:
        """Make a session durable for the last time, unless its newest version is what a wake should give back; or at
        least its ledger."""
        uri = str(live.uri)
        if not live.state.tokens:
            keeping.empty.append(uri)
            return
        try:
            if await self._needs_last_sleep(live):
                await self.keep(live, _ignore, "shutdown", last=order)
                keeping.slept.append(uri)
        except Exception as error:  # noqa: BLE001 - one session's failure must not cost the others theirs
            if give_up or isinstance(error, StopDeadline):
                await self._keep_ledger(live, error, keeping)
            else:
                keeping.failed[uri] = sentence_of(error)

    async def _keep_ledger(self, live: Session, unslept: Exception, keeping: Keeping) -> None:
        uri = str(live.uri)
        try:
            await self.ledgers.keep(live, code_of(unslept))
            keeping.ledgers[uri] = sentence_of(unslept)
        except Exception as error:  # noqa: BLE001 - as above
            keeping.failed[uri] = f"{sentence_of(unslept)} Not even its ledger could be kept: {sentence_of(error)}"

    async def _needs_last_sleep(self, live: Session) -> bool:
        return not (self._hibernation.is_superseded(live) or await self._is_durable(live))

    async def _is_durable(self, live: Session) -> bool:
        """Whether the next wake gives back what the session is without a sleep. Of a mere look that is the whole
        session as its newest version has it, in whatever state that is: one of the few tokens would stand before it,
        and hide what can be read, healed or saved of it. So a look is kept only where no version is left but it."""
        if live.dirty or live.durable is None:
            return False
        if not live.is_mere_look:
            return await self._hibernation.is_kept(live)
        newest = self._store.find_session(live.uri)
        if newest is not None and newest.bundle_id != live.durable.bundle_id:
            return True
        return not await self._hibernation.is_gone(live)

    def require_new(self, uri: SessionUri) -> None:
        """Refuse a name that a session has, awake or asleep, or that has versions which cannot be woken now:
        a new one would stand before them when they are back.

        Raises:
            SessionExists.
        """
        if uri in self.awake or self._store.find_session(uri) is not None:
            raise session_exists(uri)
        if self._store.can_be_deleted(uri):
            raise SessionExists(
                f"{uri} has versions that cannot be woken now, for something of them is missing or damaged. `torpor "
                "verify` says which file to put back; choose another name, or give them up with `torpor rm`.",
                session=str(uri),
            )

    def require_row(self, uri: SessionUri) -> IndexRow:
        """What the index has of the session's newest version.

        Raises:
            SessionNotFound: nothing.
        """
        row = self._store.find_session(uri)
        if row is None:
            raise not_found(uri, ())  # it went while this request waited for its turn
        return row


def session_exists(uri: SessionUri) -> SessionExists:
    """What is said of a name that is taken."""
    return SessionExists(f"{uri} exists already; use it, delete it, or choose another name.", session=str(uri))


def _bytes_to_wake(place: Place, row: IndexRow, at_token: int | None) -> int:
    assert place.model is not None
    layout = place.model.layout
    return layout.most_bytes(layout.tokens_to_wake(row.ledger_tokens, at_token), PREFILL_CHUNK_TOKENS)


def _ignore(_event: object) -> None:
    """For work without a watcher."""
