"""A daemon in a process of its own, which can be killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torpor.socket_api import Client

DEADLINE_S = 60.0


class Killable:
    """command: what starts it, with --json. environment: None for that of this process. log: a file of what it says;
    None: nobody hears it."""

    def __init__(
        self,
        socket: Path,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.socket = socket
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> dict[str, Any]:
        """Give what it says once it is ready."""
        with (self._log or Path("/dev/null")).open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the daemon did not start: {self._command}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        with Client(self.socket) as client:
            client.shutdown()
        self._wait()

    def _wait(self) -> None:
        self.process.wait(DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
