"""`torpor top`: a daemon at work, on the whole terminal."""

from __future__ import annotations

import sys

from ..errors import InvalidUsage
from ..reach.daemon_link import connect
from ..reach.options import SocketOption


def top(socket: SocketOption = None) -> None:
    """Memory and disk against their budgets, models, the queue, every session with its tokens a second, the sleeps and
    wakes since it began, and the last requests that read again what was read before, with their cause, also some of
    before it began. It follows a daemon that
    ends and comes back. Keys: arrows choose a session, s sorts, r reverses, / filters, z puts the chosen session to
    sleep, w wakes it, q ends.

    [bold]Examples[/]

    [cyan]torpor top[/]
    [cyan]torpor top --socket /run/user/1000/other.sock[/]
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidUsage(
            "torpor top draws on a terminal, and here is none. For a script there are `torpor stats --json`, and"
            " `torpor events --json` for what happens from now on."
        )
    connect(socket).close()  # no daemon: an error as of other commands, and no screen
    from .top_screen import Top

    Top(socket).run()
