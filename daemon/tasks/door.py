"""Whether the daemon takes requests, and work for sessions."""

from __future__ import annotations

from enum import IntEnum

from ..errors import ServiceClosed


class Phase(IntEnum):
    """OPEN: all is taken. SLEEPING: told to stop, it puts its sessions to sleep, and may go on after that. STOPPING: it
    ends, and takes no work for sessions. CLOSED: it takes no request."""

    OPEN = 0
    SLEEPING = 1
    STOPPING = 2
    CLOSED = 3


class Door:
    """Refuses what is not taken any more. phase: set by the service as it stops."""

    phase = Phase.OPEN

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
