"""Many threads on one store, and another process that reads it: everyone gets whole, acknowledged versions (T8).

Each history starts threads that sleep, wake, delete, forget, prune, repack, mark and verify as their random numbers
say, on the same few sessions, while a process of its own wakes what it finds. What a session's version holds is told by
its receipt, so each wake can be checked byte by byte.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.errors import BlockMissing, BundleMissing, Corruption, MarkNotFound, SessionNotFound
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import Receipt
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making
from torpor.tests.memvid.store_making import expected, id_of, sleep, token_ids

URIS = tuple(SessionUri("default", name) for name in ("agent", "fork", "other"))
SIZES = {"layers": 1, "heads": 1, "dim": 1}
COUNTS = (1, 256, 300, 600)
PATIENCE_SECONDS = 60.0

Known = dict[bytes, tuple[int, int]]


class History:
    """Threads on one store. `known` are the contents of all that was ever acknowledged or is being written."""

    def __init__(self, store: Store, seed: int, steps: int) -> None:
        self.store = store
        self.steps = steps
        self.seed = seed
        self.known: Known = {}
        self.receipts: list[Receipt] = []
        self.failures: list[BaseException] = []
        self.done = 0
        self._knowing = threading.Condition()

    def run(self, threads: int) -> None:
        jobs = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]
        for job in jobs:
            job.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for job in jobs:
            job.join(max(deadline - time.monotonic(), 0))
            assert not job.is_alive(), "a thread waits for ever"
        if self.failures:
            raise self.failures[0]

    def _work(self, number: int) -> None:
        drawn = random.Random(f"{self.seed} {number}")
        work: list[Callable[[random.Random], None]] = [
            self.sleep_on, self.sleep_on, self.sleep_whole, self.wake, self.wake, self.delete, self.prune, self.repack,
            self.upkeep,
        ]  # fmt: skip
        try:
            for _ in range(self.steps):
                if self.failures:
                    return
                drawn.choice(work)(drawn)
                self.done += 1
        except BaseException as failure:
            self.failures.append(failure)

    # --- what the threads do

    def slept(self, receipt: Receipt, count: int, seed: int) -> None:
        with self._knowing:
            self.known[receipt.bundle_id] = count, seed
            self.receipts = [*self.receipts[-12:], receipt]
            self._knowing.notify_all()

    def content_of(self, bundle_id: str) -> tuple[int, int]:
        """What a version holds. Between its row and its receipt a version may be woken: then wait for the receipt."""
        with self._knowing:
            assert self._knowing.wait_for(lambda: bundle_id in self.known, PATIENCE_SECONDS), "nobody slept this"
            return self.known[bundle_id]

    def sleep_whole(self, drawn: random.Random) -> None:
        count, seed = drawn.choice(COUNTS), drawn.randrange(3)
        receipt = sleep(self.store, count, uri=drawn.choice(URIS), seed=seed, **SIZES)
        self.slept(receipt, count, seed)

    def sleep_on(self, drawn: random.Random) -> None:
        """After some earlier receipt, which may be gone by now."""
        with self._knowing:
            before = drawn.choice(self.receipts) if self.receipts else None
        if before is None:
            return
        count, seed = self.known[before.bundle_id]
        longer = min(count + drawn.choice([0, 40, 256]), 1500)
        with contextlib.suppress(BundleMissing, BlockMissing):
            receipt = sleep(self.store, longer, uri=drawn.choice(URIS), seed=seed, before=before, **SIZES)
            self.slept(receipt, longer, seed)

    def wake(self, drawn: random.Random) -> None:
        uri = drawn.choice(URIS)
        try:
            with self.store.open_session(uri) as reader:
                time.sleep(drawn.choice([0, 0, 0.002]))
                require_right(reader, *self.content_of(reader.bundle_id))
        except SessionNotFound:
            pass

    def delete(self, drawn: random.Random) -> None:
        with contextlib.suppress(SessionNotFound):
            if drawn.random() < 0.3:
                self.store.forget(drawn.choice(URIS))
            elif drawn.random() < 0.5:
                self.store.delete_session(drawn.choice(URIS))

    def prune(self, drawn: random.Random) -> None:
        self.store.prune(Retention(keep_last=drawn.randint(1, 3)))

    def repack(self, drawn: random.Random) -> None:
        assert self.store.repack(policy=RepackPolicy()).problems == ()

    def upkeep(self, drawn: random.Random) -> None:
        choice = drawn.randrange(5)
        uri = drawn.choice(URIS)
        if choice == 0:
            with contextlib.suppress(SessionNotFound):
                assert self.store.repack(drawn.choice(URIS)).ok
        elif choice == 1:
            report = self.store.verify(deep=drawn.random() < 0.5)
            assert report.findings == ()
        elif choice == 2:
            with contextlib.suppress(SessionNotFound):
                self.store.pin(uri, None)
            with contextlib.suppress(SessionNotFound, MarkNotFound):
                self.store.unpin(uri, id_of(self.store, uri))
        elif choice == 3:
            versions = [row.version for row in self.store.versions(uri)]
            assert versions == sorted(set(versions))
        else:
            self.store.usage()


def require_right(reader: object, count: int, seed: int) -> None:
    assert store_making.contents(reader) == expected(count, seed=seed, **SIZES)  # type: ignore[arg-type]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def read_beside(path: str) -> int:
    """What the other process does until its input ends: opens the store, wakes all that it finds, and counts. A
    version that it cannot wake must be gone when it looks again."""
    wakes = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        with Store.open(path, writable=False) as store:
            rows = [row for uri in URIS for row in store.versions(uri)]
            for row in rows:
                try:
                    with store.open_session(row.uri, row.version) as reader:
                        tokens, count = reader.tokens(), row.block_tokens
                        seed = next(seed for seed in range(3) if tokens == token_ids(0, count, seed))
                        require_right(reader, count, seed)
                    wakes += 1
                except (SessionNotFound, Corruption) as error:
                    with Store.open(path, writable=False) as again:
                        found = again.find_session(row.uri, row.version)
                        if found is not None and found.bundle_id == row.bundle_id:
                            raise AssertionError("what it could not wake is there") from error
    print(wakes)
    return 0


@contextlib.contextmanager
def reader_beside(path: Path) -> Iterator[None]:
    command = [sys.executable, __file__, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0
    assert int(output) >= 0


def run_history(path: Path, seed: int, *, threads: int = 4, steps: int = 12, beside: bool = False) -> int:
    before = open_files()
    with Store.open(path, writable=True) as store:
        history = History(store, seed, steps)
        with reader_beside(path) if beside else contextlib.nullcontext():
            history.run(threads)
        assert not store._core.pins.blocks()
        require_all(store, history)
    with Store.open(path, writable=True) as store:
        assert store.opening.unreadable == ()
        assert store.opening.index_rebuilt is None
        require_all(store, history)
    assert open_files() == before, "descriptors stayed open"
    return history.done


def require_all(store: Store, history: History) -> None:
    for uri in URIS:
        for row in store.versions(uri):
            with store.open_session(uri, row.version) as reader:
                require_right(reader, *history.known[reader.bundle_id])
    assert store.verify(deep=True).findings == ()
    assert store.repair(dry_run=True).actions == ()


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("seed", range(8))
def test_t8_threads_that_do_everything_at_once_lose_nothing_and_wait_for_nothing(store_path: Path, seed: int) -> None:
    assert run_history(store_path, seed) == 48


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("quick_switches")
def test_t8_a_process_that_reads_beside_them_wakes_whole_versions_only(store_path: Path) -> None:
    assert run_history(store_path, 77, steps=60, beside=True) == 240


@pytest.mark.heavy
@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("seed", range(100, 250))
def test_t8_the_same_in_many_histories(store_path: Path, seed: int) -> None:
    assert run_history(store_path, seed, threads=2 + seed % 7, steps=20) == 20 * (2 + seed % 7)


def test_a_temporary_file_is_no_leftover_between_its_making_and_its_use(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that looked for leftovers took it for one, and the sleep that had made it failed."""
    found: list[dict[str, int]] = []
    folder = store._core.folder
    looking = threading.Thread(target=lambda: found.append(folder.remove_leftovers(dry_run=True)))

    class Made(durable.TempFile):
        def __init__(self, *how: Any, **changing: Any) -> None:
            super().__init__(*how, **changing)
            looking.start()
            looking.join(0.05)

    monkeypatch.setattr(durable, "TempFile", Made)
    with contextlib.closing(folder.new_temp()):
        looking.join()
    assert found == [{}]


if __name__ == "__main__":
    sys.exit(read_beside(sys.argv[1]))
