"""Which sessions are awake: requests bring them back, in turns, and what is awake goes to sleep in its own turn.

Everything here runs on the event loop. Whoever looks at a session or changes it holds its turn; whatever else is asked
of a session meanwhile waits. Nothing takes memory that has not been reserved (`memory.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from ..errors import TorporError
from ..memvid.store import IndexRow, Receipt, Store
from ..memvid.uri import SessionUri, resolve
from . import listing
from .buffers import Buffers
from .errors import EmptyContext, ServiceClosed, UnknownModel
from .generation import PREFILL_CHUNK_TOKENS
from .hibernation import Hibernation, ModelNamed, WakeOrder
from .idling import Idling
from .memory import Memory, Use
from .results import CloseReport, Emit, WakeResult
from .sessions import Durable, Session, Turns
from .waiting import to_the_end


class Residency:
    """The sessions that are awake, and the turns of all.

    require_working: raises where the daemon takes no more work. budget: bytes of memory that models and sessions share,
        of which the models take what `weights` says. idle_s: after how long sessions that nobody uses go to sleep,
        never if None.
    """

    def __init__(
        self,
        store: Store,
        hibernation: Hibernation,
        model_named: ModelNamed,
        require_working: Callable[[], None],
        weights: Callable[[], int],
        budget: int,
        buffers: Buffers,
        idle_s: float | None = None,
    ) -> None:
        self._store = store
        self._hibernation = hibernation
        self._model_named = model_named
        self._require_working = require_working
        self.turns = Turns()
        self.awake: dict[SessionUri, Session] = {}
        self.memory = Memory(budget, weights, self.awake, self.turns, self._put_away_idle)
        self._buffers = buffers
        self._numbers = itertools.count()
        self._idling = None if idle_s is None else Idling(self.awake, idle_s, self._idled)

    @asynccontextmanager
    async def turn(self, uri: SessionUri) -> AsyncIterator[Use]:
        """Hold the session alone.

        Raises:
            SessionBusy: too many requests wait for it. ServiceClosed: no more work is taken.
        """
        self._require_working()
        try:
            async with self.turns.take(uri):
                self._require_working()
                use = Use(uri, next(self._numbers))
                try:
                    yield use
                finally:
                    self.memory.settle(use)
        finally:
            self.memory.look_again()

    @asynccontextmanager
    async def turns_of(self, uri: SessionUri, other: SessionUri) -> AsyncIterator[Use]:
        """Hold two sessions alone. All who want two take them in one order, so nobody waits in a circle."""
        first, second = sorted((uri, other))
        async with self.turn(first) as one, AsyncExitStack() as stack:
            with self.memory.waiting_for_a_turn(one):
                two = await stack.enter_async_context(self.turn(second))
            use = one if one.uri == uri else two
            use.also = other
            yield use

    @asynccontextmanager
    async def woken(self, uri: SessionUri, emit: Emit) -> AsyncIterator[tuple[Use, Session]]:
        """Hold the session alone, awake."""
        async with self.turn(uri) as use:
            if await self.live(uri) is None:
                await self.bring_back(use, WakeOrder(), emit)
            yield use, self.awake[uri]

    async def room_for(self, use: Use, count: int, emit: Emit) -> Session:
        """The session, awake, once there is memory for that many tokens more in it. While the request waits for some,
        the session may have been put to sleep and woken, so that others could go on: then it is another object.

        Raises:
            MemoryBudgetExceeded: there can never be so much. MemoryBusy: too many requests wait. What a wake raises.
        """
        while True:
            live = self.awake.get(use.uri)
            if live is None:
                await self.bring_back(use, WakeOrder(), emit)
                continue
            growth = live.growth_bytes(len(live.state.tokens) + count, PREFILL_CHUNK_TOKENS)
            if await self.memory.reserve(use, growth):
                return live
            await to_the_end(self._give_way(live))

    async def room_aside(self, use: Use, row: IndexRow, *, times: int = 1) -> None:
        """Reserve memory to wake that version of a session beside all that is awake. times: for how many copies."""
        while not await self.memory.reserve(use, times * self._bytes_to_wake(row)):
            live = self.awake.get(use.uri)
            if live is not None:
                await to_the_end(self._give_way(live))

    async def live(self, uri: SessionUri) -> Session | None:
        """The session if it is awake; one that is superseded is so no more, for its sleep would hide a fuller one."""
        live = self.awake.get(uri)
        if live is not None and await self._hibernation.is_superseded(live):
            self.drop(uri)
            return None
        return live

    def admit(self, session: Session) -> None:
        """A new session is awake from now on."""
        self.awake[session.uri] = session

    def drop(self, uri: SessionUri) -> None:
        """Let a session's memory go, if it is awake."""
        self.awake.pop(uri, None)

    async def bring_back(self, use: Use, order: WakeOrder, emit: Emit, started: float | None = None) -> WakeResult:
        """Wake a session that is asleep. What has begun runs to its end even when the caller is cancelled.

        started: since when the report counts the seconds, by the monotonic clock; from now on if None.

        Raises:
            SessionNotFound, and what `Hibernation.wake` raises. MemoryBudgetExceeded, MemoryBusy: as `room_for`.
        """
        await self.memory.reserve(use, self._bytes_to_wake(self._row(use.uri, order.version)))
        use.woken = await to_the_end(self._bring_back(use.uri, order, emit, started or time.monotonic()))
        self.memory.settle(use)
        return use.woken

    def _row(self, uri: SessionUri, version: int | None) -> IndexRow | None:
        """A version as the index has it; None of one that it has not, as the wake will say."""
        newest = self.require_row(uri)
        if version in (None, newest.version):
            return newest
        return next((row for row in self._store.versions(uri) if row.version == version), None)

    def _bytes_to_wake(self, row: IndexRow | None) -> int:
        if row is None:
            return 0
        try:
            layout = self._model_named(row.model).layout
        except UnknownModel:
            return 0  # the wake will say so, before it takes any memory
        return layout.most_bytes(row.token_count, PREFILL_CHUNK_TOKENS)

    async def _bring_back(self, uri: SessionUri, order: WakeOrder, emit: Emit, started: float) -> WakeResult:
        latest = self.require_row(uri).version
        woken = await self._hibernation.wake(uri, order, self._model_named, emit)
        woken.session.rewound = order.version not in (None, latest)
        self.admit(woken.session)
        return listing.wake_result(
            woken.session,
            bytes_read=woken.bytes_read,
            tokens_prefilled=woken.session.state.computed_tokens,
            seconds=time.monotonic() - started,
            already_awake=False,
            verified=woken.verified,
            canary=woken.canary,
            canary_seconds=woken.canary_seconds,
        )

    async def put_away(self, live: Session, emit: Emit) -> Receipt | Durable:
        """Make a session durable and free its memory; one that is durable already is only let go, and its last
        snapshot is what is returned. The caller holds its turn, and sees it to the end.

        Raises:
            EmptyContext, and what `Hibernation.sleep` raises; the session then stays awake.
        """
        if live.durable is not None and not live.needs_sleep and await self._hibernation.is_kept(live):
            self.drop(live.uri)
            return live.durable
        receipt = await self.keep(live, emit)
        self.drop(live.uri)
        return receipt

    async def _put_away_idle(self, uri: SessionUri) -> bool:
        """Free the memory of a session whose turn is held; False if there is none to free any more."""
        live = await self.live(uri)
        if live is not None and live.can_be_put_away:
            await self.put_away(live, _ignore)
            await self._buffers.hand_back()
            return True
        return False

    async def _give_way(self, live: Session) -> None:
        """Put the session of a request that waits for memory to sleep, in its turn."""
        try:
            if await self._put_away_idle(live.uri):
                self.memory.slept_by_pressure += 1
        except Exception as error:  # noqa: BLE001 - it stays awake, and the first that waits is told why
            self.memory.could_not_sleep(live.uri, error)

    async def _idled(self, uri: SessionUri) -> None:
        """Put a session to sleep that nobody has used for long, unless somebody does now."""
        if uri in self.turns.in_use():
            return
        try:
            async with self.turns.take(uri):
                if await self._put_away_idle(uri):
                    self.memory.slept_by_idling += 1
        finally:
            self.memory.look_again()

    async def close(self) -> None:
        """Put no more sessions to sleep; those that are awake are forgotten."""
        if self._idling is not None:
            await self._idling.close()
        await self.memory.close()
        await self._buffers.close()
        self.awake.clear()

    async def keep(self, live: Session, emit: Emit, *, last: bool = False) -> Receipt:
        """Make a session durable; it stays in memory. The caller holds its turn. last: as of `Hibernation.sleep`.

        Raises:
            EmptyContext, and what `Hibernation.sleep` raises.
        """
        if not live.state.tokens:
            raise EmptyContext(
                f"{live.uri} has read nothing, so there is nothing to keep; append to it first.", session=str(live.uri)
            )
        return await self._hibernation.sleep(live, emit, last=last)

    async def keep_all(self) -> CloseReport:
        """Put every changed session to sleep while no new work is taken; none of them leaves memory."""
        self.memory.refuse_waiting(
            lambda: ServiceClosed("The daemon was told to stop, and has no memory to wait for; try again in a moment.")
        )
        slept, failed, empty = [], {}, []
        seen: set[SessionUri] = set()
        # Requests that had begun may wake sessions meanwhile: go on until every session that is awake, or whose turn
        # somebody had, has been seen. Those that still wait for a turn behind this one are refused when they get it.
        while uris := (self.awake.keys() | self.turns.in_use()) - seen:
            for uri in sorted(uris):
                try:
                    async with self.turns.take(uri, always=True):
                        seen.add(uri)
                        session = self.awake.get(uri)
                        if session is None:
                            continue
                        if not session.state.tokens:
                            empty.append(str(uri))
                            continue
                        if await self._keep_last(session):
                            slept.append(str(uri))
                except TorporError as error:
                    failed[str(uri)] = f"{error.code}: {error.message}"
                except Exception as error:  # noqa: BLE001 - one session's failure must not cost the others theirs
                    failed[str(uri)] = f"{type(error).__name__}: {error}"
                finally:
                    self.memory.look_again()
        return CloseReport(tuple(slept), failed, tuple(empty))

    async def _keep_last(self, session: Session) -> bool:
        """Make a session durable for the last time, unless its newest version is what a wake should give back."""
        if await self._hibernation.is_superseded(session):
            return False
        if not session.needs_sleep and await self._hibernation.is_kept(session):
            return False
        await self.keep(session, _ignore, last=True)
        return True

    def require_row(self, uri: SessionUri) -> IndexRow:
        """What the index has of the session's newest version.

        Raises:
            SessionNotFound: nothing.
        """
        row = self._store.find_session(uri)
        if row is None:
            resolve(str(uri), ())  # raises SessionNotFound: it went while this request waited for its turn
            raise AssertionError("unreachable")
        return row


def _ignore(_event: object) -> None:
    """For work that nobody watches."""
