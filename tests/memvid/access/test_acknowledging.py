"""The journal of an open store, used by several threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import OTHER_URI, URI, pack_of, sleep, turn


class Watched:
    """A lock that tells when a thread comes to it, and when one has left it."""

    def __init__(self, lock: Any, coming: Callable[[], None], left: Callable[[], None] = lambda: None) -> None:
        self.lock, self._coming, self._left = lock, coming, left

    def __enter__(self) -> None:
        self._coming()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if not self.lock._is_owned():
            self._left()

    def acquire(self, blocking: bool = True) -> bool:
        self._coming()
        return bool(self.lock.acquire(blocking))

    def release(self) -> None:
        self.__exit__()


@pytest.mark.parametrize("what", ["stripped", "a pack is missing"])
def test_nobody_who_holds_the_journal_waits_for_who_writes_versions(store: Store, what: str) -> None:
    """A delete holds both, the other one first: neither would ever end."""
    made = sleep(store, 300)
    if what == "stripped":
        store.strip(URI)
    else:
        pack_of(store, made).unlink()
    Path(store.path, "marks.json").unlink()
    core, record, asked = store._core, turn(store, 5), []

    def coming() -> None:
        asked.append(core._writing.lock._is_owned() or not core.journal.lock._is_owned())

    core._writing = Watched(core._writing, coming)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(errors.BlockMissing):
            store.acknowledge([record])
    store.acknowledge([turn(store, 5, uri=OTHER_URI)])
    store.delete_session(OTHER_URI)
    assert asked
    assert all(asked)


def test_a_pack_that_was_put_back_carries_turns_at_once_without_marks(store: Store) -> None:
    pack = pack_of(store, sleep(store, 300))
    away = pack.rename(Path(store.path).parent / pack.name)
    Path(store.path, "marks.json").unlink()
    with pytest.raises(errors.BlockMissing):
        store.acknowledge([turn(store, 5)])
    away.rename(pack)
    store.acknowledge([turn(store, 5)])
    assert store.has_turns(URI)
