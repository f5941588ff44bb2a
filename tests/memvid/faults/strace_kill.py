"""T1 at the system's own interface: SIGKILL at the n-th real system call that changes something, SQLite's among them.

Linux with strace and the right to trace. Each point is a process of its own, so this is the slow sweep. The telling
of a step's event is a write to a pipe and is counted with the calls: a kill there is one more point.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from torpor.tests.memvid.faults.beginnings import Scenario, Swept, fresh, prepare
from torpor.tests.memvid.faults.kill import events_of
from torpor.tests.memvid.faults.worlds import check

CALLS: Final = (
    "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,link,linkat,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,truncate,ftruncate,fallocate,copy_file_range,sendfile"
)
_CHILD: Final = Path(__file__).with_name("strace_child.py")
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
    original, world_file = base / "original" / "store", base / "world.pickle"
    world = prepare(scenario, original)
    world_file.write_bytes(pickle.dumps(world))
    worlds = events_of(scenario, original, base / "dry" / "store", world)
    result = Swept(scenario.name)
    survived = False
    begin = 1 + first % stride
    with ThreadPoolExecutor(workers) as pool:
        while not survived and not result.has_seen_enough:
            points = [begin + stride * number for number in range(8)]
            begin = points[-1] + stride
            kills = [pool.submit(_kill, scenario, original, base / str(point), world_file, point) for point in points]
            for point, killed in zip(points, kills, strict=True):
                was_killed, events = killed.result()
                survived = survived or not was_killed
                result.counts["points"] += was_killed
                result.out_of += stride * was_killed
                with result.blaming(f"killed at system call {point}"):
                    check(base / str(point) / "store", worlds[events], thorough=True, sees=scenario.sees)
                shutil.rmtree(base / str(point))
    return result


def _kill(scenario: Scenario, original: Path, folder: Path, world: Path, point: int) -> tuple[bool, int]:
    """Whether the process was killed, and how many events it told."""
    path = folder / "store"
    fresh(original, path)
    command = [
        *("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}"),
        *("-e", f"inject={CALLS}:signal=KILL:when={point}"),
        *(sys.executable, "-B", str(_CHILD), scenario.name, str(path), str(world)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode not in (0, -9, 137):
        raise AssertionError(f"{scenario.name}: the child failed by itself at call {point}: {done.stderr[-2000:]}")
    await_end(path / "lock")
    return done.returncode != 0, len(done.stdout)


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
