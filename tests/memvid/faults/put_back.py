"""A file that is missing or damaged for a while: put back by hand, after whatever the store was asked meanwhile.

Every manifest, every pack and the marks of a store; before an opening, or while it is open; and each pair of operations
meanwhile, with the index lost between them or not. What the owner did not delete must be whole then, without a command.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torpor.memvid.errors import StoreError
from torpor.memvid.folder.retention import Retention
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.faults import worlds
from torpor.tests.memvid.faults.beginnings import FIRST, FORK, SECOND, Swept, fresh
from torpor.tests.memvid.faults.damage import HOWS, Ward, files_of, strike
from torpor.tests.memvid.faults.moments import EAGER
from torpor.tests.memvid.faults.shim import repeatable
from torpor.tests.memvid.faults.worlds import INDEX, Allowed, Mark, Version, World, sleep, versions_of
from torpor.tests.memvid.store_making import OTHER_URI, URI

_THIRD: Final = Version(URI, 3, 772)
_ALONE: Final = Version(SessionUri("work", "alone"), 1, 300, seed=8)
_COPY: Final = SessionUri("work", "copy")


def prepare(path: Path) -> World:
    with Store.open(path, writable=True) as store:
        second = sleep(store, SECOND, sleep(store, FIRST))
        sleep(store, FORK, second)
        sleep(store, _THIRD, second)
        sleep(store, _ALONE)
        store.pin(URI, 1)
    return frozenset({FIRST, SECOND, _THIRD, FORK, _ALONE})


@dataclass
class _Work:
    """A store that lacks a file, at work. `may_go`: what its owner let go of, as far as the store took it; `came`: what
    was put to sleep meanwhile."""

    path: Path
    ward: Ward
    store: Store = field(init=False)
    may_go: set[Version | Mark] = field(default_factory=set)
    came: set[Version] = field(default_factory=set)

    def open(self) -> None:
        self.store = Store.open(self.path, writable=True)
        self.ward.look(self.store)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def lose_index(self) -> None:
        self.store.close()
        (self.path / INDEX).unlink(missing_ok=True)
        self.open()

    def sleep_on(self) -> None:
        row = self.store.find_session(URI)
        with self.store.open_session(URI) as before:
            version = Version(URI, row.version + 1 if row else 1, 780)
            sleep(self.store, version, before)
            self.came.add(version)

    def sleep_again(self) -> None:
        """The same state under another name: its blocks are those of the file that is missing, perhaps."""
        row = self.store.find_session(_COPY)
        version = Version(_COPY, row.version + 1 if row else 1, _THIRD.token_count)
        sleep(self.store, version)
        self.came.add(version)

    def delete(self, uri: SessionUri) -> None:
        self.may_go.update(versions_of(frozenset({FIRST, SECOND, _THIRD, FORK, _ALONE, *self.came}), uri))
        self.store.delete_session(uri)

    def delete_first(self) -> None:
        self.may_go.add(FIRST)
        self.store.delete_version(URI, 1)

    def forget(self) -> None:
        self.may_go.add(FORK)
        self.store.forget(OTHER_URI)

    def prune(self) -> None:
        self.may_go.update({SECOND, _THIRD, *versions_of(frozenset(self.came), URI)})
        if not self.store.marks_to_show(URI).pins:  # marks were lost, and made anew
            self.may_go.add(FIRST)
        self.store.prune(Retention(keep_last=1))


_OPERATIONS: Final[dict[str, Callable[[_Work], object]]] = {
    "reopen": _Work.reopen,
    "lose the index": _Work.lose_index,
    "sleep on": _Work.sleep_on,
    "sleep again": _Work.sleep_again,
    "delete the fork": lambda work: work.delete(OTHER_URI),
    "delete the session": lambda work: work.delete(URI),
    "delete a version": _Work.delete_first,
    "forget the fork": _Work.forget,
    "prune": _Work.prune,
    "repack": lambda work: work.store.repack(),
    "repack eagerly": lambda work: work.store.repack(policy=EAGER),
    "repair": lambda work: work.store.repair(),
    "back up": lambda work: work.store.backup(work.path.parent / "backup"),
    "tag": lambda work: work.store.tag(OTHER_URI, None, "kept", move=True),
}


def sweep(base: Path, *, stride: int = 1, first: int = 0) -> Swept:
    """Every `stride`-th of: each file, missing or with a bit flipped; before the opening or after it; and each pair of
    operations."""
    original, work = base / "original" / "store", base / "work" / "store"
    original.parent.mkdir(parents=True)
    with repeatable(seed=1):
        world = prepare(original)
    names = [name for name in files_of(original) if name != INDEX]
    pairs = [(one,) for one in _OPERATIONS] + list(itertools.permutations(_OPERATIONS, 2))
    result = Swept("put_back")
    cases = list(itertools.product(names, HOWS, (False, True), pairs))
    for name, how, is_open, operations in result.choose("cases", cases, stride, first):
        if result.has_seen_enough:
            break
        result.counts["cases"] += 1
        fresh(original, work)
        when = "while open" if is_open else "before an opening"
        with result.blaming(f"{name[:14]} {how} {when}, then {', '.join(operations)}"), repeatable(seed=2):
            _try(work, world, name, how, is_open=is_open, operations=operations)
    return result


def _try(path: Path, world: World, name: str, how: str, *, is_open: bool, operations: Iterable[str]) -> None:
    opened = Store.open(path, writable=True) if is_open else None
    ward = Ward(path, [strike(path, name, how)])
    work = _Work(path, ward)
    if opened is None:
        work.open()
    else:
        work.store = opened
    try:
        for operation in operations:
            with contextlib.suppress(StoreError):  # it is refused
                _OPERATIONS[operation](work)
    finally:
        work.store.close()
    if is_open:
        Store.open(path, writable=True).close()
    ward.put_back()
    before = world | work.came
    if work.may_go:
        worlds.take_marks_away(path)
    with Store.open(path, writable=True) as store:
        found = ward.require_whole(store, Allowed(before, before - work.may_go))
        store.repack()
        worlds.require_only_needed(store)
    with Store.open(path, writable=True) as store:
        ward.require_whole(store, Allowed(found, found))
