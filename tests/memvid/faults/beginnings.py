"""What a scenario is, the store that most of them begin with, and what a sweep tells of each."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from faults.shim import repeatable
from faults.worlds import NOTHING_ELSE, Sees, Tape, Version, World, sleep
from store_making import OTHER_URI, URI
from torpor.memvid import Store

FIRST: Final = Version(URI, 1, 260)
SECOND: Final = Version(URI, 2, 516)
FORK: Final = Version(OTHER_URI, 1, 520)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`prepare` makes the store that the operation begins with (None: there is none) and returns the world that it
    holds. `run` opens the store and works; each step that its owner would be told of stands in `tape.step(store, adds=,
    removes=)`, with `tape.sleep` and `tape.delete` for the common ones. An operation that must not change what the
    store holds (gc, compact, an index made anew) is a step that adds and removes nothing. `sees` finds what else is a
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


def fresh(source: Path, target: Path) -> None:
    """Copy a store, and what lies beside it: exported files."""
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(source.parent, target.parent)


@dataclass
class Swept:
    """What a sweep did with a scenario: how many of what, and what went wrong."""

    scenario: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

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
        self.failures += other.failures

    def told(self) -> dict[str, Any]:
        return {"scenario": self.scenario, **self.counts, "failures": self.failures}


def two_versions_and_a_fork(path: Path) -> World:
    """A session of two versions, and another one that needs blocks of both."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        second = sleep(store, SECOND, first)
        sleep(store, FORK, second)
    return frozenset({FIRST, SECOND, FORK})
