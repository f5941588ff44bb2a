"""T3: lets the power-loss replay loose on each mutant, until it is caught or every scenario has passed. A mutant that
names a test gets that test instead."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from torpor.tests.memvid.faults.mutant_child import BROKEN, CAUGHT
from torpor.tests.memvid.faults.mutants import EQUIVALENT, NONE, Mutant
from torpor.tests.memvid.faults.power import Effort, Replay
from torpor.tests.memvid.faults.recording import Recording, Write
from torpor.tests.memvid.faults.scenarios import SCENARIOS

_CHILD: Final = Path(__file__).with_name("mutant_child.py")
_ROOT: Final = Path(__file__).resolve().parents[3]
_FIRST: Final = ("delete", "sleep_delta", "create", "many_changes", "turns", "repack_into_one", "lose_index", "import")
"""The scenarios that catch most mutants, soonest. The others are recorded for those that survive these."""

_FEW: Final = 17
"""At first one in so many states is tried: most mutants break many. A share of the sweep tries no others. A prime, for
many a row of operations has four or eight cuts each."""


class MutantFailed(Exception):
    """The mutant could not even be made."""


class MutantBroken(Exception):
    """The mutant does not get through the scenarios."""


@dataclass
class Verdict:
    """What became of a mutant. `caught_by` says how; empty: nothing was found in `states` states. `is_judged`: all
    states were tried, or fewer were enough."""

    mutant: str
    caught_by: str = ""
    is_judged: bool = True
    lost: bool = False
    states: int = 0
    scenarios: list[str] = field(default_factory=list)  # in which the mutant does anything else than the code
    error: str = ""

    @property
    def as_it_should(self) -> bool:
        return not self.error and (not self.is_judged or bool(self.caught_by) != (self.mutant in EQUIVALENT))


def record_under(name: str, base: Path, scenarios: Sequence[str]) -> dict[str, Recording]:
    """The recordings of scenarios by a process with this mutant, or NONE. Raises MutantFailed, MutantBroken."""
    base.mkdir(parents=True)
    command = [sys.executable, str(_CHILD), name, str(base), ",".join(scenarios)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == BROKEN:
        raise MutantBroken(done.stdout)
    if done.returncode:
        raise MutantFailed(done.stderr[-2000:])
    with (base / "recordings.pickle").open("rb") as file:
        recordings: dict[str, Recording] = pickle.load(file)
    shutil.rmtree(base)
    return recordings


def outline(recording: Recording) -> list[tuple[object, ...]]:
    """What was done, without the bytes: a pid has four digits or more."""
    outline: list[tuple[object, ...]] = []
    for operation in recording.operations:
        match operation:
            case Write(_, 0, data) if data.strip().isdigit():
                outline.append(("pid",))
            case Write(inode, offset, data):
                outline.append(("write", inode, offset, len(data)))
            case _:
                outline.append((operation,))
    return outline


def _first_difference(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> int | None:
    """At which operation two recordings part; None where they are the same."""
    return next((at for at, (here, there) in enumerate(itertools.zip_longest(one, other)) if here != there), None)


_plain: dict[str, Recording] = {}


def recorded_plain(names: Sequence[str], base: Path) -> dict[str, Recording]:
    """What scenarios do without a mutant; recorded once in each process that judges."""
    if not _plain.keys() >= set(names):
        _plain.update(record_under(NONE, base / NONE, names))
    return _plain


def judge(mutant: Mutant, base: Path, effort: Effort, full: bool) -> Verdict:
    """Replay the scenarios in which the mutant does anything else than the code, from there on, until it is caught: a
    few of their states, and then all, if it is done in full. Most are caught by the first scenarios."""
    verdict = Verdict(mutant.name)
    if mutant.test:
        verdict.caught_by, verdict.error = _try_test(mutant, base)
        return verdict
    differing: dict[str, tuple[Recording, int]] = {}
    for names in (_FIRST, [name for name in SCENARIOS if name not in _FIRST]):
        try:
            recordings = record_under(mutant.name, base / "record", names)
        except MutantFailed as error:
            verdict.error = str(error)
            return verdict
        except MutantBroken as error:
            verdict.caught_by = str(error)
            return verdict
        plain, others = recorded_plain(names, base), dict[str, tuple[Recording, int]]()
        for name, recording in recordings.items():
            at = _first_difference(outline(recording), outline(plain[name]))
            if at is not None:
                others[name] = recording, at
        verdict.scenarios += others
        if _is_caught(verdict, others, base / "work", effort, _FEW):
            return verdict
        differing |= others
    verdict.is_judged = full
    if full:
        _is_caught(verdict, differing, base / "work", effort, 1)
    return verdict


def _is_caught(
    verdict: Verdict, differing: dict[str, tuple[Recording, int]], work: Path, effort: Effort, one_in: int
) -> bool:
    for name, (recording, begin) in differing.items():
        settings = {"effort": effort, "begin": begin, "one_in": one_in, "most_failures": 1}
        result = Replay(name, recording, work, sees=SCENARIOS[name].sees, **settings).run()
        verdict.states += result.counts["states"]
        if result.failures:
            verdict.caught_by, verdict.lost = result.failures[0], bool(result.counts["lost"])
            return True
    return False


def _try_test(mutant: Mutant, base: Path) -> tuple[str, str]:
    """Which test or sweep has failed under a mutant, if one has; and what else went wrong."""
    base.mkdir(parents=True)
    command = [sys.executable, str(_CHILD), mutant.name, str(base / "tests"), mutant.test]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, cwd=_ROOT)
    if mutant.test.startswith("sweep:"):
        is_caught = done.returncode in (CAUGHT, BROKEN)
        return (done.stdout if is_caught else ""), ("" if is_caught or not done.returncode else done.stderr[-2000:])
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    has_run = done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and bool(failed) == bool(
        done.returncode
    )
    return (failed[0] if failed else ""), ("" if has_run else (done.stdout + done.stderr)[-2000:])


def judge_all(
    mutants: list[Mutant], base: Path, effort: Effort, workers: int, tell: Callable[[Verdict], None], *, full: bool
) -> list[Verdict]:
    """The verdict on each mutant; `tell` hears of each at once. full: none is left without one."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(judge, one, base / str(at), effort, full) for at, one in enumerate(mutants)]
        for job in as_completed(jobs):
            tell(job.result())
        return [job.result() for job in jobs]
