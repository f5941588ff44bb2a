"""An index and files of different moments: a backup put back, or a store copied while it was written.

While a scenario runs, the store is copied before each call that changes something. Then the files of each moment are
put together with the index of each other one. Whatever such a store can wake when it is opened it must still wake
after every removal that its owner may ask for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.memvid import SessionUri, Store
from torpor.memvid.errors import StoreError
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, fresh, prepare
from torpor.tests.memvid.faults.shim import Call, Shim, files_up_to, repeatable
from torpor.tests.memvid.faults.states import Seen, state_of
from torpor.tests.memvid.faults.worlds import Broken, Tape
from torpor.tests.memvid.store_making import contents

INDEX: Final = "index.sqlite"
_FOLDED: Final = CompactionPolicy(max_holders=1, min_dead_ratio=0.0)

_SEEN: Final = Seen[int]()

Awake = dict[tuple[SessionUri, int], str]
"""What each version that wakes wakes as."""


@dataclass
class _Moments:
    """Handler of a shim: keeps the store as it is before each call that changes something, each state once."""

    store: Path
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    indexes: dict[str, Path] = field(default_factory=dict)

    def __call__(self, call: Call) -> Any:
        if call.changes_state:
            with files_up_to(None):
                self.keep()
        return call.run()

    def keep(self) -> None:
        if not self.store.is_dir():
            return
        index = [one for one in self.store.iterdir() if one.name.startswith(INDEX) and not one.name.endswith("-shm")]
        others = [one for one in self.store.rglob("*") if one.is_file() and not one.name.startswith(INDEX)]
        for found, kept in ((others, self.files), (index, self.indexes)):
            name = _digest_of(self.store, found)
            if name not in kept:
                kept[name] = self.folder / name
                for one in found:
                    _copy(one, kept[name] / one.relative_to(self.store))


def _digest_of(store: Path, files: Sequence[Path]) -> str:
    hasher = hashlib.sha256()
    for one in sorted(files):
        hasher.update(f"{one.relative_to(store)}\0".encode() + hashlib.sha256(one.read_bytes()).digest())
    return hasher.hexdigest()[:32]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy2(source, target)


def sweep(scenario: Scenario, base: Path, *, stride: int = 1, first: int = 0) -> Swept:
    """Mix at every `stride`-th pair of moments. Counts the stores, `mixed`, and the versions that were `awake` and were
    asked for again after it."""
    original, work = base / "original" / "store", base / "work" / "store"
    world = prepare(scenario, original)
    fresh(original, work)
    moments = _Moments(work, base / "moments")
    with repeatable(seed=2), Shim(moments):
        scenario.run(work, Tape(world))
        moments.keep()
    of_a_store = [files for files in moments.files.values() if (files / "store.json").is_file()]
    pairs = list(itertools.product(of_a_store, moments.indexes.values()))
    result = Swept(scenario.name)
    for files, index in result.choose("mixed", pairs, stride, first):
        if result.has_seen_enough:
            break
        mixed = base / "mixed"
        shutil.rmtree(mixed, ignore_errors=True)
        for source in (files, index):
            if source.is_dir():
                shutil.copytree(source, mixed, dirs_exist_ok=True)
        (mixed / "bundles").mkdir(mode=0o700, exist_ok=True)
        result.counts["mixed"] += 1
        with result.blaming(f"{files.name[:8]} with {index.name[:8]}"):
            result.counts["awake"] += require_kept(mixed)
    return result


def require_kept(path: Path) -> int:
    """Open a store, remove all that its owner may ask to be removed, and wake what still has a row and woke before; how
    many versions that were. Raises Broken, StoreError."""
    with Store.open(path, writable=True) as store:
        state = state_of(store)
        if (woke := _SEEN.find(state)) is not None:
            return woke
        before = _awake(store)
        for removal in _removals(store):
            _require_same(before, store, removal)
    with Store.open(path, writable=True) as store:
        _require_same(before, store, "the next opening")
    _SEEN.add(state, len(before))
    return len(before)


def _removals(store: Store) -> Iterator[str]:
    store.gc()
    yield "gc"
    store.compact(policy=_FOLDED)
    yield "compact"
    store.prune(Retention(keep_last=1))
    yield "prune"
    sessions = [row.uri for row in store.iter_sessions()]
    if sessions:
        store.delete_session(sessions[0])
        yield "delete"
    if len(sessions) > 1:
        store.forget(sessions[1])
        yield "forget"
    store.gc()
    yield "gc at the end"


def _awake(store: Store) -> Awake:
    found = {}
    for latest in store.iter_sessions():
        for row in store.versions(latest.uri):
            with contextlib.suppress(StoreError), store.open_session(row.uri, row.version) as reader:
                found[row.uri, row.version] = hashlib.sha256(repr(contents(reader)).encode()).hexdigest()
    return found


def _require_same(before: Awake, store: Store, removal: str) -> None:
    listed = {(row.uri, row.version) for latest in store.iter_sessions() for row in store.versions(latest.uri)}
    now = _awake(store)
    for version in before.keys() & listed:
        if now.get(version) != before[version]:
            raise Broken(f"version {version[1]} of {version[0]} does not wake any more after {removal}", lost=True)
