"""T1 at the system's own interface: SIGKILL at each real system call that changes something.

Linux with strace and the right to trace. Each point is a process of its own, so this is the slow sweep. The telling
of a step's event is a write to a pipe and is counted with the calls: a kill there is one more point.

The process that is killed is this file as a program: `strace_kill.py SCENARIO STORE WORLD.pickle` runs one scenario on
a prepared store and writes a dot for each step's event. It calls nothing that changes a file before its scenario does.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from torpor.tests.memvid.faults.beginnings import Scenario, Swept, fresh, prepare
from torpor.tests.memvid.faults.kill import events_of
from torpor.tests.memvid.faults.scenarios import SCENARIOS
from torpor.tests.memvid.faults.shim import repeatable
from torpor.tests.memvid.faults.worlds import Tape, check

CALLS: Final = (
    "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,link,linkat,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,truncate,ftruncate,fallocate,copy_file_range,sendfile"
)
_SECONDS_TO_DIE: Final = 20


@functools.cache
def unavailable() -> str:
    """Why this sweep cannot run here; empty if it can."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    done = subprocess.run([strace, "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()[:200]}"


def sweep(scenario: Scenario, base: Path, *, stride: int = 1, first: int = 0, workers: int = 2) -> Swept:
    """Kill at every `stride`-th call."""
    original, world_file = base / "original" / "store", base / "world.pickle"
    world = prepare(scenario, original)
    world_file.write_bytes(pickle.dumps(world))
    worlds = events_of(scenario, original, base / "dry" / "store", world)
    result = Swept(scenario.name)
    calls = _calls(scenario, original, base / "traced", world_file)
    with ThreadPoolExecutor(workers) as pool:
        chosen = result.choose("points", list(enumerate(calls)), stride, first)
        kills = [pool.submit(_kill, scenario, original, base / str(at), world_file, call) for at, call in chosen]
        for (at, call), killed in zip(chosen, kills, strict=True):
            events = killed.result()
            result.counts["points"] += 1
            with result.blaming(f"killed at system call {at} ({call[0]} {call[1]})"):
                check(base / str(at) / "store", worlds[events], thorough=True, sees=scenario.sees)
            shutil.rmtree(base / str(at))
    return result


def _calls(scenario: Scenario, original: Path, folder: Path, world: Path) -> list[tuple[str, int]]:
    """Each call of an undisturbed run: its name, and the how-manieth of that name it is. Strace counts them so."""
    path = folder / "store"
    fresh(original, path)
    trace = folder / "trace"
    _run(scenario, path, world, "-o", str(trace))
    seen, found = Counter[str](), []
    for name in re.findall(r"^\d+ +(\w+)\(", trace.read_text(errors="replace"), re.MULTILINE):
        seen[name] += 1
        found.append((name, seen[name]))
    return found


def _kill(scenario: Scenario, original: Path, folder: Path, world: Path, call: tuple[str, int]) -> int:
    """How many events the killed process told."""
    path = folder / "store"
    fresh(original, path)
    name, number = call
    done = _run(scenario, path, world, "-o", "/dev/null", "-e", f"inject={name}:signal=KILL:when={number}")
    if done.returncode not in (-9, 137):
        raise AssertionError(f"{scenario.name} was not killed at call {call}: {done.stderr[-2000:]}")
    await_end(path / "lock")
    return len(done.stdout)


def _run(scenario: Scenario, path: Path, world: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["strace", "-f", "-qq", "-e", f"trace={CALLS}", *options]
    command += [sys.executable, "-B", __file__, scenario.name, str(path), str(world)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def await_end(lock: Path) -> None:
    """Wait until the killed process is quite gone: strace may end a moment before its lock is free."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    with contextlib.suppress(FileNotFoundError), lock.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that another thread begins meanwhile has this file too
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.001)


def _run_scenario(name: str, path: Path, world: Path) -> None:
    def tell(_: object) -> None:
        sys.stdout.write(".")
        sys.stdout.flush()

    with repeatable(seed=2):
        SCENARIOS[name].run(path, Tape(pickle.loads(world.read_bytes()), tell))


if __name__ == "__main__":
    _run_scenario(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
