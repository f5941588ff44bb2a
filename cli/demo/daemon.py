"""The demo's daemons: real processes that are started, killed with SIGKILL, and looked at afterwards.

Owns processes and the proof that one is dead. Does not know what is asked of a daemon.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import DemoDaemonFailed

READY_TIMEOUT_S = 120.0  # to import MLX and load a model, on a slow and busy machine
STOP_TIMEOUT_S = 60.0  # for a graceful stop, which puts awake sessions to sleep
DEATH_TIMEOUT_S = 10.0  # for the kernel to bury a killed process
MAX_READY_LINE_BYTES = 64 << 10  # a line that says "ready" has a hundred
LOG_TAIL_CHARS = 800  # of a daemon's last words that an error repeats


@dataclass(frozen=True, slots=True)
class Death:
    """What is left after SIGKILL, as it was observed from outside."""

    pid: int
    exit_signal: int | None
    process_gone: bool
    socket_left_behind: bool
    socket_refuses: bool
    seconds: float

    @property
    def proven(self) -> bool:
        """Whether the daemon ended by SIGKILL and nothing of it answers any more."""
        return self.exit_signal == signal.SIGKILL and self.process_gone and self.socket_refuses


class DemoDaemon:
    """One daemon process, ready once it is made. End it with `kill` or `stop`; `discard` ends it whatever happened."""

    def __init__(self, *, store: Path, socket_path: Path, models: Mapping[str, str], log: Path) -> None:
        self.socket_path = socket_path
        self._log_path = log
        command = [sys.executable, "-P", "-m", "torpor.cli.tied", "serve", "--json"]
        # What is compared must be computed: a session that begins like another would take its tokens over.
        command += ["--store", str(store), "--socket", str(socket_path), "--prefix-reuse", "off"]
        for name, path in models.items():
            command += ["--model", f"{name}={path}"]
        started = time.perf_counter()
        # The child reads from this pipe; when its end here closes, however the demo ends, so does the daemon.
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
            self._wait_ready(started + READY_TIMEOUT_S)
        except BaseException:
            self.discard()
            raise
        self.seconds_to_start = time.perf_counter() - started

    def kill(self) -> Death:
        """Kill the daemon with SIGKILL, and look at what is left."""
        started = time.perf_counter()
        os.kill(self.pid, signal.SIGKILL)
        status = self._process.wait(DEATH_TIMEOUT_S)
        seconds = time.perf_counter() - started
        self._close_pipe()
        return Death(
            pid=self.pid,
            exit_signal=-status if status < 0 else None,
            process_gone=not _process_exists(self.pid),
            socket_left_behind=self.socket_path.is_socket(),
            socket_refuses=_connect_error(self.socket_path) in (errno.ECONNREFUSED, errno.ENOENT),
            seconds=seconds,
        )

    def stop(self) -> tuple[str, ...]:
        """Ask the daemon to stop, and give the sessions that it put to sleep on its way out.

        Raises:
            DemoDaemonFailed: it did not stop in time, or not with status 0.
        """
        os.kill(self.pid, signal.SIGTERM)
        try:
            output, _ = self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DemoDaemonFailed(f"The daemon did not stop within {STOP_TIMEOUT_S:.0f} s.") from error
        self._close_pipe()
        if self._process.returncode != 0:
            raise DemoDaemonFailed(
                f"The daemon stopped with status {self._process.returncode}. {self._log_tail()}",
                status=self._process.returncode,
            )
        return _slept_sessions(output)

    def discard(self) -> None:
        """End the process if it is still there, without asking. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(DEATH_TIMEOUT_S)
        self._close_pipe()

    def _wait_ready(self, deadline: float) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        line = _read_line(stdout, deadline)
        if _event_of(line) != "ready":
            self._process.poll()
            raise DemoDaemonFailed(
                f"The daemon did not become ready. {self._log_tail()}", status=self._process.returncode
            )

    def _close_pipe(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _log_tail(self) -> str:
        words = self._log_path.read_text(errors="replace").strip()[-LOG_TAIL_CHARS:]
        return f"Its last words: {words}" if words else "It said nothing."


def _read_line(stream: IO[bytes], deadline: float) -> bytes:
    """Read up to the first line end; less if the stream ends or the time is up."""
    line = b""
    while b"\n" not in line and len(line) < MAX_READY_LINE_BYTES:
        left_s = deadline - time.perf_counter()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            break
        piece = os.read(stream.fileno(), 4096)
        if not piece:
            break
        line += piece
    return line


def _event_of(line: bytes) -> str | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document.get("event") if isinstance(document, dict) else None


def _slept_sessions(output: bytes) -> tuple[str, ...]:
    for line in output.splitlines():
        if _event_of(line) == "stopped":
            return tuple(json.loads(line).get("slept", ()))
    return ()


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _connect_error(path: Path) -> int | None:
    """Give why a connection is refused; None if somebody answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) or None
