"""An index and files of different moments: a backup put back, or a store copied while it was written.

While a scenario runs, the store is copied before each call that changes something. Then the files of each moment are
put together with the index of each other one, and with none. Which versions wake, and as what, never hangs on the
index; and what wakes still wakes after every removal that its owner may ask for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.memvid.errors import StoreError
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, begun, run_through
from torpor.tests.memvid.faults.shim import Call, files_up_to
from torpor.tests.memvid.faults.states import Seen, state_of
from torpor.tests.memvid.faults.worlds import INDEX, Broken
from torpor.tests.memvid.store_making import contents

EAGER: Final = RepackPolicy(max_packs=1, max_unneeded=0.0)
"""Packs are written anew wherever that can be."""

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
        index = [one for one in (self.store / INDEX,) if one.exists()]
        others = [one for one in self.store.rglob("*") if one.is_file() and one.name != INDEX]
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
    original, work, world = begun(scenario, base)
    moments = _Moments(work, base / "moments")
    run_through(scenario, original, work, world, moments)
    moments.keep()
    of_a_store = [files for files in moments.files.values() if _is_readable(files)]
    pairs = list(itertools.product(of_a_store, moments.indexes.values()))
    result = Swept(scenario.name)
    alone: dict[Path, Awake] = {}
    for files, index in result.choose("mixed", pairs, stride, first):
        if result.has_seen_enough:
            break
        result.counts["mixed"] += 1
        with result.blaming(f"{files.name[:8]} with {index.name[:8]}"):
            if files not in alone:
                with Store.open(_mix(base / "mixed", files), writable=False) as store:
                    alone[files] = awake(store)
            result.counts["awake"] += require_kept(_mix(base / "mixed", files, index), alone[files])
    return result


def _is_readable(files: Path) -> bool:
    """Not before there is a store.json, nor while that is of format 1: it is carried over first."""
    store_file = files / "store.json"
    return store_file.is_file() and json.loads(store_file.read_bytes())["version"] == 2


def _mix(target: Path, *sources: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    for source in filter(Path.is_dir, sources):
        shutil.copytree(source, target, dirs_exist_ok=True)
    for name in ("versions", "packs"):
        (target / name).mkdir(mode=0o700, exist_ok=True)
    return target


def require_kept(path: Path, expected: Awake | None = None) -> int:
    """Open a store, remove all that its owner may ask to be removed, and wake what still has a row and woke before; how
    many versions that were. expected: what wakes without an index. Raises Broken, StoreError."""
    with Store.open(path, writable=True) as store:
        state = state_of(store)
        if (woke := _SEEN.find(state)) is not None:
            return woke
        before = awake(store)
        if expected is not None:
            changed = {version for version in expected if before.get(version) != expected[version]}
            if changed:
                raise Broken(f"with this index {changed} do not wake as without one", lost=True)
        for removal in _removals(store):
            _require_same(before, store, removal)
    with Store.open(path, writable=True) as store:
        _require_same(before, store, "the next opening")
    _SEEN.add(state, len(before))
    return len(before)


def _removals(store: Store) -> Iterator[str]:
    store.repack()
    yield "repack"
    store.repack(policy=EAGER)
    yield "an eager repack"
    with contextlib.suppress(StoreError):  # the marks may be lost
        store.prune(Retention(keep_last=1))
    yield "prune"
    sessions = [row.uri for row in store.iter_sessions()]
    if sessions:
        store.delete_session(sessions[0])
        yield "delete"
    if len(sessions) > 1:
        store.forget(sessions[1])
        yield "forget"
    store.repack(policy=EAGER)
    yield "a repack at the end"


def awake(store: Store) -> Awake:
    """The versions that wake, without those that need not: a stripped one does, until a repack."""
    found = {}
    for latest in store.iter_sessions():
        stripped = store.marks_to_show(latest.uri).stripped
        for row in store.versions(latest.uri):
            if row.bundle_id in stripped:
                continue
            with contextlib.suppress(StoreError), store.open_session(row.uri, row.version) as reader:
                found[row.uri, row.version] = hashlib.sha256(repr(contents(reader)).encode()).hexdigest()
    return found


def _require_same(before: Awake, store: Store, removal: str) -> None:
    listed = {(row.uri, row.version) for latest in store.iter_sessions() for row in store.versions(latest.uri)}
    now = awake(store)
    for version in before.keys() & listed:
        if now.get(version) != before[version]:
            raise Broken(f"version {version[1]} of {version[0]} does not wake any more after {removal}", lost=True)
