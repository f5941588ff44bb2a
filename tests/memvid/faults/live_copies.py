"""Copies of a store in use: `cp -a`, or files before the index as rsync does, while sessions sleep and are compacted.

No copy may open and then lose, by a removal, what it could wake when it was opened.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final

from torpor.memvid import Receipt, Store
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.tests.memvid.faults.beginnings import Swept
from torpor.tests.memvid.faults.moments import INDEX, require_kept
from torpor.tests.memvid.faults.worlds import SIZES
from torpor.tests.memvid.store_making import OTHER_URI, URI
from torpor.tests.memvid.store_making import sleep as put_to_sleep

_POLICY: Final = CompactionPolicy(max_holders=2, min_dead_ratio=0.0)
_KEPT: Final = Retention(keep_last=9)
_MOST_TOKENS: Final = 256 * 12
_COPIES: Final = 240
_POLL_S: Final = 0.01


def sweep(base: Path, *, stride: int, first: int) -> Swept:
    """Copy the store of a process that writes, in turns in the two orders; then try each copy."""
    store = base / "store"
    result = Swept("a live store")
    copies = len(result.choose("mixed", range(_COPIES), stride, first))
    child = os.fork()
    if child == 0:
        try:
            _write_for_ever(store)
        finally:
            os._exit(1)
    try:
        _await_bundles(store, child, more=6)
        for number in range(copies):
            _copy(store, base / str(number), files_first=bool(number % 2))
            _await_bundles(store, child, more=3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for number in range(copies):
        result.counts["mixed"] += 1
        with result.blaming(f"copy {number}"):
            result.counts["awake"] += require_kept(base / str(number))
        shutil.rmtree(base / str(number))
    return result


def _await_bundles(store: Path, child: int, more: int) -> None:
    """Wait until the process that writes has made so many more."""
    before = set(store.glob("bundles/*/*.mvb"))
    while not (store / INDEX).exists() or len(set(store.glob("bundles/*/*.mvb")) - before) < more:
        _require_alive(child)
        time.sleep(_POLL_S)


def _require_alive(child: int) -> None:
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process that writes has ended"


def _write_for_ever(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        newest: dict[Any, Receipt] = {}
        tokens = 40
        while True:
            for seed, uri in enumerate((URI, OTHER_URI)):
                newest[uri] = put_to_sleep(store, tokens, uri=uri, seed=seed, before=newest.get(uri), **SIZES)
                if newest[uri].version % 5 == 3:
                    store.tag(uri, None, "kept", move=True)
            store.compact(policy=_POLICY)
            store.prune(_KEPT)
            tokens = tokens + 256 if tokens < _MOST_TOKENS else 40
            newest = newest if tokens > 40 else {}


def _copy(source: Path, target: Path, *, files_first: bool) -> None:
    """As `cp -a` walks, in the order of the folder; or bundles, then what lies beside them."""
    names = sorted(os.listdir(source)) if files_first else os.listdir(source)
    for name in sorted(names, key=lambda name: name != "bundles") if files_first else names:
        _copy_tree(source / name, target / name)


def _copy_tree(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(mode=0o700, exist_ok=True)
        for name in os.listdir(source):
            _copy_tree(source / name, target / name)
        return
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:  # it went while the copy was made: cp says so, and goes on
        target.unlink(missing_ok=True)
