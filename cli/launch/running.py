"""A program on this terminal, from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_A_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)
_BY_A_SIGNAL: Final = 128
"""What a shell adds to the number of the signal that ended a program."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with this process's streams, and pass signals on to it. environment: what it has beside this
    process's. Gives its exit status, as a shell would."""
    program: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if number in _FROM_A_TERMINAL and sys.stdin.isatty():
            return  # a terminal sends these to both
        if program is None:
            early.append(number)
        else:
            program.send_signal(number)

    # What nohup has this process ignore, the agent ignores, too.
    wanted = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in wanted}
    try:
        program = subprocess.Popen(command, env={**os.environ, **environment})
        for number in early:
            program.send_signal(number)
        status = program.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else _BY_A_SIGNAL - status
