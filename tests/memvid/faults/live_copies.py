"""Copies of a store in use, its files in any order, while sessions sleep and are repacked.

No copy may open and then lose, by a removal, what it could wake when it was opened.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final

from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store
from torpor.tests.memvid.faults.beginnings import Swept
from torpor.tests.memvid.faults.moments import EAGER, require_kept
from torpor.tests.memvid.faults.worlds import INDEX, SIZES
from torpor.tests.memvid.store_making import OTHER_URI, URI
from torpor.tests.memvid.store_making import sleep as put_to_sleep

_KEPT: Final = Retention(keep_last=9)
_MOST_TOKENS: Final = 256 * 12
_COPIES: Final = 240
ORDERS: Final = tuple(itertools.permutations(("versions", "packs", INDEX)))
_POLL_S: Final = 0.01


def sweep(base: Path, *, stride: int, first: int) -> Swept:
    """Copy the store of a process that writes, in all orders in turn; then try each copy."""
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
        _await_versions(store, child, more=6)
        for number in range(copies):
            _copy(store, base / str(number), ORDERS[number % len(ORDERS)])
            _await_versions(store, child, more=3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for number in range(copies):
        result.counts["mixed"] += 1
        with result.blaming(f"copy {number}"):
            result.counts["awake"] += require_kept(base / str(number))
        shutil.rmtree(base / str(number))
    return result


def _await_versions(store: Path, child: int, more: int) -> None:
    """Wait until the process that writes has made so many more."""
    before = set(store.rglob("*.mvm"))
    while not (store / INDEX).exists() or len(set(store.rglob("*.mvm")) - before) < more:
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
            store.repack(policy=EAGER)
            store.prune(_KEPT)
            tokens = tokens + 256 if tokens < _MOST_TOKENS else 40
            newest = newest if tokens > 40 else {}
            if tokens == 40:
                store.delete_session(OTHER_URI)


def _copy(source: Path, target: Path, order: tuple[str, ...]) -> None:
    names = sorted(os.listdir(source), key=lambda name: order.index(name) if name in order else len(order))
    for name in names:
        _copy_tree(source / name, target / name)
    for name in ("versions", "packs"):
        (target / name).mkdir(mode=0o700, exist_ok=True)


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
