"""The orders of wakes, and of the last sleeps of a daemon."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import StopDeadline
from ..events.events import WakeCause
from ..sessions.sessions import Session


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """The order of a wake. version: None is the last one. at_token: how many of its tokens; None: all. strict: also
    refuse a session that another device, library or version computed. cause: for the events.
    """

    version: int | None = None
    at_token: int | None = None
    strict: bool = False
    cause: WakeCause = "asked"


def order_of_look(live: Session) -> WakeOrder | None:
    """The order that brings a look back where it stands; None for a session that is no look."""
    if not live.is_mere_look:
        return None
    assert live.durable is not None, "what is looked at has slept"
    return WakeOrder(live.durable.version, len(live.state.tokens) if live.is_cut_short else None)


@dataclass(frozen=True, slots=True)
class LastSleep:
    """A sleep of a daemon that stops. until: its deadline, by the monotonic clock; None without one."""

    until: float | None = None

    def share(self, seconds: float) -> float:
        """`seconds`, or a quarter of the time that is left if that is less."""
        return seconds if self.until is None else min(seconds, max(0.0, self.until - time.monotonic()) / 4)

    def require_time(self) -> None:
        """Raise StopDeadline once the time is over."""
        if self.until is not None and time.monotonic() >= self.until:
            raise StopDeadline(
                "The daemon stops, and the time that it has for that is over. Give it more with torpor serve "
                "--stop-within."
            )
