"""What a scenario is, the store that most of them begin with, and what a sweep tells of each."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from torpor.memvid.store import Store
from torpor.tests.memvid.faults.shim import Handler, Shim, repeatable
from torpor.tests.memvid.faults.worlds import NOTHING_ELSE, Sees, Tape, Version, World, sleep
from torpor.tests.memvid.store_making import OTHER_URI, URI

FIRST: Final = Version(URI, 1, 260)
SECOND: Final = Version(URI, 2, 516)
FORK: Final = Version(OTHER_URI, 1, 520)

T = TypeVar("T")
_LEAST: Final = 4
"""How much there is to choose from in each scenario, at least."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`prepare` makes the store that the operation begins with (None: there is none) and returns the world that it
    holds. `run` opens the store and works; each step that its owner would be told of stands in `tape.step(store, adds=,
    removes=)`, with `tape.sleep` and `tape.delete` for the common ones. An operation that must not change what the
    store holds (repack, an index made anew) is a step that adds and removes nothing. `sees` finds what else is a
    fact of its world than versions: tags, exported files, traces.
    """

    name: str
    prepare: Callable[[Path], World] | None
    run: Callable[[Path, Tape], None]
    sees: Sees = NOTHING_ELSE

    def without_index(self) -> Scenario:
        """The same, and the index is removed before each opening that follows the fault."""
        return dataclasses.replace(self, sees=dataclasses.replace(self.sees, loses_index=True))


def prepare(scenario: Scenario, path: Path) -> World:
    """Make the scenario's store; the folder above it is there in any case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with repeatable(seed=1):
        return scenario.prepare(path) if scenario.prepare else frozenset()


def begun(scenario: Scenario, base: Path) -> tuple[Path, Path, World]:
    """A scenario's store, where runs of it work on fresh copies, and its world."""
    original = base / "original" / "store"
    return original, base / "work" / "store", prepare(scenario, original)


def run_through(scenario: Scenario, original: Path, work: Path, world: World, handler: Handler) -> Tape:
    """Run a scenario on a fresh copy of its store; each call goes to the handler."""
    fresh(original, work)
    tape = Tape(world)
    with repeatable(seed=2), Shim(handler):
        scenario.run(work, tape)
    return tape


def fresh(source: Path, target: Path) -> None:
    """Copy a store, and what lies beside it: exported files."""
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(source.parent, target.parent)


@dataclass
class Swept:
    """What a sweep did with a scenario: how many of what, out of how many, and what went wrong."""

    scenario: str
    counts: Counter[str] = field(default_factory=Counter)
    due: Counter[str] = field(default_factory=Counter)
    out_of: int = 0
    failures: list[str] = field(default_factory=list)

    def choose(self, what: str, items: Sequence[T], stride: int, first: int) -> Sequence[T]:
        """Every `stride`-th of the items, and one of fewer. The sweep is to count as many of `what`."""
        stride = max(1, min(stride, len(items)))
        chosen = items[first % stride :: stride]
        self.due[what] += len(chosen)
        self.out_of += len(items)
        return chosen

    @property
    def has_seen_enough(self) -> bool:
        return len(self.failures) >= 5

    @contextlib.contextmanager
    def blaming(self, where: str) -> Iterator[None]:
        """Whatever goes wrong in here is the store's fault, and is told with its place."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{self.scenario}, {where}: {type(error).__name__}: {error}"[:2000])

    def add(self, other: Swept) -> None:
        self.counts += other.counts
        self.due += other.due
        self.out_of += other.out_of
        self.failures += other.failures

    def told(self) -> dict[str, Any]:
        """For a report. A sweep that found nothing wrong, and did not do all that was due, has failed too."""
        left_out = [f"{self.counts[what]} {what}, and {due} were due" for what, due in self.due.items()
                    if self.counts[what] != due]  # fmt: skip
        if self.out_of < _LEAST:
            left_out.append(f"{self.out_of} to choose from: does it do anything?")
        failures = self.failures or [f"{self.scenario}: {what}" for what in left_out]
        return {"scenario": self.scenario, **self.counts, "out_of": self.out_of, "failures": failures}


def two_versions_and_a_fork(path: Path) -> World:
    """A session of two versions, and another one that needs blocks of both."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        second = sleep(store, SECOND, first)
        sleep(store, FORK, second)
    return frozenset({FIRST, SECOND, FORK})


def four_versions(path: Path) -> World:
    """A session of four versions in four packs, the last needing all of them, and a fork of the second."""
    receipts: list[Any] = []
    versions = [Version(URI, number, count) for number, count in enumerate((260, 516, 772, 1028), start=1)]
    with Store.open(path, writable=True) as store:
        for version in versions:
            receipts.append(sleep(store, version, receipts[-1] if receipts else None))
        sleep(store, FORK, receipts[1])
    return frozenset({*versions, FORK})
