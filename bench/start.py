"""From `exec` of `torpor serve`, with a session that slept, to its first token, beside a bare `import mlx_lm`.

The store holds one session of about 1,000 tokens of the demo model. Round by round: a new process that imports mlx_lm
and ends, and a new daemon that is asked for one token as soon as it answers: it has loaded its model, opened its store,
woken the session, verified it and run its canary. Then what the daemon had imported when it was ready, beyond what
`import mlx_lm` imports itself: the modules that took longest, with their own time.

With `--beside CLONE`, another clone of the repository with its own `.venv`: its daemon and this one start in turns on
empty stores, and nothing else is measured. It tells the seconds until each is ready, and the processor's seconds until
it has ended.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import parser_for, plotted, rounds_of, save
from machine import spread
from torpor.socket_api import Client

ROUNDS = 10
TEXT_CHARACTERS = 4_000
MOST_MODULES = 12
DEADLINE_S = 60.0
_TORPOR = str(Path(sys.executable).with_name("torpor"))


@dataclass
class Starts:
    """Seconds of each round. ready: until the daemon said so; first_token: until the woken session had written."""

    imported: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        pairs = list(zip(self.first_token, self.imported, strict=True))
        return {
            "seconds": {
                "import_mlx_lm": spread(self.imported),
                "ready": spread(self.ready),
                "first_token": spread(self.first_token),
            },
            "beyond_import_s": spread([token - imported for token, imported in pairs]),
            "over_import": spread([token / imported for token, imported in pairs]),
        }


class Daemon:
    """`torpor serve` on a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "torpor.sock"
        self._command = [_TORPOR, "serve", "--store", str(folder / "store"), "--socket", str(self.socket), "--json"]

    def start(self) -> float:
        """Run it; seconds until it says that it is ready."""
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline())
        return time.perf_counter() - started

    def stop(self) -> None:
        with Client(self.socket) as client:
            client.shutdown()
        self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def measure(rounds: int, parent: Path | None) -> Starts:
    """Interleaved rounds on one store in `parent`."""
    import argparse as source

    starts = Starts()
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder:
        daemon = Daemon(Path(folder))
        daemon.start()
        with Client(daemon.socket) as client:
            client.create("sleeper")
            client.append("sleeper", text=inspect.getsource(source)[:TEXT_CHARACTERS])
        daemon.stop()
        for _ in range(rounds):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import mlx_lm"], check=True)
            starts.imported.append(time.perf_counter() - started)
            started = time.perf_counter()
            starts.ready.append(daemon.start())
            with Client(daemon.socket) as client:
                written = client.generate("sleeper", max_tokens=1)
            starts.first_token.append(time.perf_counter() - started)
            assert written.tokens or written.finish_reason == "stop"
            assert written.woken is not None, "it was woken for this token"
            daemon.stop()
    return starts


def measure_beside(rounds: int, other: Path, parent: Path | None) -> dict[str, dict[str, float | int]]:
    """Starts of the daemon of another clone, and of this one, in turns; the first ones are not counted."""
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder:
        commands = {"there": str(other / ".venv" / "bin" / "torpor"), "here": _TORPOR}
        for number in range(rounds + 1):
            for who in commands if number % 2 else reversed(commands):
                ready, processor = start_and_end(commands[who], Path(folder) / who)
                if number:
                    took.setdefault(f"ready {who}", []).append(ready)
                    took.setdefault(f"processor {who}", []).append(processor)
    for what in ("ready", "processor"):
        pairs = list(zip(took[f"{what} here"], took[f"{what} there"], strict=True))
        took[f"{what} here beyond there"] = [here - there for here, there in pairs]
    return {name: spread(seconds) for name, seconds in took.items()}


def start_and_end(torpor: str, folder: Path) -> tuple[float, float]:
    """A daemon: seconds until it is ready, and of the processor until it has ended."""
    command = [torpor, "serve", "--store", f"{folder}.store", "--socket", f"{folder}.sock", "--json"]
    started = time.perf_counter()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # compiled once
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())
        ready = time.perf_counter() - started
        process.terminate()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return ready, used.ru_utime + used.ru_stime


def imported_beyond() -> list[dict[str, Any]]:
    """What importing the daemon imports beyond `import mlx_lm`, by the time that each module took itself."""
    mine, bare = imports_of("import torpor.socket_api.main"), imports_of("import mlx_lm")
    beyond = {name: own for name, own in mine.items() if name not in bare}
    ordered = sorted(beyond.items(), key=lambda item: -item[1])
    return [{"module": name, "own_ms": own / 1000} for name, own in ordered[:MOST_MODULES]]


def imports_of(statement: str) -> dict[str, int]:
    """Microseconds of each module that a statement imports, without those that it imports in turn."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], check=True, capture_output=True, text=True
    )
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr)
    return {name: int(own) for own, name in lines}


def report(starts: Starts, beyond: list[dict[str, Any]], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    figures = save("start", {"model": "demo", **starts.figures(), "imported_beyond_mlx_lm": beyond}, out)
    past = figures["beyond_import_s"]["median"]
    title = f"The first woken token comes {past:.2f} s after import mlx_lm would be done"
    with plotted(out / "start.png", figures, title) as axes:
        axes.boxplot(
            [starts.imported, starts.ready, starts.first_token],
            tick_labels=["import mlx_lm", "torpor serve: ready", "first woken token"],
        )
        axes.set(ylabel="seconds from exec", ylim=(0, None))
    for name, seconds in figures["seconds"].items():
        print(f"{name:>14} {seconds['median']:.3f} s ({seconds['lowest']:.3f} to {seconds['highest']:.3f})")
    past = figures["beyond_import_s"]
    print(
        f"the first woken token comes {past['median']:.3f} s ({past['lowest']:.3f} to {past['highest']:.3f}) after "
        "import mlx_lm would be done"
    )
    for each in beyond:
        print(f"{each['own_ms']:>10.1f} ms  {each['module']}")


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--beside", type=Path, metavar="CLONE", help="another clone, whose daemon starts in turns")
    options = parser.parse_args()
    if options.beside is not None:
        figures = save("start-beside", measure_beside(rounds_of(options), options.beside, options.folder), options.out)
        for name, seconds in figures.items():
            if isinstance(seconds, dict) and "median" in seconds:
                span = f"({seconds['lowest']:.3f} to {seconds['highest']:.3f})"
                print(f"{name:>28} {seconds['median']:.3f} s {span}")
        return
    report(measure(rounds_of(options), options.folder), imported_beyond(), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
