"""The daemon as a process in the background: start one that outlives this command, and see one to its end.

Owns processes and the daemon's log file. Does not know what is asked of a daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from .errors import DaemonStartFailed, DaemonStillRunning

# A model from a hub may have to be downloaded first; small ones are there in a second or two.
START_TIMEOUT_S = 1800.0
_POLL_S = 0.03
_MAX_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that answers: where, which process, and where it writes what it has to say."""

    socket: str
    pid: int
    log: Path


@dataclass(frozen=True, slots=True)
class Refused:
    """A daemon that ended before it answered: its exit status, and its last words as an error."""

    status: int
    code: str
    message: str


def default_log_path() -> Path:
    """Where a daemon in the background writes."""
    return user_state_path("torpor") / "daemon.log"


def start(arguments: Sequence[str], log: Path) -> Started | Refused:
    """Start `torpor serve` in a session of its own, and wait until it answers or has ended.

    Raises:
        DaemonStartFailed: the log cannot be written, or nothing happened within START_TIMEOUT_S.
    """
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DaemonStartFailed(
            f"The daemon's log {log} cannot be written: {error.strerror}.", path=str(log)
        ) from error
    try:
        command = [sys.executable, "-m", "torpor.cli.main", "serve", "--json", *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True
        )
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ready = _line_with(log, "event", "ready")
        if ready is not None:
            return Started(str(ready["socket"]), process.pid, log)
        status = process.poll()
        if status is not None:
            return Refused(status if status > 0 else 1, *_last_words(log))
        time.sleep(_POLL_S)
    process.terminate()
    raise DaemonStartFailed(f"The daemon did not answer within {START_TIMEOUT_S:.0f} s; see {log}.", path=str(log))


def end(pid: int, timeout_s: float) -> None:
    """Ask a daemon to stop, and wait until its process is gone.

    Raises:
        DaemonStillRunning: it is still putting sessions to sleep after `timeout_s`; it goes on doing so.
    """
    with contextlib.suppress(ProcessLookupError):  # it ended by itself between being asked who it is and now
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        if time.monotonic() > deadline:
            raise DaemonStillRunning(
                f"Process {pid} is still putting sessions to sleep after {timeout_s:.0f} s. It will end by itself; "
                "ask again, or wait longer with --timeout.",
                pid=pid,
                timeout_s=timeout_s,
            )
        time.sleep(_POLL_S)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that ended and was not yet reaped has."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state follows the name, which may itself hold brackets and spaces.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True  # no /proc here: the signal's answer is all there is
    return state != "Z"


def _last_words(log: Path) -> tuple[str, str]:
    """The code and the sentence with which the daemon ended."""
    error = _line_with(log, "error", None)
    if error is not None and isinstance(error["error"], dict):
        return str(error["error"].get("code")), str(error["error"].get("message"))
    lines = _tail(log).strip().splitlines()
    return DaemonStartFailed.code, lines[-1] if lines else f"The daemon ended without a word; see {log}."


def _line_with(log: Path, key: str, value: str | None) -> dict[str, Any] | None:
    """The last whole line of the log that is a JSON object with this key, and this value if one is given."""
    for line in reversed(_tail(log).splitlines(keepends=True)):
        if not line.endswith("\n"):
            continue
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and key in document and value in (None, document[key]):
            return document
    return None


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_LOG_TAIL_BYTES))
        return file.read(_MAX_LOG_TAIL_BYTES).decode("utf-8", errors="replace")
