"""How many files this process may open, and so how many connections it can serve.

Raises the system's limit as far as allowed, and refuses one that is too low for a daemon.
"""

from __future__ import annotations

import resource
from typing import Final

from ..errors import TooFewDescriptors
from ..limits import ServerLimits

BESIDE_CONNECTIONS: Final = 160
"""For the store, models being loaded, new clients, and the interpreter."""

FEWEST: Final = 200

_ENOUGH: Final = 65_536
"""More than any daemon needs; some systems do not take "unlimited" as a soft limit."""


def raise_limit() -> int:
    """Raise the limit of open files as far as allowed, and return it. Raises TooFewDescriptors: that is too few for a
    daemon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # macOS: at most kern.maxfilesperproc, which it does not tell
            wanted //= 2
    allowed = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    if allowed < FEWEST:
        raise TooFewDescriptors(
            f"This process may have {allowed} files open, and a daemon needs {FEWEST} at least. Raise the limit where"
            f" it is started, with: ulimit -n {FEWEST * 10}",
            allowed=allowed,
            needed=FEWEST,
        )
    return allowed


def limits_within(open_files: int) -> ServerLimits:
    """The server's limits for this number of open files."""
    usual = ServerLimits()
    connections = min(usual.max_connections, open_files - BESIDE_CONNECTIONS - usual.reserved_connections)
    return ServerLimits(max_connections=connections)
