"""How many files this process may have open, and so how many connections it can serve.

Owns the system's limit: raised as far as it may be, and refused where the daemon could not live within it.
"""

from __future__ import annotations

import resource
from typing import Final

from ..errors import TooFewDescriptors
from ..limits import ServerLimits

BESIDE_CONNECTIONS: Final = 160
"""For the store, models that are being loaded, clients that have just come, and the interpreter."""

FEWEST: Final = 200

_ENOUGH: Final = 65_536
"""More than is ever wanted; a hard limit of "unlimited" is one that some systems do not take for a soft one."""


def raise_limit() -> int:
    """Raise the limit of open files to the most that is allowed; how many that is.

    Raises:
        TooFewDescriptors: even that is too few to serve anybody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # macOS: no more than kern.maxfilesperproc, which it does not tell
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
    """The server's limits where so many files may be open."""
    usual = ServerLimits()
    connections = min(usual.max_connections, open_files - BESIDE_CONNECTIONS - usual.reserved_connections)
    return ServerLimits(max_connections=connections)
