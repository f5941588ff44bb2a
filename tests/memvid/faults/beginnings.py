"""What a scenario is, and the store that most of them begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


def two_versions_and_a_fork(path: Path) -> World:
    """A session of two versions, and another one that needs blocks of both."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        second = sleep(store, SECOND, first)
        sleep(store, FORK, second)
    return frozenset({FIRST, SECOND, FORK})
