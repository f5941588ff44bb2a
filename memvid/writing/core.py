"""The parts that all operations of an open store share: folder, index, pins and lock; and the rules for writing.

Owns one rule: a commit happens under the store's lock, by one thread, and never after a failed flush.

Rules:
- Long work (writing a temporary file, reading, hashing) happens outside `committing`, and pins the bundles it uses.
- `committing` does only renames, folder flushes, index rows and the checks that these need, so no sleep waits for
  another. A rebuild of the index takes longest: it writes all rows there, but reads the bundles before, and inside
  `committing` only those that changed meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..disk.budget import UNLIMITED, Account, Beyond, Budget, Meter, utc_day
from ..disk.clock import now_ns
from ..disk.lock import StoreLock
from ..disk.paths import undoing
from ..disk.room import free_bytes_of
from ..errors import (
    BundleMissing,
    DurabilityLost,
    LimitExceeded,
    LockLost,
    NoSpace,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
    StoreIoError,
    UnsafePath,
)
from ..folder import duplicate_files
from ..folder.folder import StoreFolder
from ..folder.journal import Journal
from ..folder.pins import Pins
from ..format.bundle import BundleFile, FrameFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.reader import BundleReader
from ..index.index import Index
from ..index.rows import IndexedBundle
from ..index.schema import IndexUnusable
from ..limits import MAX_VERSION
from ..uri import SessionUri
from . import deletion

_MENDING_PAUSE_S: Final = 60.0
"""Between two trials to give an index in memory its file, seconds."""


class StoreCore:
    """The parts of one open store. Safe from several threads."""

    def __init__(
        self,
        folder: StoreFolder,
        lock: StoreLock | None,
        index: Index,
        journal: Journal,
        budget: Budget = UNLIMITED,
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.index = index
        self.journal = journal
        self.pins = Pins()
        self._lock = lock
        self._writing = threading.RLock()
        self._reserved: list[tuple[SessionUri, int]] = []
        self.importing = threading.Lock()
        self._poison: StoreError | None = None
        self._next_mending = 0.0
        self._closed = False
        self._account = Account(
            budget,
            held_bytes=folder.held_bytes,
            written_on=lambda day: self.index.written_on(day),
            free_bytes=lambda: free_bytes_of(folder.bundles_fd, folder.path),
        )
        if budget.max_store_bytes is not None:
            folder.held_bytes()

    @property
    def path(self) -> str:
        return self.folder.path

    @property
    def writable(self) -> bool:
        """Whether this object may still write: it holds the lock, and no flush has failed."""
        return self._lock is not None and self._poison is None

    @property
    def has_lock(self) -> bool:
        return self._lock is not None

    def close(self) -> None:
        """Release files and lock. An open reader can still read the files that it has open. Idempotent.

        The index file is brought up to date even after a failed flush: its log holds only earlier commits, SQLite does
        this on every close, and an opening trusts no page without its checksum.
        """
        with self._writing:
            if self._closed:
                return
            with contextlib.ExitStack() as stack:
                stack.callback(self.folder.close)
                if self._lock is not None:
                    stack.callback(self._lock.close)
                stack.callback(self.index.close)
                stack.callback(self.journal.close, tidying=self.writable)
                if self.writable:
                    with contextlib.suppress(DurabilityLost, LockLost):
                        self._try_to_mend_index_file()
                self._closed = True

    # --- guards

    def require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"The store {self.path} was closed.", path=self.path)

    def require_writable(self) -> None:
        """Raises StoreClosed, ReadOnlyStore, LockLost, or again the failure after which nothing is written."""
        self.require_open()
        if self._lock is None:
            raise ReadOnlyStore(f"The store {self.path} was opened for reading only.", path=self.path)
        if self._poison is not None:
            raise type(self._poison)(
                f"The store {self.path} writes no more since an earlier failure: {self._poison.message}",
                **self._poison.details,
            )
        self._lock.require_held()

    def begin_upkeep(self, *, dry_run: bool) -> None:
        """Before an operation that a dry run only plans. Raises as `require_writable`; a dry run only StoreClosed."""
        if dry_run:
            self.require_open()
        else:
            self.require_writable()
            self.mend_index_file()

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """The one thread that may rename files and change the index, while the lock is still ours."""
        with self._writing, self.poisoning():
            self.require_writable()
            yield

    @contextlib.contextmanager
    def poisoning(self) -> Iterator[None]:
        """Note a failure: after it this object writes nothing more."""
        try:
            yield
        except (DurabilityLost, LockLost) as error:
            self._poison = self._poison or error
            raise

    def mend_index_file(self) -> None:
        """Write an index in memory to its file again, if the disk takes it now: while the file is behind, no bundle
        file may be removed, and the next opening knows less. Called before each piece of work. Each trial writes the
        whole index, so after a failure the next one comes a while later, or at the end."""
        if time.monotonic() >= self._next_mending:
            self._try_to_mend_index_file()

    def _try_to_mend_index_file(self) -> None:
        if self.index.has_file:
            return
        self._next_mending = time.monotonic() + _MENDING_PAUSE_S
        with contextlib.suppress(NoSpace, StoreIoError, UnsafePath), self.committing():
            self.index.return_to_file()
            self._next_mending = 0.0

    # --- what is there now

    def promised(self, bundle_ids: Iterable[bytes]) -> set[bytes]:
        """Those of the bundles that are missing or damaged and still belong to a session, by a fresh look: a daemon
        beside us may have deleted some. A row that the index file never had was not deleted from it, unless a daemon
        has written there since: it had a row for each file."""
        asked = {one for one in bundle_ids if self.folder.suffix_of(one) != RETIRED_SUFFIX}
        if self.has_lock:
            return set(filter(self.index.knows, asked))
        with self.index_now() as now:
            if now is None:
                return asked
            unwritten = self.index.not_in_file if now.read_at == self.index.read_at else frozenset()
            return {one for one in asked if one in unwritten or now.knows(one)}

    @contextlib.contextmanager
    def index_now(self) -> Iterator[Index | None]:
        """The present index: ours, while no operation changes it; beside a daemon the index file, None if
        unreadable."""
        if self.has_lock:
            with self.committing() if self.writable else contextlib.nullcontext():
                yield self.index
            return
        try:
            copy = Index.copy_to_memory(self.path, self.folder.root_fd, self.folder.uuid)
        except (IndexUnusable, StoreError):
            yield None
            return
        with copy:
            yield copy

    # --- versions

    @contextlib.contextmanager
    def next_version(self, uri: SessionUri) -> Iterator[int]:
        """Reserve a version number for a version being written: one more than the largest in use, plus the number of
        bundles of unknown owner. Versions that are set aside, missed, unreadable or being written are in use too.

        Raises:
            LimitExceeded: the last version has the largest possible number. Only a file put into the store by hand can
                have it; an import refuses it.
        """
        with self._writing:
            version = max([self.index.last_number(uri), *self.being_written(uri)]) + self.index.unnumbered() + 1
            if version > MAX_VERSION:
                raise _numbers_used_up(uri)
            self._reserved.append((uri, version))
        try:
            yield version
        finally:
            self._give_back(uri, version)

    @contextlib.contextmanager
    def this_version(self, uri: SessionUri, version: int, bundle_id: bytes) -> Iterator[bool]:
        """Reserve this version number for a version being written. False if another bundle has it, or a bundle of
        unknown owner may have it. A missed version keeps its own number."""
        with self._writing:
            taken = self.being_written(uri)
            is_open = bundle_id in self.index.missed() or not self.index.unnumbered()
            is_free = is_open and version not in taken and self.index.bundles_numbered(uri, version) <= {bundle_id}
            self._reserved.append((uri, version))
        try:
            yield is_free
        finally:
            self._give_back(uri, version)

    def being_written(self, uri: SessionUri) -> tuple[int, ...]:
        """The reserved version numbers of a session: neither committed nor released."""
        with self._writing:
            return tuple(version for its_uri, version in self._reserved if its_uri == uri)

    def _give_back(self, uri: SessionUri, version: int) -> None:
        with self._writing:
            self._reserved.remove((uri, version))

    # --- budgets

    @contextlib.contextmanager
    def metering(self, *, replacing: bool = False, beyond: Beyond | None = None) -> Iterator[Meter]:
        """The room that the budget leaves for a piece of work: checked before each write, and counted for the day.

        `replacing`: the write replaces a file, so the limit on the store's size does not apply. `beyond`: the limits
        that a sleep may exceed if it cannot be tried again. Writes of other operations count too. The writes of failed
        work stay counted: they have worn the disk.
        """
        meter = self._account.begin(utc_day(now_ns()), replacing=replacing, beyond=beyond)
        try:
            yield meter
        finally:
            self._account.end(meter, self.count_written)

    def count_written(self, day: int, size_bytes: int) -> None:
        if self.writable and not self._closed:
            with contextlib.suppress(StoreError):  # a count that is lost must not fail what it counted
                self.index.add_written(day, size_bytes)

    # --- files

    def open_bundle(self, bundle_id: bytes) -> BundleFile:
        """Open a bundle's file, live or retired, with its manifest. Raises BundleMissing, StoreIoError, Corruption."""
        return BundleFile(*self.folder.open_bundle(bundle_id), bundle_id)

    def in_place(self, bundle: IndexedBundle) -> IndexedBundle:
        """A bundle's index row, made once its file has its name, with the file's stamp."""
        try:
            stamp = self.folder.stamp_of(bundle.bundle_id, LIVE_SUFFIX)
        except StoreIoError:  # a row without a stamp makes the next open read the file
            stamp = None
        return dataclasses.replace(bundle, stamp=stamp)

    def open_frames(self, bundle_id: bytes) -> FrameFile:
        """Open a bundle's file, or files, for their frames. Raises as `open_bundle`."""
        return duplicate_files.open_frames(self.folder, bundle_id)

    def open_pinned(self, bundle_id: bytes) -> tuple[BundleFile, Callable[[], None]]:
        """Pin a bundle and all holders of its blocks, and open its file; the second value releases the pins.

        If the file is rewritten between the two, it is opened again: the holders that the earlier file named may be
        gone.
        """
        while True:
            held = [bundle_id]
            self.pins.add(held)
            with contextlib.ExitStack() as stack:
                stack.callback(self.unpin, held)
                file = stack.enter_context(self.open_bundle(bundle_id))
                self.pins.add(file.directory.holders)
                held += file.directory.holders
                if self.folder.is_current(bundle_id, file.stamp()):
                    stack.pop_all()
                    return file, functools.partial(self.unpin, held)

    def open_reader(self, bundle_id: bytes) -> BundleReader:
        """Open a bundle as a version of a session. Raises as `open_bundle` does, and if its session was deleted."""
        file, release = self.open_pinned(bundle_id)
        with undoing(release), undoing(file.close):
            if file.manifest is None:
                raise BundleMissing(
                    f"The session of {file.path} was erased; the file only holds blocks that other sessions need.",
                    bundle_id=bundle_id.hex(),
                    path=file.path,
                )
            return BundleReader(file, file.manifest, self.open_frames, lambda: self.open_bundle(bundle_id), release)

    # --- pins

    @contextlib.contextmanager
    def pinning(self) -> Iterator[Callable[[bytes], None]]:
        """Pin bundles for a piece of work; yields a function that pins one more."""
        held: list[bytes] = []

        def pin(bundle_id: bytes) -> None:
            self.pins.add([bundle_id])
            held.append(bundle_id)

        try:
            yield pin
        finally:
            self.unpin(held)

    def unpin(self, bundle_ids: Iterable[bytes]) -> None:
        """Release pins. Never waits for a writer: a file left over goes with the next delete, gc or open."""
        self.pins.release(bundle_ids)
        if self.pins.waiting and self._writing.acquire(blocking=False):
            try:
                if not self._closed and self.writable:
                    with contextlib.suppress(StoreError, OSError), self.poisoning():
                        deletion.remove_waiting(self.folder, self.index, self.pins)
            finally:
                self._writing.release()


def _numbers_used_up(uri: SessionUri) -> LimitExceeded:
    return LimitExceeded(
        f"{uri} has the largest version number that there is ({MAX_VERSION}), or near it, and cannot get another one. "
        "Export it and import the file under another name (`torpor export`, `torpor import --as`): there it counts "
        "from 1.",
        session=str(uri),
        limit=MAX_VERSION,
    )
