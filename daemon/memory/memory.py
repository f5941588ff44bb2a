"""The memory that models and sessions share: one budget, its use, and the requests that wait for free memory.

Rules:
- A request reserves memory before it takes any: all for what it reads, and for its answer step by step
  (`chat/answer_room.py`).
- Waiting requests are served in the order of arrival, those that stand back (`admission.py`) after the others. The
  first makes room: idle sessions go to sleep and idle models are unloaded, the least recently used first. Running
  requests that it waits for no longer stand back.
- A waiting request holds the turn of its session, and may hold the session's memory, or a model. It never waits for the
  memory of another waiting request: if all holders of a turn wait, the latest gives up its session's memory, and so on
  to the first, unless that one wants to grow its session. Then the models that they hold are unloaded. They get all of
  it back in their turn. So the first always goes on, or is refused because it could never fit.
- The budget does not cover the working memory of one model call: its activations, and one layer's keys and values twice
  while they grow (the engine makes one call at a time). Nor some weights that are in memory twice during a load
  (`models.PIECE_BYTES`).

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from ...memvid.disk.clock import now_ns
from ...memvid.units import format_bytes
from ...memvid.uri import SessionUri
from ...snapshot.memory import available_bytes
from ..api.process import MemoryInfo
from ..engine.admission import apart
from ..engine.buffers import Buffers
from ..errors import MemoryBudgetExceeded, MemoryBusy, sentence_of
from ..events.bus import Bus, code_of
from ..events.events import EvictionPlanned, EvictionRefused, MemoryAwaited, MemoryGranted, MemoryRefused, UnloadCause
from ..sessions.sessions import Session, Turns
from ..tasks.cancellation import to_the_end
from ..versions.orders import order_of_look
from .eviction import Resident, plan_eviction
from .line import Claim, Line
from .model_registry import Shelf

_LOG = logging.getLogger(__name__)

MAX_WAITING_FOR_MEMORY: Final = 256
"""Requests that may wait for memory. The next is refused, and nothing has happened (QX18)."""

MOST_LINGERING_S: Final = 10.0
"""How long requests wait for dropped weights that other code still holds."""

MAX_REASONS_TOLD: Final = 4
"""Sessions that a refusal names because they could not be put to sleep."""

DEFAULT_SHARE: Final = 0.7
"""The default share of available memory for sessions. The rest is for one model call, and for other programs."""


def default_budget(weights_bytes: int, unloaded_bytes: int = 0) -> int:
    """The models, and a share of the memory that is available beside them. unloaded_bytes: of the models that are not
    in memory yet."""
    return weights_bytes + int(DEFAULT_SHARE * max(0, available_bytes() - unloaded_bytes))


def require_models_fit(weights_bytes: int, budget: int) -> None:
    """Raise MemoryBudgetExceeded if the models alone take more than the budget."""
    if weights_bytes > budget:
        raise MemoryBudgetExceeded(
            f"The models take {format_bytes(weights_bytes)} of memory, and the budget is {format_bytes(budget)}. Give "
            "the daemon a larger memory budget, fewer or smaller models, or let those that are not needed together be "
            "loaded on use (--load use).",
            wanted_bytes=weights_bytes,
            held_bytes=0,
            weights_bytes=weights_bytes,
            budget_bytes=budget,
        )


Unload = Callable[[str, UnloadCause, Callable[[], None]], Awaitable[object]]


@dataclass(eq=False, repr=False)
class Memory:
    """The accounts. budget: bytes for all; shelf: the models.

    awake, turns: the sessions in memory, and their users. trees: bytes of each tree of branches; they leave only
    when they are pruned. put_away: frees the memory of a session in its turn, and tells whether it did. unload:
    frees the memory of a model that no session needs; what it gets is called, on any thread, once the memory is free.
    bus: gets events of waits and refusals.
    line: the requests that wait for memory. numbers: the places of requests, in the order of arrival.
    slept_by_pressure, slept_by_idling: how many sessions have gone to sleep without a request for it.

    Raises MemoryBudgetExceeded: the models alone take more."""

    budget: int
    _shelf: Shelf
    _awake: Mapping[SessionUri, Session]
    _turns: Turns
    _put_away: Callable[[SessionUri], Awaitable[bool]]
    _unload: Unload
    _buffers: Buffers
    _bus: Bus

    def __post_init__(self) -> None:
        self.numbers = itertools.count()
        self.trees: dict[int, int] = {}
        require_models_fit(self._shelf.weights_bytes(), self.budget)
        self._reserved = 0
        self.line = Line(self._turns)
        self._evicting: asyncio.Task[None] | None = None
        self._looks_again_at = 0.0
        self.slept_by_pressure = 0
        self.slept_by_idling = 0

    def info(self) -> MemoryInfo:
        return MemoryInfo(
            budget_bytes=self.budget,
            weights_bytes=self._shelf.weights_bytes(),
            sessions_bytes=self._sessions(),
            branches_bytes=sum(self.trees.values()),
            reserved_bytes=self._reserved,
            waiting=len(self.line.waiting),
            slept_by_pressure=self.slept_by_pressure,
            slept_by_idling=self.slept_by_idling,
        )

    @property
    def for_sessions(self) -> int:
        """The bytes of the budget without the models."""
        return self.budget - self._shelf.weights_bytes()

    async def resize(self, budget: int) -> None:
        """Set another budget. If more is in use, idle sessions and models leave."""
        self.budget = budget
        self._keep_to_budget()
        self.look_again()
        await self._buffers.bound(max(0, self.for_sessions))

    def _keep_to_budget(self) -> None:
        """Evict idle sessions and models if more is in use than the budget, unless an eviction is running."""
        if self._free < 0 and self._evicting is None:
            self._evicting = apart(self._shrink())

    async def reserve(self, use: Claim, wanted: int, *, grows: bool = False) -> bool:
        """Reserve bytes for a request, and wait for them if needed. grows: they are for its own session.

        False: the request must put its own session to sleep, so that others can go on, or itself if its session is not
            to grow. Then it may ask again, and keeps its place.

        Raises MemoryBudgetExceeded: they can never fit. MemoryBusy: too many wait. Nothing is reserved then."""
        if wanted <= 0:
            return True
        use.grows = grows
        self._require_possible(use, wanted)
        is_crowded = len(self.line.waiting) >= MAX_WAITING_FOR_MEMORY
        # An answer that has begun waits behind any number.
        if is_crowded and not use.reserved and use.number > max(each.number for each in self.line.waiting):
            raise MemoryBusy(f"{len(self.line.waiting)} requests already wait for memory; send this one again later.")
        use.wanted, use.answer = wanted, asyncio.get_running_loop().create_future()
        self.line.waiting.append(use)
        try:
            self.look_again()
            if use.answer.done():
                return await use.answer
            return await self._wait(use, use.answer)
        finally:
            if use in self.line.waiting:
                self.line.waiting.remove(use)
            use.answer = None
            if use.passed_at is not None:
                use.request.stood_back_s += time.monotonic() - use.passed_at
                use.passed_at = None
            self.look_again()

    async def take(self, claim: Claim, wanted: int) -> None:
        """Reserve bytes for a request. If others must go on first, its awake session gives way. Raises as `reserve`."""
        while not await self.reserve(claim, wanted):
            live = self._session_of(claim)
            if live is not None:
                await self.give_way(claim, live, grows=False)

    async def give_way(self, claim: Claim, live: Session, *, grows: bool) -> None:
        """Put the session of a waiting request to sleep, in its turn; runs to its end even if the caller is cancelled.
        grows: the memory is for that session."""

        async def put_away() -> None:
            claim.look = order_of_look(live)
            try:
                if await self._put_away(live.uri):
                    self.slept_by_pressure += 1
            except Exception as error:  # noqa: BLE001 - it stays awake, and waiting requests are told why
                self.could_not_sleep(live.uri, error, None if grows else claim)

        await to_the_end(apart(put_away()))

    def take_free(self, use: Claim, wanted: int) -> bool:
        """Reserve bytes if they are free now and no request waits for memory: no session has to go for them."""
        if self.line.waiting or wanted > self._free:
            return False
        use.reserved += wanted
        self._reserved += wanted
        return True

    async def _wait(self, use: Claim, answer: asyncio.Future[bool]) -> bool:
        start, wanted = time.monotonic(), use.wanted
        use.request.waits = True
        self._bus.publish(MemoryAwaited(use.uri, wanted, max(0, self._free), self.line.waiting.index(use)))
        granted = await answer
        self._bus.publish(MemoryGranted(use.uri, wanted, granted, time.monotonic() - start))
        return granted

    def settle(self, use: Claim) -> None:
        """End a request's reservation: from now on its session counts with its real size."""
        self._reserved -= use.reserved
        use.reserved = 0
        session = self._session_of(use)
        if session is not None:
            session.stay = replace(
                session.stay, held_bytes=session.resident_bytes, last_used=time.monotonic(), used_ns=now_ns()
            )

    def release(self, use: Claim, reserved: int) -> None:
        """Give back a part of a reservation that is free, or counted elsewhere by now."""
        use.reserved -= reserved
        self._reserved -= reserved
        self.look_again()

    @contextmanager
    def apart(self, number: int) -> Iterator[Claim]:
        """A claim without a session's turn. number: its place."""
        claim = Claim(None, number)
        self.line.apart.add(claim)
        try:
            yield claim
        finally:
            self.line.apart.discard(claim)
            self.settle(claim)
            self.look_again()

    @contextmanager
    def waiting_for_another(self, use: Claim, waits: Callable[[], bool]) -> Iterator[None]:
        """Note that a request waits for another one with a turn or a load, and frees nothing before its end. waits:
        whether it still does; it may hear of the end a moment later."""
        self.line.stalled[use] = waits
        self.look_again()
        try:
            yield
        finally:
            del self.line.stalled[use]

    def could_not_sleep(self, uri: SessionUri, error: Exception, use: Claim | None = None) -> None:
        """Note that a session could not make room; the first waiting request looks for others. use: the claim of that
        session, if it needs the room too but does not wait now."""
        why = sentence_of(error)
        _LOG.warning("%s could not be put to sleep to make room: %s", uri, why)
        self._bus.publish(EvictionRefused(uri, code_of(error)))
        for claim in (*self.line.waiting[:1], *([] if use is None else [use])):
            claim.unslept[uri] = why

    def look_again(self) -> None:
        """Serve the first waiting request. To be called whenever memory or a turn has become free."""
        self.line.order()
        while self.line.waiting:
            first = self.line.waiting[0]
            assert first.answer is not None
            if first.answer.done():  # cancelled just now
                self.line.waiting.pop(0)
            elif first.wanted <= self._free:
                self._grant(first)
            elif not self._can_wait(first):
                self.line.refuse(first, self._refusal(first, first.wanted))
            else:
                return

    async def close(self) -> None:
        """Wait for running sleeps."""
        while self._evicting is not None:
            await self._evicting

    @property
    def _free(self) -> int:
        held_bytes = self._shelf.weights_bytes() + self._sessions() + sum(self.trees.values())
        return self.budget - held_bytes - self._reserved

    def _sessions(self) -> int:
        return sum(session.stay.held_bytes for session in self._awake.values())

    def _grant(self, use: Claim) -> None:
        assert use.answer is not None
        self.line.waiting.remove(use)
        use.reserved += use.wanted
        self._reserved += use.wanted
        use.unslept.clear()
        use.answer.set_result(True)

    def _can_wait(self, first: Claim) -> bool:
        """Whether running work may free memory; begins an eviction if none does."""
        if self._evicting is not None:
            return True
        if plan := self._plan(first):
            self._tell_plan(first, plan)
            self._evicting = apart(self._evict())
            return True
        if self.line.others_at_work(first):
            return True
        for use in reversed(self.line.waiting[1:] if first.grows else self.line.waiting):
            session = self._session_of(use)
            if session is not None and session.state.tokens and session.uri not in first.unslept:
                self.line.waiting.remove(use)
                if use.answer is not None and not use.answer.done():
                    use.answer.set_result(False)
                return True
        if plan := self._plan(first, self.line.waiting[1:])[:1]:
            self._tell_plan(first, plan)
            self._evicting = apart(self._unload_held())
            return True
        return self._lingers()

    def _lingers(self) -> bool:
        """Whether dropped weights are about to be freed: other code holds them for a moment. Looks again when they
        should be gone."""
        now, until = time.monotonic(), self._shelf.let_go_last() + MOST_LINGERING_S
        if now < until and self._looks_again_at < until:
            self._looks_again_at = until
            asyncio.get_running_loop().call_later(until - now + 0.05, self.look_again)
        return now < until

    def _tell_plan(self, first: Claim, plan: Collection[SessionUri | str]) -> None:
        models = sum(isinstance(each, str) for each in plan)
        free = max(0, self._free)
        self._bus.publish(EvictionPlanned(first.uri, first.wanted, free, len(plan) - models, models))

    def _session_of(self, use: Claim) -> Session | None:
        return None if use.uri is None else self._awake.get(use.uri)

    def _plan(self, first: Claim, yielding: Collection[Claim] = ()) -> tuple[SessionUri | str, ...]:
        """The sessions and models to evict. yielding: waiting requests that may lose the models they hold."""
        held_bytes = self.budget - self._free
        residents, models = self._residents(first, yielding), self._shelf.residents(yielding)
        return plan_eviction(residents, held_bytes, first.wanted, self.budget, models)

    def _residents(self, first: Claim, yielding: Collection[Claim]) -> Iterator[Resident]:
        with_turn = self._turns.in_use()
        in_use = with_turn - {claim.uri for claim in yielding}
        for uri, session in self._awake.items():
            if not session.state.tokens and uri not in in_use:
                continue  # it takes no memory, and gets its model back at its next use
            stays = uri in with_turn or uri in first.unslept
            last_used = max(session.stay.last_used, session.stay.awake_until)
            yield Resident(uri, session.stay.held_bytes, last_used, stays, session.model.name)

    async def _evict(self) -> None:
        """Evict idle sessions and models one by one, while the first waiting request needs it."""
        try:
            while (
                self.line.waiting
                and self.line.waiting[0].wanted > self._free
                and (plan := self._plan(self.line.waiting[0]))
            ):
                await self._let_leave(plan[0])
                self.look_again()
        finally:
            self._evicting = None
            self._keep_to_budget()
            self.look_again()

    async def _shrink(self) -> None:
        """Evict idle sessions and models until the budget holds the rest."""
        no_request = Claim(None, -1)
        try:
            while self._free < 0 and (plan := self._plan(no_request)):
                await self._let_leave(plan[0])
                if not isinstance(plan[0], str) and plan[0] in self._awake:
                    no_request.unslept[plan[0]] = "it stays awake"
        finally:
            self._evicting = None
            self.look_again()

    async def _unload_held(self) -> None:
        """Unload a model that only requests behind the first one hold."""
        try:
            first = self.line.waiting[0] if self.line.waiting else None
            plan = self._plan(first, self.line.waiting[1:]) if first and first.wanted > self._free else ()
            if plan:
                await self._let_leave(plan[0])
        finally:
            self._evicting = None
            self._keep_to_budget()
            self.look_again()

    async def _let_leave(self, chosen: SessionUri | str) -> None:
        if isinstance(chosen, str):
            await self._unload(chosen, "pressure", self.look_again)
            return
        async with self._turns.take(chosen):
            try:
                await self._put_away(chosen)
                self.slept_by_pressure += 1
            except Exception as error:  # noqa: BLE001 - one session that cannot sleep must not keep others from it
                self.could_not_sleep(chosen, error)

    def _require_possible(self, use: Claim, wanted: int) -> None:
        """Refuse a request that would not fit even with all sessions asleep that can be; none is put to sleep for
        it."""
        grown = self._session_of(use) if use.grows else None
        needed, held_bytes = (
            ({grown.model.name}, grown.stay.held_bytes + use.reserved) if grown is not None else (set(), 0)
        )
        if held_bytes + self._shelf.staying_bytes(needed, use) + wanted > self.budget:
            raise self._refusal(use, wanted)

    def _refusal(self, use: Claim, wanted: int) -> MemoryBudgetExceeded:
        held_bytes, weights = self.budget - self._free, self._shelf.weights_bytes()
        self._bus.publish(MemoryRefused(use.uri, wanted, held_bytes, self.budget))
        unslept = list(use.unslept.items())[:MAX_REASONS_TOLD]
        # The message goes to the client, who may know nothing of the sessions of another namespace.
        own = [(uri, why) for uri, why in unslept if use.uri is not None and uri.namespace == use.uri.namespace]
        reasons = [f"{uri} cannot be put to sleep ({why})" for uri, why in own]
        why = f" {'; '.join(reasons)}." if reasons else ""
        slept = ", put sessions to sleep" if self._sessions() else ""
        return MemoryBudgetExceeded(
            f"{use.what or use.uri} needs {format_bytes(wanted)} more memory. The budget is "
            f"{format_bytes(self.budget)}; {format_bytes(held_bytes)} of it is taken, {format_bytes(weights)} by the "
            f"models.{why} Ask for fewer tokens{slept}, or give the daemon a larger memory budget.",
            session=None if use.uri is None else str(use.uri),
            wanted_bytes=wanted,
            held_bytes=held_bytes,
            weights_bytes=weights,
            budget_bytes=self.budget,
            unslept={str(uri): why for uri, why in unslept},
        )
