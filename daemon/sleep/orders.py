"""The orders of a wake, and of the sleeps of a daemon that stops."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import StopDeadline
from ..events.events import WakeCause


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """The order of a wake. version: the last one if None; at_token: how many of its tokens, all if None.

    strict: refuse what was computed by another device, library or version too. hashing: hash all that is read, whatever
        the daemon trusts: what is written anew from it would seal a flipped bit with a digest of its own. cause: what
        for, as it is told.
    """

    version: int | None = None
    at_token: int | None = None
    strict: bool = False
    hashing: bool = False
    cause: WakeCause = "asked"

    @property
    def may_recompute(self) -> bool:
        """Whether it is to be a session that somebody uses; for what else is read of it, what is stored is wanted."""
        return self.cause in ("asked", "warm") and not self.hashing


@dataclass(frozen=True, slots=True)
class LastSleep:
    """A sleep of a daemon that stops. until: its deadline, by the monotonic clock; None without one."""

    until: float | None = None

    def share(self, seconds: float) -> float:
        """So many seconds, or a quarter of those that are left, if that is less."""
        return seconds if self.until is None else min(seconds, max(0.0, self.until - time.monotonic()) / 4)

    def require_time(self) -> None:
        """Raises StopDeadline once the time is over."""
        if self.until is not None and time.monotonic() >= self.until:
            raise StopDeadline(
                "The daemon stops, and the time that it has for that is over. Give it more with torpor serve "
                "--stop-within."
            )
