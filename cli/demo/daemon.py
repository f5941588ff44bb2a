"""The demo's daemon: a real process that is killed with SIGKILL.

Owns the process and the proof that it is dead. Does not know the requests to a daemon.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DemoDaemonFailed

READY_TIMEOUT_S = 120.0  # to import MLX and load a model, on a slow and busy machine
STOP_TIMEOUT_S = 60.0  # for a graceful stop, which puts awake sessions to sleep
DEATH_TIMEOUT_S = 10.0  # for the kernel to bury a killed process
MAX_READY_LINE_BYTES = 64 << 10  # the line that says "ready" has a hundred
LOG_TAIL_CHARS = 800  # of a daemon's last output, in an error


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
    DemoDaemonFailed: it did not become ready; its last words are repeated."""

    def __init__(self, *, store: Path, socket_path: Path, models: Mapping[str, str], log: Path) -> None:
        self.socket_path = socket_path
        self._log_path = log
        command = [sys.executable, "-P", "-m", "torpor.cli.tied", "serve", "--json"]
        # The demo compares computed tokens: none may be taken over from a session that begins alike.
        command += ["--store", str(store), "--socket", str(socket_path), "--prefix-reuse", "off"]
        for name, path in models.items():
            command += ["--model", f"{name}={path}"]
        # The child reads from this pipe. When this end closes, however the demo ends, the daemon ends too.
        read_end, self._lifeline = os.pipe()
        try:
            with log.open("ab") as errors:
                # A session of its own: a Ctrl-C for the demo must not reach the daemon, which the demo ends itself.
                self._process = subprocess.Popen(
                    command, stdin=read_end, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        try:
            self._wait_ready()
        except BaseException:
            self.discard()
            raise

    def kill(self) -> Death:
        """Kill the daemon with SIGKILL, and observe the process and its socket."""
        os.kill(self.pid, signal.SIGKILL)
        status = self._process.wait(DEATH_TIMEOUT_S)
        self._close_pipes()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            refused = probe.connect_ex(str(self.socket_path)) in (errno.ECONNREFUSED, errno.ENOENT)
        return Death(self.pid, -status if status < 0 else None, refused)

    def stop(self) -> None:
        """Ask the daemon to stop, and wait until it has. Raises DemoDaemonFailed: it did not stop in time, or not with
        status 0."""
        os.kill(self.pid, signal.SIGTERM)
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DemoDaemonFailed(f"The daemon did not stop within {STOP_TIMEOUT_S:.0f} s.") from error
        self._close_pipes()
        if self._process.returncode != 0:
            raise self._failure(f"The daemon stopped with status {self._process.returncode}.")

    def discard(self) -> None:
        """End the process if it is still there, without asking. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(DEATH_TIMEOUT_S)
        self._close_pipes()

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        deadline = threading.Timer(READY_TIMEOUT_S, self._process.kill)  # ends the wait for a silent daemon, too
        deadline.start()
        try:
            line = self._process.stdout.readline(MAX_READY_LINE_BYTES)
        finally:
            deadline.cancel()
        if b'"ready"' not in line:
            self._process.poll()
            raise self._failure("The daemon did not become ready.")

    def _close_pipes(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _failure(self, what: str) -> DemoDaemonFailed:
        words = self._log_path.read_text(errors="replace").strip()[-LOG_TAIL_CHARS:]
        said = f"Its last words: {words}" if words else "It said nothing."
        return DemoDaemonFailed(f"{what} {said}", status=self._process.returncode)
