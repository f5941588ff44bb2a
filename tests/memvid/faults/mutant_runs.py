"""T3: lets the power-loss replay loose on each mutant, until it is caught or every scenario has passed."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from faults.mutants import EQUIVALENT, Mutant
from faults.power import Effort, replay
from faults.scenarios import SCENARIOS

_CHILD: Final = Path(__file__).with_name("mutant_child.py")
_FIRST: Final = ("refused", "delete_fork", "delete", "recover", "rebuild_on_a_full_disk", "sleep_delta", "create")
"""The scenarios that catch most mutants, soonest."""


@dataclass
class Verdict:
    """What became of a mutant. `caught_by` says how; empty: nothing was found in `states` states."""

    mutant: str
    caught_by: str = ""
    lost: bool = False
    states: int = 0
    error: str = ""

    @property
    def as_it_should(self) -> bool:
        return not self.error and bool(self.caught_by) != (self.mutant in EQUIVALENT)


def judge(mutant: Mutant, base: Path, effort: Effort) -> Verdict:
    verdict = Verdict(mutant.name)
    base.mkdir(parents=True)
    command = [sys.executable, str(_CHILD), mutant.name, str(base)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        verdict.error = done.stderr[-2000:]
        return verdict
    with (base / "recordings.pickle").open("rb") as file:
        recordings = pickle.load(file)
    order = [*_FIRST, *(name for name in recordings if name not in _FIRST)]
    for name in order:
        settings = {"effort": effort, "most_failures": 1, "marks": SCENARIOS[name].marks}
        result = replay(name, recordings[name], base / "work", workers=1, **settings)
        verdict.states += result.states
        if result.failures:
            verdict.caught_by, verdict.lost = result.failures[0], bool(result.lost)
            break
    shutil.rmtree(base)
    return verdict


def judge_all(mutants: list[Mutant], base: Path, effort: Effort, workers: int) -> list[Verdict]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda item: judge(item[1], base / str(item[0]), effort), enumerate(mutants)))
