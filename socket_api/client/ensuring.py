"""Start a daemon if none answers, by the command `torpor ensure` in a process of its own.

So a client imports nothing that a daemon needs, and a command and a program at once start one daemon.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...daemon.api.events import OnEvent, ProgressEvent, ignore
from ..errors import DaemonNotStarted
from ..wire.address import default_socket_path

_ENSURE = (sys.executable, "-P", "-m", "torpor.cli.main", "ensure", "--json")


def ensure_daemon(
    socket_path: str | os.PathLike[str] | None,
    *,
    store: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    models: Mapping[str, str] | None = None,
    on_event: OnEvent = ignore,
) -> Path:
    """Start a daemon unless one answers on that socket; wait until it answers, and return the socket's path. models: a
    folder or a hub name for each name. on_event: called with the progress of downloads.

    Raises:
        DaemonNotStarted: with the message of `torpor ensure`; nothing is left running. So it is where `on_event`
            raises, or Ctrl-C comes.
    """
    socket = Path(default_socket_path() if socket_path is None else socket_path)
    given = {"--socket": socket, "--store": store, "--config": config}
    arguments = [part for option, path in given.items() if path is not None for part in (option, os.fspath(path))]
    arguments += [part for name, source in (models or {}).items() for part in ("--model", f"{name}={source}")]
    command = [*_ENSURE, *arguments]
    last: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stderr or ():
                last = _document(line)
                if last.get("event") == "download":
                    on_event(ProgressEvent("download", last["done_bytes"], last["total_bytes"]))
        except BaseException:
            process.send_signal(signal.SIGINT)  # it ends the daemon that it starts
            raise
    if process.returncode:
        reason = last.get("error", {}).get("message", "the command ended without a word")
        raise DaemonNotStarted(f"No daemon answers on {socket}, and none was started: {reason}")
    return socket


def _document(line: str) -> dict[str, Any]:
    """The object that a line is; words of another form as the message of an error."""
    try:
        document = json.loads(line)
    except ValueError:
        return {"error": {"message": line.strip()}}
    return document if isinstance(document, dict) else {}
