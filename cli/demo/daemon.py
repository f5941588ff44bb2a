"""The demo's daemon: a real process that is killed with SIGKILL.

Owns the process and the proof that it is dead. Does not know the requests to a daemon.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DemoDaemonFailed
from ..reach import background

DEATH_TIMEOUT_S = 10.0  # for the kernel to bury a killed process
STOP_TIMEOUT_S = 60.0  # for a graceful stop, which puts awake sessions to sleep


@dataclass(frozen=True, slots=True)
class Death:
    """The state after SIGKILL, seen from outside. exit_signal: None if no signal ended the process."""

    pid: int
    exit_signal: int | None
    socket_refuses: bool

    @property
    def proven(self) -> bool:
        """Whether the process ended by SIGKILL and nothing answers in its place."""
        return self.exit_signal == signal.SIGKILL and self.socket_refuses


class DemoDaemon:
    """One daemon process, ready once it is made. End it with `kill` or `stop`; `discard` ends it in any state. Raises
    DaemonStartFailed."""

    def __init__(self, *, store: Path, socket_path: Path, models: Mapping[str, str], log: Path) -> None:
        self.socket_path = socket_path
        # The demo compares computed tokens: none may be taken over from a session that begins alike.
        arguments = ["--store", str(store), "--socket", str(socket_path), "--prefix-reuse", "off"]
        for name, path in models.items():
            arguments += ["--model", f"{name}={path}"]
        # The child reads from this pipe. When this end closes, however the demo ends, the daemon ends too.
        read_end, self._lifeline = os.pipe()
        try:
            self._process = background.start(arguments, log, tied_to=read_end).process
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid

    def kill(self) -> Death:
        """Kill the daemon with SIGKILL, and observe the process and its socket."""
        self._process.kill()
        status = self._bury(DEATH_TIMEOUT_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            refused = probe.connect_ex(str(self.socket_path)) in (errno.ECONNREFUSED, errno.ENOENT)
        return Death(self.pid, -status if status < 0 else None, refused)

    def stop(self) -> None:
        """Ask the daemon to stop, and wait until it has. Raises DemoDaemonFailed: it did not stop in time, or not with
        status 0."""
        self._process.terminate()
        if status := self._bury(STOP_TIMEOUT_S):
            raise DemoDaemonFailed(f"The daemon stopped with status {status}.", status=status)

    def discard(self) -> None:
        """End the process if it is still there, without asking. Idempotent."""
        if self._lifeline >= 0:
            self._process.kill()
            self._bury(DEATH_TIMEOUT_S)

    def _bury(self, timeout_s: float) -> int:
        """Wait for the end of the process. Gives its exit status, or the number of the signal below 0. Raises
        DemoDaemonFailed: that takes too long."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DemoDaemonFailed(f"The daemon did not stop within {timeout_s:.0f} s.") from error
        os.close(self._lifeline)
        self._lifeline = -1
        return status
