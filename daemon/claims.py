"""Requests as the memory's accounts know them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..memvid.uri import SessionUri
from .results import WakeResult


@dataclass(slots=True, eq=False)
class Claim:
    """One request that may take memory.

    uri: the session whose turn it holds; None of one that is for a model alone. number: its place among all, by when it
        came. woken: the report of the last wake that it needed.
    reserved: bytes that it may take; wanted: those that it waits for, with the answer that it then awaits: whether they
        are reserved, or else its session has to give way first. what: what they are for, if not for its session.
    unslept: why sessions could not make room for it. also: another session whose turn it holds.
    """

    uri: SessionUri | None
    number: int
    woken: WakeResult | None = None
    reserved: int = 0
    wanted: int = 0
    what: str | None = None
    answer: asyncio.Future[bool] | None = None
    unslept: dict[SessionUri, str] = field(default_factory=dict)
    also: SessionUri | None = None


@dataclass(slots=True, eq=False)
class Use(Claim):
    """A request that holds the turn of a session."""

    uri: SessionUri
