"""Whether the daemon takes requests, and work for sessions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum

from ..errors import ServiceClosed, StopDeadline


class Phase(IntEnum):
    """OPEN: all is taken. SLEEPING: told to stop, it puts its sessions to sleep, and may go on after that. STOPPING: it
    ends, and takes no work for sessions. CLOSED: it takes no request."""

    OPEN = 0
    SLEEPING = 1
    STOPPING = 2
    CLOSED = 3


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


class Door:
    """Refuses what is not taken any more. phase, stopping: set as the daemon stops; stopping: the limits of all sleeps
    from then on, even of those that had begun."""

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.stopping: LastSleep | None = None

    def begin_to_stop(self, phase: Phase, within_s: float) -> LastSleep:
        """Take less from now on. within_s: the time of a stop, which begins at the first call."""
        self.phase = max(self.phase, phase)
        if self.stopping is None:
            self.stopping = LastSleep(time.monotonic() + within_s)
        return self.stopping

    def go_on(self) -> None:
        """Take all again, behind a stop that was refused; the next one has its whole time again."""
        self.phase, self.stopping = Phase.OPEN, None

    @property
    def is_working(self) -> bool:
        """Whether the daemon takes work for sessions."""
        return self.phase is Phase.OPEN

    def require_working(self) -> None:
        """Raise ServiceClosed if the daemon takes no more work for sessions."""
        self.require_open()
        if self.phase is Phase.STOPPING:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
        if self.phase is Phase.SLEEPING:
            raise ServiceClosed("The daemon was told to stop, and puts its sessions to sleep; try again in a moment.")

    def require_open(self) -> None:
        """Raise ServiceClosed if the daemon takes no more requests."""
        if self.phase is Phase.CLOSED:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
