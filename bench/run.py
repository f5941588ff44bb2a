"""`make bench`: every benchmark in turn, nothing beside it; figures and plots land in build/bench.

Arguments are passed on to each of them: `--quick` shows in a few minutes that all of them run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "wake.py",
    "ttft.py",
    "start.py",
    "quick.py",
    "canary.py",
    "store.py",
    "delta.py",
    "forks.py",
    "tree.py",
    "branches.py",
    "rounds.py",
    "reuse.py",
    "agents.py",
    "loop.py",
    "over_http.py",
    "inspector.py",
    "constraints.py",
    "drawing.py",
    "durability.py",
    "remote.py",
    "killed.py",
    "compression.py",
    "lossy.py",
    "scale.py",
    "simulate.py",
    "soak.py",
)


def main() -> int:
    """Run each benchmark in a process of its own; the first failure ends it."""
    folder = Path(__file__).parent
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, str(folder / name), *sys.argv[1:]], check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
