"""The memory that models and sessions share: one budget, what is taken of it, and who waits for some to become free.

Rules:
- What a request may take is reserved before it takes it: nothing is allocated on the hope that it will fit.
- Requests that wait are served in the order in which they came. The first makes room: idle sessions go to sleep, the
  least recently used first, none that is in use.
- A request that waits holds the turn of its session, and may hold the session's memory. It never waits for the memory
  of another one that waits: where all that hold a turn wait, the latest of them gives its session's memory up, and has
  it back when its time comes. So the first always goes on, or is refused because it could never fit.
- Beside the budget there is what one model call works with, for the engine makes one call at a time: its activations,
  and one layer's keys and values twice while they grow.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ..errors import TorporError
from ..memvid.sizes import format_bytes
from ..memvid.uri import SessionUri
from ..snapshot.memory import available_bytes
from .errors import MemoryBudgetExceeded, MemoryBusy
from .eviction import Resident, plan_eviction
from .results import MemoryInfo, WakeResult
from .sessions import Session, Turns

_LOG = logging.getLogger(__name__)

MAX_WAITING_FOR_MEMORY: Final = 256
"""Requests that may wait for memory. The next is told so, and nothing has happened (QX18)."""

MAX_REASONS_TOLD: Final = 4
"""Sessions of which a refusal says why they could not be put to sleep."""

DEFAULT_SHARE: Final = 0.7
"""What sessions may take of the memory that is there, unless told otherwise. The rest is for what one model call works
with, and for everybody else on the machine."""


def default_budget(weights_bytes: int) -> int:
    """The models, which are there already, and a share of what is available beside them."""
    return weights_bytes + int(DEFAULT_SHARE * available_bytes())


@dataclass(slots=True, eq=False)
class Use:
    """One request that holds the turn of a session.

    number: its place among all, by when it got its turn. woken: the report of the last wake that it needed.
    reserved: bytes that it may take; wanted: those that it waits for, with the answer that it then awaits: whether they
        are reserved, or else its session has to give way first. unslept: why sessions could not make room for it.
    also: another session whose turn it holds.
    """

    uri: SessionUri
    number: int
    woken: WakeResult | None = None
    reserved: int = 0
    wanted: int = 0
    answer: asyncio.Future[bool] | None = None
    unslept: dict[SessionUri, str] = field(default_factory=dict)
    also: SessionUri | None = None


class Memory:
    """The accounts. budget: bytes for all; weights: tells those of the models now.

    awake, turns: the sessions in memory, and who uses them; put_away: frees the memory of one whose turn is held.
    slept_by_pressure, slept_by_idling: how many sessions have gone to sleep without anybody's asking.

    Raises:
        MemoryBudgetExceeded: the models alone take more.
    """

    def __init__(
        self,
        budget: int,
        weights: Callable[[], int],
        awake: Mapping[SessionUri, Session],
        turns: Turns,
        put_away: Callable[[SessionUri], Awaitable[object]],
    ) -> None:
        self._budget = budget
        self._weights = weights
        self._awake = awake
        self._turns = turns
        self._put_away = put_away
        if weights() > budget:
            raise MemoryBudgetExceeded(
                f"The models take {format_bytes(weights())} of memory, and the budget is {format_bytes(budget)}. Start "
                "the daemon with a larger --memory-budget, or with fewer or smaller models.",
                wanted_bytes=weights(),
                held_bytes=0,
                weights_bytes=weights(),
                budget_bytes=budget,
            )
        self._reserved = 0
        self._waiting: list[Use] = []
        self._stalled: set[SessionUri] = set()
        self._evicting: asyncio.Task[None] | None = None
        self.slept_by_pressure = 0
        self.slept_by_idling = 0

    def info(self) -> MemoryInfo:
        """What is taken, and by whom."""
        return MemoryInfo(
            budget_bytes=self._budget,
            weights_bytes=self._weights(),
            sessions_bytes=self._sessions(),
            reserved_bytes=self._reserved,
            waiting=len(self._waiting),
            slept_by_pressure=self.slept_by_pressure,
            slept_by_idling=self.slept_by_idling,
        )

    @property
    def for_sessions(self) -> int:
        """What the budget leaves beside the models."""
        return self._budget - self._weights()

    async def reserve(self, use: Use, wanted: int) -> bool:
        """Reserve that many bytes for a request, waiting for them if need be.

        False: the request's own session has to be put to sleep, so that others can go on; then it may ask again, and
        keeps its place.

        Raises:
            MemoryBudgetExceeded: they can never be had. MemoryBusy: too many wait. Nothing is reserved then.
        """
        if wanted <= 0:
            return True
        self._require_possible(use, wanted)
        if len(self._waiting) >= MAX_WAITING_FOR_MEMORY and use.number > self._waiting[-1].number:
            raise MemoryBusy(f"{len(self._waiting)} requests already wait for memory; send this one again later.")
        use.wanted, use.answer = wanted, asyncio.get_running_loop().create_future()
        insort(self._waiting, use, key=lambda each: each.number)
        try:
            self.look_again()
            return await use.answer
        finally:
            if use in self._waiting:
                self._waiting.remove(use)
            use.answer = None
            self.look_again()

    def settle(self, use: Use) -> None:
        """What a request has reserved is taken or free: from now on its session counts with what it takes."""
        self._reserved -= use.reserved
        use.reserved = 0
        session = self._awake.get(use.uri)
        if session is not None:
            session.held_bytes, session.last_used = session.resident_bytes, time.monotonic()

    @contextmanager
    def waiting_for_a_turn(self, use: Use) -> Iterator[None]:
        """A request waits for the turn of another session: it frees nothing before the one who has that turn does."""
        self._stalled.add(use.uri)
        self.look_again()
        try:
            yield
        finally:
            self._stalled.discard(use.uri)

    def refuse_waiting(self, error: Callable[[], TorporError]) -> None:
        """Tell all that wait that they do so in vain."""
        for use in tuple(self._waiting):
            self._end(use, error())

    def could_not_sleep(self, uri: SessionUri, error: Exception) -> None:
        """A session that was to make room is still in memory; the first that waits looks for others."""
        why = f"{error.code}: {error.message}" if isinstance(error, TorporError) else f"{type(error).__name__}: {error}"
        _LOG.warning("%s could not be put to sleep to make room: %s", uri, why)
        if self._waiting:
            self._waiting[0].unslept[uri] = why

    def look_again(self) -> None:
        """See to the first that waits. To be called whenever memory or a turn has become free."""
        while self._waiting:
            first = self._waiting[0]
            assert first.answer is not None
            if first.answer.done():  # given up in this very moment
                self._waiting.pop(0)
            elif first.wanted <= self._free:
                self._grant(first)
            elif not self._can_wait(first):
                self._end(first, self._refusal(first, first.wanted))
            else:
                return

    async def close(self) -> None:
        """Wait for what is being put to sleep."""
        if self._evicting is not None:
            await self._evicting

    @property
    def _free(self) -> int:
        return self._budget - self._weights() - self._sessions() - self._reserved

    def _sessions(self) -> int:
        return sum(session.held_bytes for session in self._awake.values())

    def _grant(self, use: Use) -> None:
        assert use.answer is not None
        self._waiting.remove(use)
        use.reserved += use.wanted
        self._reserved += use.wanted
        use.unslept.clear()
        use.answer.set_result(True)

    def _end(self, use: Use, error: TorporError) -> None:
        self._waiting.remove(use)
        if use.answer is not None and not use.answer.done():
            use.answer.set_exception(error)

    def _can_wait(self, first: Use) -> bool:
        """Whether something is under way that may free memory; if nothing was, it is begun."""
        if self._evicting is not None:
            return True
        if self._plan(first):
            self._evicting = asyncio.ensure_future(self._evict())
            return True
        waiting = {uri for use in self._waiting for uri in (use.uri, use.also)}
        if self._turns.in_use() - waiting - self._stalled:
            return True
        for use in reversed(self._waiting[1:]):
            session = self._awake.get(use.uri)
            if session is not None and session.can_be_put_away and use.uri not in first.unslept:
                self._waiting.remove(use)
                if use.answer is not None and not use.answer.done():
                    use.answer.set_result(False)
                return True
        return False

    def _plan(self, first: Use) -> tuple[SessionUri, ...]:
        held = self._budget - self._free
        return plan_eviction(self._residents(first), held, first.wanted, self._budget).sessions

    def _residents(self, first: Use) -> Iterator[Resident]:
        in_use = self._turns.in_use()
        for uri, session in self._awake.items():
            stays = uri in in_use or uri in first.unslept or not session.can_be_put_away
            yield Resident(uri, session.held_bytes, session.last_used, stays)

    async def _evict(self) -> None:
        """Put idle sessions to sleep, one after the other, as long as the first that waits needs it."""
        try:
            while self._waiting and self._waiting[0].wanted > self._free and (chosen := self._plan(self._waiting[0])):
                async with self._turns.take(chosen[0]):
                    await self._evict_one(chosen[0])
                self.look_again()
        finally:
            self._evicting = None
            self.look_again()

    async def _evict_one(self, uri: SessionUri) -> None:
        try:
            await self._put_away(uri)
            self.slept_by_pressure += 1
        except Exception as error:  # noqa: BLE001 - one session that cannot sleep must not keep others from it
            self.could_not_sleep(uri, error)

    def _require_possible(self, use: Use, wanted: int) -> None:
        """Refuse at once what could not be had if all that can sleep slept: nothing is put to sleep for it."""
        stays = sum(
            session.held_bytes for uri, session in self._awake.items() if uri == use.uri or not session.can_be_put_away
        )
        if self._weights() + stays + wanted > self._budget:
            raise self._refusal(use, wanted)

    def _refusal(self, use: Use, wanted: int) -> MemoryBudgetExceeded:
        held = self._budget - self._free
        looks = [str(uri) for uri, session in self._awake.items() if session.is_mere_look and uri != use.uri]
        told = list(use.unslept.items())[:MAX_REASONS_TOLD]
        reasons = [f"{uri} cannot be put to sleep ({why})" for uri, why in told]
        if looks:
            reasons.append(f"{', '.join(looks[:MAX_REASONS_TOLD])} stays awake at the earlier token it was woken at")
        why = f" {'; '.join(reasons)}." if reasons else ""
        return MemoryBudgetExceeded(
            f"{use.uri} needs {format_bytes(wanted)} of memory more. The budget is {format_bytes(self._budget)}, of "
            f"which {format_bytes(held)} are taken, {format_bytes(self._weights())} by the models.{why} Ask for fewer "
            "tokens, put sessions to sleep, or start the daemon with a larger --memory-budget.",
            session=str(use.uri),
            wanted_bytes=wanted,
            held_bytes=held,
            weights_bytes=self._weights(),
            budget_bytes=self._budget,
            unslept={str(uri): why for uri, why in told},
        )
