"""Runs one scenario on a prepared store: `strace_child.py SCENARIO STORE WORLD.pickle`; a dot a step's event.

The process that `strace_kill.py` kills. It calls nothing that changes a file before its scenario does.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from torpor.tests.memvid.faults.scenarios import SCENARIOS
from torpor.tests.memvid.faults.shim import repeatable
from torpor.tests.memvid.faults.worlds import Tape


def main(name: str, path: Path, world: Path) -> None:
    def tell(_: object) -> None:
        sys.stdout.write(".")
        sys.stdout.flush()

    with repeatable(seed=2):
        SCENARIOS[name].run(path, Tape(pickle.loads(world.read_bytes()), tell))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
