"""Start a daemon if none answers, by the command `torpor ensure` in a process of its own.

So a client imports nothing that a daemon needs, and a command and a program at once start one daemon.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ..errors import DaemonNotStarted
from ..wire.address import default_socket_path

_ENSURE = (sys.executable, "-P", "-m", "torpor.cli.main", "ensure", "--json")


def ensure_daemon(
    socket_path: str | os.PathLike[str] | None,
    *,
    store: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
) -> Path:
    """Start a daemon unless one answers on that socket; wait until it answers, and return the socket's path. Raises
    DaemonNotStarted: with the message of `torpor ensure`; nothing is left running."""
    socket = Path(default_socket_path() if socket_path is None else socket_path)
    given = {"--socket": socket, "--store": store, "--config": config}
    arguments = [part for option, path in given.items() if path is not None for part in (option, os.fspath(path))]
    done = subprocess.run([*_ENSURE, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DaemonNotStarted(f"No daemon answers on {socket}, and none was started: {_told(done.stderr)}")
    return socket


def _told(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["the command ended without a word"]
    try:
        return str(json.loads(lines[-1])["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return lines[-1]
