"""The daemon as a process in the background: start one that outlives this command, and see one to its end.

Owns processes and the daemon's log file. Does not know the requests to a daemon. The child is `detached.py`: it writes
its output to the log, and until it is ready also to a private pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DaemonStartFailed, DaemonStillRunning

START_TIMEOUT_S = 1800.0  # for a large model on a slow disk; a download's progress begins it anew
END_TIMEOUT_S = 10.0  # for a daemon that is told to end while it starts; then it is killed
_POLL_S = 0.03
_MAX_SPOKEN_BYTES = 1 << 20  # of a starting daemon's output; a damaged store may give many warnings


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that answers: its socket, its process, its log, how many warnings of its start the log has, where it
    serves HTTP, a sentence each, and what its store may hold, another one."""

    socket: str
    process: subprocess.Popen[bytes]
    log: Path
    warnings: int = 0
    http: tuple[str, ...] = ()
    budget: str = ""


OnDownload = Callable[[str, int, int], None]
"""Takes the name of a model, how many bytes of it are there, and how many it has."""


def _ignore_download(_model: str, _done: int, _total: int) -> None:
    """Show nothing."""


def open_log(log: Path) -> int:
    """Open a daemon's log to append to it, readable by its owner alone. Raises DaemonStartFailed: it cannot be written,
    or is a link, a pipe, a device or another user's file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(log, flags, 0o600)
    except OSError as error:
        raise DaemonStartFailed(
            f"The daemon's log {log} cannot be written: {error.strerror}. Choose another with --log.", path=str(log)
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise DaemonStartFailed(
            f"The daemon's log {log} is not a regular file of yours. Choose another with --log.", path=str(log)
        )
    os.fchmod(descriptor, 0o600)
    return descriptor


def start(
    arguments: Sequence[str], log: Path, on_download: OnDownload = _ignore_download, *, tied_to: int | None = None
) -> Started:
    """Start `torpor serve` in a session of its own, and wait until it answers. An interrupt ends the child.
    on_download: called while it downloads a model. tied_to: a pipe to read from, at whose end it ends, too. Raises
    DaemonStartFailed: it ended before, with its own error; the log cannot be written; or nothing happened within
    START_TIMEOUT_S."""
    read_end, write_end = os.pipe()
    try:
        descriptor = open_log(log)
        try:
            module = "torpor.cli.detached" if tied_to is None else "torpor.cli.tied"
            command = [sys.executable, "-P", "-m", module, str(write_end), str(log), *arguments]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if tied_to is None else tied_to,
                stdout=descriptor,
                stderr=descriptor,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
            os.close(write_end)
        try:
            return _wait_ready(process, read_end, log, on_download)
        except BaseException:
            _end_child(process)
            raise
    finally:
        os.close(read_end)


def wait_until_gone(pid: int, deadline: float, timeout_s: float) -> None:
    """Wait until the process of an ending daemon is gone. Sends nothing to it. Raises DaemonStillRunning: it is still
    there at the deadline (monotonic); it goes on ending."""
    while pid > 1 and is_running(pid):
        if time.monotonic() > deadline:
            raise still_running(pid, timeout_s)
        time.sleep(_POLL_S)


def still_running(pid: int | None, timeout_s: float) -> DaemonStillRunning:
    """The error of a daemon that takes longer to stop than the timeout."""
    return DaemonStillRunning(
        f"Process {pid} has not ended after {timeout_s:g} s. It does by itself once its sessions are asleep; ask again,"
        " or wait longer with --timeout.",
        pid=pid,
        timeout_s=timeout_s,
    )


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended. One that is not reaped yet has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state follows the name; a name may hold brackets and spaces.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True  # no /proc here: the signal's answer must do
    return state != "Z"


def _wait_ready(process: subprocess.Popen[bytes], pipe: int, log: Path, on_download: OnDownload) -> Started:
    """Read the child's private pipe until it is ready or hangs up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    words, line = b"", b""
    while (remaining_s := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], remaining_s)[0]:
            break
        piece = os.read(pipe, 64 << 10)
        *lines, line = (line + piece)[-_MAX_SPOKEN_BYTES:].split(b"\n")
        for each in lines:
            facts = _object_in(each)
            if facts.get("event") == "ready":
                http = tuple(map(str, facts.get("http", ())))
                warnings, budget = int(facts["warnings"]), str(facts["budget"])
                return Started(str(facts["socket"]), process, log, warnings, http, budget)
            if facts.get("event") == "download":
                on_download(str(facts["model"]), int(facts["done_bytes"]), int(facts["total_bytes"]))
                deadline = time.monotonic() + START_TIMEOUT_S
            else:
                words = (words + each + b"\n")[-_MAX_SPOKEN_BYTES:]
        if not piece:
            process.wait(END_TIMEOUT_S)
            raise _last_words(words + line, log)
    raise DaemonStartFailed(f"The daemon did not answer within {START_TIMEOUT_S:.0f} s; see {log}.", path=str(log))


def _end_child(process: subprocess.Popen[bytes]) -> None:
    """End a child that has not become a daemon. It is killed after a timeout, which harms no store."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


def _last_words(words: bytes, log: Path) -> DaemonStartFailed:
    """The daemon's last error."""
    for line in reversed(words.splitlines()):
        if isinstance(error := _object_in(line).get("error"), dict):
            return DaemonStartFailed(str(error.get("message")), code=str(error.get("code")))
    lines = words.decode("utf-8", errors="replace").strip().splitlines()
    return DaemonStartFailed(f"{lines[-1] if lines else 'The daemon ended without a word'}; see {log}.")


def _object_in(line: bytes) -> dict[str, Any]:
    """The JSON object that a line is; an empty one if it is something else."""
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
