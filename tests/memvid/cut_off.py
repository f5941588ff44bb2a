"""Cuts an operation off before each call that changes the disk: the stores that are left.

As a kill would, which `faults/kill.py` has for scenarios, a share of them at each commit. Of stores that are the same
but for the bytes of temporary files the first is given: what is begun is of no use to anybody.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from torpor.memvid.store import Store
from torpor.tests.memvid.faults.shim import Call, Shim
from torpor.tests.memvid.store_making import remove_index, tree


def copies_at_each_step(path: Path, folder: Path, work: Callable[[], object]) -> list[Path]:
    """Copies of a store in a new folder, as it is before each change that some work makes, and behind the last one."""
    copies: list[Path] = []
    known: list[tuple[dict[str, bytes], bool]] = []

    def keep() -> None:
        files = tree(path)
        others = {name: data for name, data in files.items() if not name.endswith(".tmp")}
        state = others, len(others) < len(files)
        if state not in known:
            known.append(state)
            copies.append(folder / str(len(copies)))
            shutil.copytree(path, copies[-1], ignore=shutil.ignore_patterns("lock"))

    def run(call: Call) -> Any:
        if call.changes_state:
            keep()
        return call.run()

    with Shim(run):
        work()
    keep()
    return copies


def stores_cut_off(store: Store, folder: Path, work: Callable[[], object]) -> Iterator[Store]:
    """Each store that work on an open one leaves where it is cut off, opened to write: with its index, and without."""
    copies = copies_at_each_step(Path(store.path), folder, work)
    assert len(copies) > 3, "it changes hardly anything"
    for path in copies:
        lost = Path(shutil.copytree(path, f"{path}-without-index"))
        remove_index(lost)
        for left in (path, lost):
            with closing(Store.open(left, writable=True)) as again:
                yield again
