"""Records scenarios under one mutant of the store: `mutant_child.py NAME FOLDER SCENARIO,…` writes
FOLDER/recordings.pickle. Or runs a test under it, in the repository's root: `mutant_child.py NAME FOLDER TEST`. Or a
sweep: `mutant_child.py NAME FOLDER sweep:KIND:SCENARIO`, which ends with CAUGHT if it finds anything.

A process of its own, because the mutant must be chosen before memvid is imported. Its exit status is BROKEN where a
scenario fails under the mutant though nothing goes wrong.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from torpor.tests.memvid.faults import mutants

BROKEN = 3
CAUGHT = 4


def main(name: str, folder: Path, what: str) -> None:
    if name != mutants.NONE:
        mutants.install(mutants.all_mutants()[name])
    if "::" in what:
        sys.exit(pytest.main([what, "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}"]))
    if what.startswith("sweep:"):
        _, kind, scenario = what.split(":")
        sys.exit(_sweep(kind, scenario, folder))
    _record(name, folder, what.split(","))


def _sweep(kind: str, scenario: str, folder: Path) -> int:
    from torpor.memvid.errors import StoreError
    from torpor.tests.memvid.faults.run import sweep_for_mutant

    try:
        found = sweep_for_mutant(kind, scenario, folder).failures
    except StoreError as error:
        found = [f"with no fault: {error!r}"]
    print(found[0] if found else "nothing found")
    return CAUGHT if found else 0


def _record(name: str, folder: Path, scenarios: list[str]) -> None:
    from torpor.memvid.errors import StoreError
    from torpor.tests.memvid.faults.beginnings import prepare
    from torpor.tests.memvid.faults.recording import record
    from torpor.tests.memvid.faults.scenarios import SCENARIOS
    from torpor.tests.memvid.faults.worlds import Tape

    recordings = {}
    for scenario in map(SCENARIOS.__getitem__, scenarios):
        path = folder / scenario.name / "store"
        world = prepare(scenario, path)
        tape = Tape(world, is_early=name == mutants.EARLY)
        try:
            recordings[scenario.name] = record(scenario.run, path, tape)
        except StoreError as error:
            print(f"{scenario.name}, with no fault: {error!r}")
            sys.exit(BROKEN)
    with (folder / "recordings.pickle").open("wb") as file:
        pickle.dump(recordings, file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
