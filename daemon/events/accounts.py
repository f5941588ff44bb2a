"""What one request cost: its tokens, and its seconds by stage, taken from the events that it causes.

An account is of the task of its request and of all that this begins. The event loop's alone.
"""

from __future__ import annotations

import contextvars
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...memvid.uri import SessionUri
from . import events

MAX_CLIENT_CHARS: Final = 48

Stage = Literal["waited_seconds", "durable_seconds"]

Work = Literal["read", "write"]

_TOKENS: Final[dict[Work, str]] = {"read": "read_tokens", "write": "written_tokens"}

client: contextvars.ContextVar[str] = contextvars.ContextVar("client", default="")
"""Who asks, as far as that is told: the first word of an HTTP client's name, and the API that it speaks; empty on the
Unix socket."""

_OF_REQUEST: Final = frozenset({"asked", "save", "fork", "rewind", "fold"})
"""Causes of sleeps that a request asks for. What its turn costs to be durable is timed as a whole (`timed`)."""


@dataclass(slots=True, eq=False)
class Account:
    """A request under way. number: of the request, as events have it. session: that it reads or writes in, once that is
    known. noted_ns: when its prefix was looked at, by which the history of prefixes knows it. spent: tokens, and
    seconds of stages, by the fields of `RequestCost`, but for what `judge` tells. gone: sessions that are deleted
    meanwhile."""

    number: int
    verb: str
    client: str = ""
    session: SessionUri | None = None
    began: float = field(default_factory=time.monotonic)
    noted_ns: int | None = None
    spent: dict[str, Any] = field(default_factory=lambda: defaultdict(int))
    first_token_s: float | None = None
    was_woken: bool = False
    code: str = ""
    gone: set[SessionUri] = field(default_factory=set)

    def take(self, event: events.Event) -> None:
        """Count an event that the request has caused."""
        spent = self.spent
        match event:
            case events.PrefillEnded():
                self.did("read", event.session, event.tokens, event.seconds)
            case events.DecodeEnded():
                self.did("write", event.session, event.tokens, event.seconds)
            case events.FirstToken():
                self.first_token_s = event.seconds if self.first_token_s is None else self.first_token_s
            case events.PrefixHit():
                spent["taken_over_tokens"] += event.cached_tokens
                spent["wake_seconds"] += event.seconds
            case events.WakeEnded() if event.cause in ("asked", "warm"):
                self.session, self.was_woken = event.session, True
                spent["wake_seconds"] += event.seconds
            case events.MemoryGranted():
                spent["waited_seconds"] += event.seconds
            case events.SleepEnded() if event.cause in _OF_REQUEST:
                self.session = self.session or event.session
                spent["durable_seconds"] += event.seconds

    def did(self, work: Work, session: SessionUri | None, tokens: int, seconds: float) -> None:
        """It read or wrote so many tokens."""
        self.session = session
        self.spent[_TOKENS[work]] += tokens
        self.spent[f"{work}_seconds"] += seconds

    def note(self, session: SessionUri, at_ns: int) -> None:
        """Its prefix was looked at."""
        self.session, self.noted_ns = session, at_ns


current: contextvars.ContextVar[Account | None] = contextvars.ContextVar("account", default=None)
"""That of the request under way; None for the daemon's own work."""


def note_recomputed(tokens: int, because: str | None = None) -> None:
    """The request under way has read so many tokens again that its sessions had in their places."""
    if tokens and (account := current.get()) is not None:
        account.spent["read_tokens"] += tokens
        account.spent["recomputed_tokens"] += tokens
        account.spent["recomputed_because"] = because or ""


def recomputed_tokens() -> int:
    """How many tokens the request under way has read again that its sessions had in their places."""
    account = current.get()
    return 0 if account is None else int(account.spent["recomputed_tokens"])


@contextmanager
def timed(stage: Stage) -> Iterator[None]:
    """Count the time within as a stage of the request under way."""
    began, account = time.monotonic(), current.get()
    try:
        yield
    finally:
        if account is not None:
            account.spent[stage] += time.monotonic() - began
