"""Requests as the memory's accounts know them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ...memvid.uri import SessionUri
from ..api.waking import WakeResult
from ..engine.admission import Request, current


@dataclass(slots=True, eq=False)
class Claim:
    """One request that may take memory.

    uri: the session whose turn it holds; None of one that is for a model alone. number: its place among all, by when it
        came. woken: the report of the last wake that it needed.
    reserved: bytes that it may take; wanted: those that it waits for, with the answer that it then awaits: whether they
        are reserved, or else its session has to give way first. grows: whether they are for its session, which then
        stays if it can; what: what they are for, if that is something else.
    unslept: why sessions could not make room for it. also: another session whose turn it holds.
    request: whose it is. passed_at: since when others go before it that came later, by the monotonic clock.
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
    request: Request = field(default_factory=current)
    passed_at: float | None = None

    def stands_back(self, now: float) -> bool:
        """Whether those that are in more of a hurry get memory before it."""
        return self.request.stands_back(0.0 if self.passed_at is None else now - self.passed_at)


@dataclass(slots=True, eq=False)
class Use(Claim):
    """A request that holds the turn of a session."""

    uri: SessionUri
