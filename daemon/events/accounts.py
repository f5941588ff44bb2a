"""What one request cost: its tokens, and its seconds by stage, taken from the events that it causes.

An account is of the task of its request and of all that this begins. The event loop's alone.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from ...memvid.uri import SessionUri
from . import events

MAX_CLIENT_CHARS: Final = 48

Stage = Literal["waited_s", "durable_s"]

client: contextvars.ContextVar[str] = contextvars.ContextVar("client", default="")
"""Who asks, as far as that is told: the first word of an HTTP client's name, and the API that it speaks; empty on the
Unix socket."""

_OF_REQUEST: Final = frozenset({"asked", "save", "fork", "rewind", "fold"})
"""Causes of sleeps that a request asks for. What its turn costs to be durable is timed as a whole (`timed`)."""


@dataclass(slots=True, eq=False)
class Account:
    """A request under way. number: of the request, as events have it. session: that it reads or writes in, once that is
    known. noted_ns: when its prefix was looked at, by which the history of prefixes knows it. gone: sessions that are
    deleted meanwhile."""

    number: int
    verb: str
    client: str = ""
    session: SessionUri | None = None
    began: float = field(default_factory=time.monotonic)
    noted_ns: int | None = None
    read: int = 0
    taken_over: int = 0
    written: int = 0
    first_token_s: float | None = None
    waited_s: float = 0.0
    wake_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    durable_s: float = 0.0
    was_woken: bool = False
    code: str = ""
    gone: set[SessionUri] = field(default_factory=set)

    def take(self, event: events.Event) -> None:
        """Count an event that the request has caused."""
        match event:
            case events.PrefillEnded():
                self.session, self.read, self.read_s = (
                    event.session,
                    self.read + event.tokens,
                    self.read_s + event.seconds,
                )
            case events.DecodeEnded():
                self.session, self.written = event.session, self.written + event.tokens
                self.write_s += event.seconds
            case events.FirstToken():
                self.first_token_s = event.seconds if self.first_token_s is None else self.first_token_s
            case events.PrefixHit():
                self.taken_over += event.cached_tokens
                self.wake_s += event.seconds
            case events.WakeEnded() if event.cause in ("asked", "warm"):
                self.session, self.was_woken, self.wake_s = event.session, True, self.wake_s + event.seconds
            case events.MemoryGranted():
                self.waited_s += event.seconds
            case events.SleepEnded() if event.cause in _OF_REQUEST:
                self.session, self.durable_s = self.session or event.session, self.durable_s + event.seconds

    def note(self, session: SessionUri, at_ns: int) -> None:
        """Its prefix was looked at."""
        self.session, self.noted_ns = session, at_ns


current: contextvars.ContextVar[Account | None] = contextvars.ContextVar("account", default=None)
"""That of the request under way; None for the daemon's own work."""


@contextmanager
def timed(stage: Stage) -> Iterator[None]:
    """Count the time within as a stage of the request under way."""
    began, account = time.monotonic(), current.get()
    try:
        yield
    finally:
        if account is not None:
            setattr(account, stage, getattr(account, stage) + time.monotonic() - began)
