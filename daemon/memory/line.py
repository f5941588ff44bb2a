"""Requests in the memory's accounts, the order of waiting ones, and whether running work may free memory for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import TorporError
from ...memvid.uri import SessionUri
from ..api.waking import WakeResult
from ..engine.admission import Request, current
from ..sessions.sessions import Turns
from ..versions.orders import WakeOrder


@dataclass(slots=True, eq=False)
class Claim:
    """One request that may take memory.

    uri: the session that it holds the turn of; None if it needs only a model. number: its place in the order of
    arrival. woken: the report of the last wake that it needed.
    reserved: bytes that it may take. wanted: bytes that it waits for. answer: whether they are reserved; if not, its
    session has to give way first. grows: whether they are for its session, which then stays if it can. what: their
    purpose, if that is something else.
    unslept: why sessions could not make room for it. also: another session that it holds the turn of. look: where its
    session stood when it gave way, if that was a look: this request has it back there.
    request: its request. passed_at: since when later requests go before it, by the monotonic clock.
    """

    uri: SessionUri | None
    number: int
    woken: WakeResult | None = None
    reserved: int = 0
    wanted: int = 0
    grows: bool = False
    what: str | None = None
    answer: asyncio.Future[bool] | None = None
    unslept: dict[SessionUri, str] = field(default_factory=dict)
    also: SessionUri | None = None
    look: WakeOrder | None = None
    request: Request = field(default_factory=current)
    passed_at: float | None = None

    def stands_back(self, now: float) -> bool:
        """Whether other requests get memory before it."""
        return self.request.stands_back(0.0 if self.passed_at is None else now - self.passed_at)


@dataclass(slots=True, eq=False)
class Use(Claim):
    """A request that holds the turn of a session."""

    uri: SessionUri


class Line:
    """The waiting requests, in order.

    stalled: requests that wait for another one, each with a function that tells whether it still does. apart: requests
    without a session's turn.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.waiting: list[Claim] = []
        self.stalled: dict[Claim, Callable[[], bool]] = {}
        self.apart: set[Claim] = set()

    def order(self) -> None:
        """Sort by arrival, with requests that stand back behind the others."""
        now = time.monotonic()
        self.waiting.sort(key=lambda each: (each.stands_back(now), each.number))
        last = -1
        for each in self.waiting:
            last = max(last, each.number)
            if each.number < last and each.passed_at is None:
                each.passed_at = now

    def refuse(self, use: Claim, error: TorporError) -> None:
        """Take a request out of the line, with an error."""
        self.waiting.remove(use)
        if use.answer is not None and not use.answer.done():
            use.answer.set_exception(error)

    def refuse_all(self, error: Callable[[], TorporError]) -> None:
        for use in tuple(self.waiting):
            self.refuse(use, error())

    def others_at_work(self, first: Claim) -> bool:
        """Whether a request runs that waits for no other: at its end it frees its memory. The first waiting request
        lifts such requests to its own priority."""
        still = {*self.waiting, *(claim for claim, waits in self.stalled.items() if waits())}
        turns = {uri for claim in still for uri in (claim.uri, claim.also)}
        working, apart_from_all = self._turns.in_use() - turns, self.apart - still
        if not first.stands_back(time.monotonic()):
            for uri in working:
                self._turns.lift(uri)
        return bool(working or apart_from_all)
