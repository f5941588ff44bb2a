"""The journal of an open store, used by several threads."""

from __future__ import annotations

import os
import threading
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


@pytest.mark.parametrize("what", ["a turn", "a delete", "a sleep"])
def test_a_turn_that_waited_for_a_flush_that_failed_is_not_acknowledged(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = sleep(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    store.acknowledge([turn(store, 2), turn(store, 2, uri=OTHER_URI, seed=1)])
    mine, others = turn(store, 5), turn(store, 6, uri=OTHER_URI, seed=1)
    core, comes, ends = store._core, threading.Event(), threading.Event()
    said: list[str] = []

    def acknowledge() -> None:
        try:
            store.acknowledge([others])
            said.append("acknowledged")
        except errors.StoreError as error:
            said.append(error.code)
        ends.set()

    waiting = threading.Thread(target=acknowledge)

    def coming() -> None:
        if threading.current_thread() is waiting:
            comes.set()

    def left() -> None:
        if waiting.ident is not None and threading.current_thread() is not waiting:
            assert ends.wait(30)  # all that it does comes before this thread goes on

    flush = os.fsync

    def fail(fd: int) -> None:
        if fd != core.journal._fd or waiting.ident is not None:
            return flush(fd)
        waiting.start()
        assert comes.wait(30)
        raise OSError(5, "EIO")

    core.journal.lock = Watched(core.journal.lock, coming, left)  # type: ignore[assignment]
    monkeypatch.setattr(os, "fsync", fail)
    flushes = {
        "a turn": lambda: store.acknowledge([mine]),
        "a delete": lambda: store.delete_session(URI),
        "a sleep": lambda: sleep(store, 400, before=made),
    }
    with pytest.raises(errors.DurabilityLost):
        flushes[what]()
    waiting.join()
    assert said == ["durability_lost"]
