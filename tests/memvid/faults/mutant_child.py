"""Records scenarios under one mutant of the store: `mutant_child.py NAME FOLDER SCENARIO,…` writes
FOLDER/recordings.pickle.
Or runs a test under it, in the repository's root: `mutant_child.py NAME FOLDER TEST`.

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


def main(name: str, folder: Path, what: str) -> None:
    if name != mutants.NONE:
        mutants.install(mutants.all_mutants()[name])
    if "::" in what:
        sys.exit(pytest.main([what, "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}"]))
    from torpor.memvid.errors import StoreError
    from torpor.tests.memvid.faults.beginnings import prepare
    from torpor.tests.memvid.faults.recording import record
    from torpor.tests.memvid.faults.scenarios import SCENARIOS
    from torpor.tests.memvid.faults.worlds import Tape

    recordings = {}
    for scenario in map(SCENARIOS.__getitem__, what.split(",")):
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
