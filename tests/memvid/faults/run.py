"""Runs the fault sweeps and prints what they did.

    python tests/memvid/faults/run.py [SWEEP ...] [--only SCENARIO] [--full [N]] [--json FILE]

Without --full each sweep does a small share of every fourth scenario, another one for each scenario and at each commit
(`shares.py` has how to choose it); with it, everything. `--full N` does an N-th of everything: TORPOR_SHARE from 0 to
N - 1 names the parts, which together are the whole. `--only` names scenarios. Ends with status 3 if anything was found,
or if a mutant has survived all states; a share leaves one that survives a few of them without a verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Final

from torpor.tests.memvid.faults import (
    errnos,
    kill,
    live_copies,
    moments,
    mutant_runs,
    pairs,
    power,
    put_back,
    strace_kill,
)
from torpor.tests.memvid.faults.beginnings import Scenario, Swept
from torpor.tests.memvid.faults.mutants import EQUIVALENT, all_mutants
from torpor.tests.memvid.faults.scenarios import SCENARIOS
from torpor.tests.shares import share

Report = dict[str, Any]
FOUND: Final = 3
_DELETES: Final = ("delete_fork", "delete")
EXPORTS: Final = ("export", "export_tensors")
"""They change nothing in the store: it has one moment."""
PAIRED: Final = ("create", "sleep_delta", "delete", "import", "repack", "repair")
"""The scenarios in which two faults at once are tried: small ones, for there are tens of thousands of pairs in each."""
_PAIR_PARTS: Final = 4
_FULL_EFFORT: Final = power.Effort(subsets=200, tears=20)
_SHARE_EFFORT: Final = power.Effort(subsets=1, tears=0)
_MUTANT_EFFORT: Final = power.Effort(subsets=2, tears=0)


def of_this_share() -> list[str]:
    """Every fourth scenario; at other commits the others. By a digit of its own, which no part of a sweep goes by."""
    return list(SCENARIOS)[share() // 4096 % 4 :: 4]


def run_kill(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """T1, in process: a kill before each call that changes something, and with the write before it torn."""
    strides = {"stride": full or 31, "torn_stride": full or 61, "second_stride": 4 if full else 19}
    jobs = [
        partial(kill.sweep, scenario, base / str(number), first=number, **strides)
        for number, scenario in enumerate(scenarios, start=share())
    ]
    return _report(_side_by_side(jobs), ("points", "second_points"))


def run_strace(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """T1, at real system calls."""
    found = [
        strace_kill.sweep(scenario, base / str(number), stride=full or 11, first=number)
        for number, scenario in enumerate(scenarios, start=share())
    ]
    return _report(found, ("points",))


def run_power(scenarios: list[Scenario], base: Path, full: int, *, one_in: int = 181) -> Report:
    """T2."""
    settings: dict[str, Any] = {"effort": _SHARE_EFFORT, "part": share(), "one_in": one_in}
    if full:
        settings |= {"effort": _FULL_EFFORT, "one_in": full, "recoveries_every": 500}
    jobs = [partial(power.sweep, scenario, base / str(at), **settings) for at, scenario in enumerate(scenarios)]
    return _report(_side_by_side(jobs), ("cuts", "states", "beyond_temps", "checks", "lost"))


def run_lost_index(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """T1 and T2, and the index is removed before each opening: what it alone knew would be lost."""
    lost = [scenario.without_index() for scenario in scenarios]
    jobs = [
        partial(kill.sweep, scenario, base / str(number), stride=full or 57, first=7 * number)
        for number, scenario in enumerate(lost, start=share())
    ]
    report = _report(_side_by_side(jobs), ("points",))
    cut = run_power(lost, base / "cut", full, one_in=751)
    for name in ("failures", "scenarios"):
        report[name] += cut.pop(name)
    return report | cut


def run_mutants(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """T3."""
    mutants = list(all_mutants().values())
    if not full:  # of those that are argued to be no different every state is tried, which takes minutes
        mutants = [mutant for mutant in mutants if mutant.name not in EQUIVALENT]
    mutants = mutants[share() % (full or 43) :: full or 43]
    verdicts = mutant_runs.judge_all(mutants, base, _MUTANT_EFFORT, _workers(), _tell_verdict, full=bool(full))
    wrong = [f"{verdict.mutant}: {verdict.error or verdict.caught_by or 'survived'}" for verdict in verdicts
             if not verdict.as_it_should]  # fmt: skip
    return {
        "mutants": len(verdicts),
        "caught": sum(bool(verdict.caught_by) for verdict in verdicts),
        "not_judged": sum(not verdict.is_judged for verdict in verdicts),
        "acknowledged_but_lost": sum(verdict.lost for verdict in verdicts),
        "equivalent": sum(verdict.mutant in EQUIVALENT for verdict in verdicts),
        "failures": wrong,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


def _tell_verdict(verdict: mutant_runs.Verdict) -> None:
    what = verdict.caught_by[:100] or ("survived" if verdict.is_judged else "not judged: --full tries all states")
    _tell(f"{verdict.mutant}: {verdict.error or what}, {verdict.states} states, {len(verdict.scenarios)} scenarios")


def run_errno(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """T4."""
    jobs = []
    for number, scenario in enumerate(scenarios, start=share()):
        folder = base / str(number)
        jobs.append(partial(errnos.sweep, scenario, folder / "calls", stride=full or 1021, first=number))
        jobs.append(partial(errnos.size_limits, scenario, folder / "sizes", stride=full or 16, first=number))
        if scenario.name in _DELETES:
            jobs.append(partial(errnos.deletes_when_full, scenario, folder / "full"))
    return _report(_side_by_side(jobs), ("runs", "refused", "poisoned"))


def run_moments(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """Files of one moment beside the index of another."""
    jobs = [
        partial(moments.sweep, scenario, base / str(number), stride=full or 67, first=number)
        for number, scenario in enumerate(scenarios, start=share())
        if scenario.name not in EXPORTS
    ]
    return _report(_side_by_side(jobs), ("mixed", "awake"))


def run_copies(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """Copies of a store that a process writes to."""
    return _report([live_copies.sweep(base, stride=full or 20, first=share())], ("mixed", "awake"))


def run_put_back(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """A file that is missing or damaged for a while."""
    parts = _workers() if full else 1
    jobs = [
        partial(put_back.sweep, base / str(part), stride=parts * (full or 401), first=share() + part * (full or 401))
        for part in range(parts)
    ]
    return _report(_side_by_side(jobs), ("cases",))


def run_pairs(scenarios: list[Scenario], base: Path, full: int) -> Report:
    """Two faults at once. In full each scenario in parts: one of them takes half of the time."""
    strides = {"stride": _PAIR_PARTS, "second_stride": full} if full else {"stride": 67, "second_stride": 29}
    jobs = [
        partial(pairs.sweep, scenario, base / f"{number}.{part}", first=part + share(), **strides)
        for number, scenario in enumerate(one for one in scenarios if one.name in PAIRED)
        for part in range(_PAIR_PARTS if full else 1)
    ]
    return _report(_side_by_side(jobs), ("firsts", "pairs", "states", "renumbered"))


def sweep_for_mutant(kind: str, scenario: str, base: Path) -> Swept:
    """What finds one mutant, in parts until it does."""
    found = Swept(scenario)
    for first in range(16):
        folder = base / str(first)
        if kind == "put_back":
            found = put_back.sweep(folder, stride=192, first=12 * first)
        elif kind == "errno":
            found = errnos.sweep(SCENARIOS[scenario], folder, stride=16, first=first)
        else:
            found = kill.sweep(SCENARIOS[scenario], folder, stride=16, first=first)
        if found.failures:
            break
    return found


SWEEPS: Final[dict[str, Callable[[list[Scenario], Path, int], Report]]] = {
    "kill": run_kill,
    "strace": run_strace,
    "power": run_power,
    "lost_index": run_lost_index,
    "mutants": run_mutants,
    "errno": run_errno,
    "moments": run_moments,
    "copies": run_copies,
    "put_back": run_put_back,
    "pairs": run_pairs,
}


def _workers() -> int:
    return min(4, os.cpu_count() or 1)


def _side_by_side(jobs: list[partial[Any]]) -> list[Any]:
    """What each job gives, in their order. The last begins first: the longest scenarios come last."""
    with ProcessPoolExecutor(_workers(), multiprocessing.get_context("fork")) as pool:
        running = [pool.submit(job) for job in reversed(jobs)]
        for done in as_completed(running):
            _tell_progress(done.result())
        return [one.result() for one in reversed(running)]


def _tell(*lines: str) -> None:
    print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def _tell_progress(swept: Swept) -> None:
    """A full sweep takes an hour: what has been done is told at once, for one that is ended early."""
    counts = ", ".join(f"{count} {what}" for what, count in swept.counts.items())
    _tell(f"{swept.scenario}: {counts} out of {swept.out_of}, {len(swept.failures)} wrong", *swept.failures)


def _report(found: Iterable[Swept], counts: tuple[str, ...]) -> Report:
    rows = [dict.fromkeys(counts, 0) | one.told() for one in found]
    totals: Report = {name: sum(row[name] for row in rows) for name in counts}
    totals["failures"] = [failure for row in rows for failure in row.pop("failures")]
    totals["scenarios"] = rows
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", choices=[*SWEEPS, []], help=", ".join(SWEEPS) + "; all")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="a scenario; may be given again")
    parser.add_argument(
        "--full", type=int, nargs="?", const=1, default=0, metavar="N", help="everything, or an N-th of it"
    )
    parser.add_argument("--json", type=Path, help="write what was done to this file")
    wanted = parser.parse_args()
    scenarios = [SCENARIOS[name] for name in wanted.only or (SCENARIOS if wanted.full else of_this_share())]
    if wanted.full != 1:
        print(f"a share: TORPOR_SHARE={share()} does it again")
    memory = Path("/dev/shm")
    reports: Report = {}
    for name in wanted.sweeps or SWEEPS:
        if name == "strace" and strace_kill.unavailable() and not wanted.sweeps:
            print(f"strace: not run, {strace_kill.unavailable()}")
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="faults-") as base:
            report = SWEEPS[name](scenarios, Path(base), wanted.full)
        report["seconds"] = round(time.perf_counter() - started, 1)
        reports[name] = report
        print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in report.items() if not isinstance(value, list)))
        for failure in report["failures"]:
            print(f"  WRONG {failure[:1500]}")
    if wanted.json:
        wanted.json.write_text(json.dumps(reports, indent=1) + "\n")
    return FOUND if any(report["failures"] for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
