"""What a command costs the processor, from `exec` to its end, beside a Python that does nothing.

Round by round each command runs once, in a process of its own: seconds of the processor (user and system), as the
kernel counts them. Modules are compiled once, whatever the environment says, as for who has installed them. The stores
are made first, of arithmetic: a small one, and one of 10,000 sessions. Two commands run beside a daemon with the demo
model, which serves a store of its own. Output goes nowhere, in some rows to a terminal.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, PEER, parser_for, plotted, rounds_of, save
from machine import spread
from scale import make_store
from torpor.socket_api import Client

ROUNDS = 10
SESSIONS, SOME_SESSIONS, QUICK_SESSIONS = 10_000, 20, 100
_TORPOR = str(Path(sys.executable).with_name("torpor"))
_NOTHING = "python -c pass"
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_of(command: Sequence[str], environment: dict[str, str], *, terminal: bool = False) -> float:
    """Seconds of the processor that a command takes, which has to succeed. terminal: it writes to one."""
    with _output(terminal=terminal) as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _output(*, terminal: bool) -> Iterator[int]:
    if not terminal:
        yield subprocess.DEVNULL
        return
    ours, theirs = pty.openpty()
    drain = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)
        drain.wait()


@contextlib.contextmanager
def daemon_in(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon with a session; the environment of a command that asks it."""
    environment = _ENVIRONMENT | {"TORPOR_STORE": str(folder / "served"), "TORPOR_SOCKET": str(folder / "torpor.sock")}
    subprocess.run([_TORPOR, "ensure", "--log", str(folder / "log")], check=True, env=environment, capture_output=True)
    with Client(folder / "torpor.sock") as client:
        client.create("reader")
        client.append("reader", text="What was read once.")
    try:
        yield environment
    finally:
        subprocess.run([_TORPOR, "stop"], check=True, env=environment, capture_output=True)


def measure(rounds: int, parent: Path | None, sessions: int) -> dict[str, list[float]]:
    """Seconds of each command, by its name, of interleaved rounds."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as name, daemon_in(Path(name)) as served:
        folder = Path(name)
        make_store(folder / "small", SOME_SESSIONS, 3)
        make_store(folder / "large", sessions, 1)
        alone = _ENVIRONMENT | {"TORPOR_SOCKET": str(folder / "nobody.sock"), "TORPOR_STORE": str(folder / "small")}
        large = alone | {"TORPOR_STORE": str(folder / "large")}
        terminal = {"COLUMNS": "120", "TERM": "xterm"}
        rows = {
            _NOTHING: ([sys.executable, "-c", "pass"], alone, False),
            "--version": ([_TORPOR, "--version"], alone, False),
            "--help": ([_TORPOR, "--help"], alone, False),
            "ls": ([_TORPOR, "ls"], alone, False),
            "ls, on a terminal": ([_TORPOR, "ls"], alone | terminal, True),
            "log": ([_TORPOR, "log"], alone, False),
            "log, on a terminal": ([_TORPOR, "log"], alone | terminal, True),
            "ls, of a daemon": ([_TORPOR, "ls"], served, False),
            "log, of a daemon": ([_TORPOR, "log"], served, False),
            "a press of Tab": ([_TORPOR, "show", "team-1/a"], alone | {"TORPOR_COMPLETING": "1"}, False),
            f"ls, {sessions:,} sessions": ([_TORPOR, "ls"], large, False),
            f"ls, {sessions:,}, on a terminal": ([_TORPOR, "ls"], large | terminal, True),
        }
        taken: dict[str, list[float]] = {row: [] for row in rows}
        for _ in range(rounds):
            for row, (command, environment, terminal) in rows.items():
                taken[row].append(seconds_of(command, environment, terminal=terminal))
        return taken


def report(taken: dict[str, list[float]], out: Path) -> None:
    """The figures as JSON and as a plot, and a line for each."""
    figures: dict[str, Any] = save("quick", {"processor_s": {row: spread(each) for row, each in taken.items()}}, out)
    medians = {row: each["median"] for row, each in figures["processor_s"].items()}
    title = (
        f"torpor ls takes {medians['ls']:.2f} s of the processor, a Python that does nothing {medians[_NOTHING]:.2f} s"
    )
    with plotted(out / "quick.png", figures, title) as axes:
        axes.barh(list(medians), list(medians.values()), color=[PEER if row == _NOTHING else OURS for row in medians])
        axes.invert_yaxis()
        axes.set(xlabel="seconds of the processor, median")
    for row, each in figures["processor_s"].items():
        print(f"{row:>26} {each['median']:.3f} s ({each['lowest']:.3f} to {each['highest']:.3f})")


def main() -> int:
    """Measure, write, and print."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    sessions = QUICK_SESSIONS if options.quick else SESSIONS
    report(measure(rounds_of(options), options.folder, sessions), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
