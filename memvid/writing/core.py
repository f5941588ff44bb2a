"""The parts that all operations of an open store share: folder, index, pins and lock; and the rules for writing.

Owns one rule: a commit happens under the store's lock, by one thread, and never after a failed flush.

Rules:
- Long work (writing a temporary file, reading, hashing) happens outside `committing`, and pins the blocks it uses.
- `committing` does only renames, removals, folder flushes, index rows and the checks that these need, so no sleep waits
  for another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..answers import Finding, VersionInfo
from ..disk.budget import UNLIMITED, Account, Beyond, Budget, Meter, utc_day
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.lock import StoreLock
from ..disk.paths import Stamp, closing_fd, undoing
from ..disk.room import free_bytes_of
from ..errors import (
    PUT_BACK,
    BlockMissing,
    BundleMissing,
    Corruption,
    DurabilityLost,
    LimitExceeded,
    LockLost,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
)
from ..folder.diary import Diary
from ..folder.folder import StoreFolder, id_in, manifest_name, pack_name
from ..folder.journal import Journal
from ..folder.seen_heads import SeenHeads
from ..folder.store_file import VERSIONS
from ..folder.used_days import UsedDays
from ..format.manifest import Manifest, read_manifest
from ..index.index import Index, row_of
from ..limits import MAX_VERSION
from ..uri import SessionUri
from .frame_files import FrameFiles, open_frames, pack_row
from .needs import Needs, Pins
from .unreadable import sentence_of

if TYPE_CHECKING:
    from .reader import BundleReader


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
        self.index = index
        self.journal = journal
        self.diary = Diary(folder)
        self.seen_heads = SeenHeads(folder)
        self.used_days = UsedDays(folder)
        self.pins = Pins()
        self.files = FrameFiles(folder)
        self.needs = Needs(folder, self.read_manifest)
        self.unreadable_versions: set[str] = set()
        """Manifests that could not be read when the store was opened. A delete and a sleep try again first."""
        self.marked_still: set[str] = set()
        """Versions that were deleted, and whose marks could not go with them. They are not missing, unless they come
        back: then the next delete leaves them out."""
        self.waiting: set[str] = set()
        """Packs that go once this process uses them no more; `remove_waiting` does that, where it is set."""
        self.remove_waiting: Callable[[], None] | None = None
        self.importing = threading.Lock()
        self._lock = lock
        self._writing = threading.RLock()
        self._reserved: list[tuple[SessionUri, int]] = []
        self._poison: StoreError | None = None
        self._closed = False
        self.account = Account(
            budget,
            held_bytes=folder.held_bytes,
            written_on=lambda day: self.index.written().get(day, 0),
            free_bytes=lambda: free_bytes_of(folder.packs_fd, folder.path),
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
        """Release files and lock. Idempotent."""
        with self._writing:
            if self._closed:
                return
            with contextlib.ExitStack() as stack:
                stack.callback(self.folder.close)
                if self._lock is not None:
                    stack.callback(self._lock.close)
                stack.callback(self.index.close)
                may_write = False
                with contextlib.suppress(StoreError):
                    self.require_writable()
                    may_write = True
                stack.callback(self.journal.close, tidying=may_write)
                stack.callback(self.files.close)
                if may_write:
                    with contextlib.suppress(StoreError):  # it is never needed
                        self.diary.write()
                    self.index.save(self.folder, always=True)
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

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """The one thread that may rename and remove files and change the index, while the lock is still ours. Raises
        also StoreIoError: `versions` or `packs` was moved away."""
        with self._writing, self.poisoning():
            self.require_writable()
            self.folder.require_in_place()
            yield
            self.index.save(self.folder)

    @contextlib.contextmanager
    def poisoning(self) -> Iterator[None]:
        """Note a failure: after it this object writes nothing more."""
        try:
            yield
        except (DurabilityLost, LockLost) as error:
            self._poison = self._poison or error
            raise

    @contextlib.contextmanager
    def journaling(self) -> Iterator[None]:
        """No turn comes meanwhile. Who is `committing` too begins that first: nothing within waits for it. A failure is
        noted before a thread that waits here goes on."""
        with self.journal.lock, self.poisoning():
            yield

    # --- version numbers

    @contextlib.contextmanager
    def next_version(self, uri: SessionUri, least: int = 1) -> Iterator[int]:
        """Reserve a version number for a version being written: one more than the largest in use, and `least` at least.

        Raises:
            LimitExceeded: the last version has the largest possible number. Only a file put into the store by hand can
                have it; an import refuses it.
        """
        with self._writing:
            self.read_again()
            latest = self.index.find(uri)
            version = max([latest.version if latest else 0, *self.being_written(uri), least - 1]) + 1
            if version > MAX_VERSION:
                raise LimitExceeded(f"{uri} has the largest version number that there is.", limit=MAX_VERSION)
            self._reserved.append((uri, version))
        try:
            yield version
        finally:
            with self._writing:
                self._reserved.remove((uri, version))

    def being_written(self, uri: SessionUri) -> tuple[int, ...]:
        """The reserved version numbers of a session: neither committed nor released."""
        with self._writing:
            return tuple(version for its_uri, version in self._reserved if its_uri == uri)

    # --- budgets

    @contextlib.contextmanager
    def metering(self, *, replacing: bool = False, beyond: Beyond | None = None) -> Iterator[Meter]:
        """The room that the budget leaves for a piece of work: checked before each write, and counted for the day.

        `replacing`: the write replaces a file, so the limit on the store's size does not apply. `beyond`: the limits
        that a sleep may exceed if it cannot be tried again. Writes of other operations count too. The writes of failed
        work stay counted: they have worn the disk.
        """
        meter = self.account.begin(utc_day(now_ns()), replacing=replacing, beyond=beyond)
        try:
            yield meter
        finally:
            self.account.end(meter, self.count_written)

    def count_written(self, day: int, size_bytes: int) -> None:
        if self.writable and not self._closed:
            with contextlib.suppress(StoreError):  # a count that is lost must not fail what it counted
                self.index.add_written(day, size_bytes)

    # --- manifests

    def read_manifest(self, bundle_id: str) -> Manifest:
        """The manifest of a version. Raises BundleMissing, UnsafePath, StoreIoError, UnsupportedFormat, Corruption,
        LimitExceeded."""
        try:
            fd, path = self.folder.open_name(manifest_name(bundle_id))
            with closing_fd(fd):
                return read_manifest(fd, path, bundle_id)
        except (Corruption, LimitExceeded) as error:
            row = self.index.rows_of([bundle_id]).get(bundle_id)
            path = self.folder.manifest_path(bundle_id)
            raise type(error)(sentence_of(error, path, row), **{**error.details, "bundle_id": bundle_id}) from error

    def open_reader(self, bundle_id: str) -> BundleReader:
        """Open a version for reading. Raises as `read_manifest`."""
        from .reader import BundleReader

        number = self.pins.add()
        with undoing(lambda: self.unpin(number)):
            manifest = self.read_manifest(bundle_id)
            self.pins.extend(number, (entry.id for entry in manifest.blocks))
            if not self.folder.has_manifest(bundle_id):  # a delete may have looked at the pins before
                path = self.folder.manifest_path(bundle_id)
                raise BundleMissing(f"{path} is missing. {PUT_BACK}", path=path)
            return BundleReader(
                manifest,
                bundle_id,
                self.folder.manifest_path(bundle_id),
                FrameFiles(self.folder),
                lambda block_id, stripped: self.index.packs_of(block_id, stripped=stripped),
                self.look_again,
                lambda: self.unpin(number),
            )

    @contextlib.contextmanager
    def pinning(self) -> Iterator[int]:
        """Pin blocks for a piece of work: the number for `pins.extend`."""
        number = self.pins.add()
        try:
            yield number
        finally:
            self.unpin(number)

    def unpin(self, number: int) -> None:
        """Release pins, and let packs go that waited for it. Never waits for a writer: what is left goes with the next
        delete or repack."""
        self.pins.release(number)
        if self.waiting and self.remove_waiting is not None and self._writing.acquire(blocking=False):
            try:
                if self.writable and not self._closed:
                    with contextlib.suppress(StoreError, OSError):
                        self.remove_waiting()
            finally:
                self._writing.release()

    def publish(self, temp: TempFile, name: str) -> None:
        """Give a flushed manifest or pack its name, durably. A file under it that is not what the name says may have
        what nothing else has, and goes to `damaged` first: a pack is moved, for that needs no room. A manifest is
        copied: while a damaged one is in its place, no pack goes. Call it while `committing`.

        Raises:
            NoSpace, StoreIoError, UnsafePath, DurabilityLost
        """
        if self.folder.has(name) and not _is_named_right(self, name):
            if name.startswith(f"{VERSIONS}/"):
                self.folder.copy_to_damaged(name)
            else:
                self.folder.move_to_damaged(name)
        self.folder.publish(temp, name)

    def publish_version(
        self, packs: Sequence[tuple[TempFile, bytes]], temp: TempFile, bundle_id: str, row: VersionInfo
    ) -> None:
        """The point of no return of a version: its flushed packs get their names, then its flushed manifest, then the
        index tells of them. Call it while `committing`.

        Raises:
            NoSpace, StoreIoError, DurabilityLost: there is no such version, and no such pack, then.
        """
        manifest = manifest_name(bundle_id)
        names = [manifest, *(pack_name(pack_id) for _, pack_id in packs)]
        new = [name for name in names if not self.folder.has(name)]
        was_known = self.index.knows(bundle_id)
        try:
            for pack, pack_id in packs:
                self.publish_pack(pack, pack_id)
            self.publish(temp, manifest)
            self.index.add(row)
        except BaseException as failure:  # after any error: a version that was not acknowledged must not stay
            self._take_back(new, [] if was_known else [bundle_id], manifest, failure)
            raise

    def _take_back(self, names: Sequence[str], versions: Sequence[str], manifest: str, failure: BaseException) -> None:
        """Remove what was published of a version that failed, its manifest first and durably: while that may come back
        with the power, its packs stay."""
        path = self.folder.path_of(manifest)
        try:
            for name in names:
                self.folder.remove(name)
                self.folder.flush([name])
            self.index.drop_packs(names)
            self.index.drop(versions)
        except Exception as error:
            raise DurabilityLost(
                f"{path} failed ({failure}), and could not be taken back ({error}). Nothing more is written until the "
                "store is opened again.",
                path=path,
            ) from error

    # --- packs

    def publish_pack(self, temp: TempFile, pack_id: bytes) -> str:
        """A flushed and checked pack gets its name, then its row; its name in the store. Call it while `committing`.
        Raises NoSpace, StoreIoError, DurabilityLost."""
        name = pack_name(pack_id)
        self.publish(temp, name)
        self.files.let_go(name)
        self.index.add_pack(pack_row(self.folder, name))
        return name

    def remove_packs(self, names: Iterable[str]) -> dict[str, int]:
        """Remove packs that nothing needs, durably; the bytes of each. Call it while `committing`. Raises StoreIoError,
        DurabilityLost: some of them may be gone."""
        removed = {}
        for name in sorted(names):
            removed[name] = self.folder.remove(name)
            self.files.let_go(name)
            self.index.drop_packs([name])
        self.folder.flush(removed)
        return removed

    def look_again(self) -> list[Finding]:
        """Enter packs and versions that came into the folder without this object, as a file that was put back, and let
        packs go whose files are gone, and versions that a daemon beside us has deleted. Why packs cannot be read.
        Raises StoreIoError, UnsafePath."""
        with self._writing:
            there, known = self.folder.list_packs(), self.index.pack_sizes().keys()
            self.index.drop_packs(gone := known - there)
            for name in gone:
                self.files.let_go(name)
            found = [_enter_pack(self, name) for name in sorted(there - known)]
            self.folder.changes.note()
            versions, rows = self.folder.list_versions(), self.index.bundle_ids()
            if (lost := rows - versions) and not self.has_lock:  # first: their numbers may have been given again
                self.index.drop(lost - self.still_known(lost))
            for bundle_id in sorted(versions - rows):
                self.enter_version(bundle_id)
            if versions - rows:
                drop_superseded(self, rows - versions)
            return [finding for finding in found if finding is not None]

    def look_if_changed(self, *, waiting: bool = False) -> None:
        """`look_again`, if manifests came or went without this object; cheap if none did. waiting: as of
        `Changes.of_others`; needed to decide which versions a session has. A reader beside a daemon keeps the versions
        of its opening."""
        if self.has_lock and self.folder.changes.of_others(waiting=waiting):
            self.look_again()

    def enter_version(self, bundle_id: str) -> Finding | None:
        """Let the index know a version; why it cannot be read, if so."""
        name = manifest_name(bundle_id)
        try:
            manifest = self.read_manifest(bundle_id)
            size_bytes = self.folder.bytes_of(name)
        except BundleMissing:  # it was moved away, or deleted
            self.unreadable_versions.discard(bundle_id)
            return None
        except StoreError as error:
            self.unreadable_versions.add(bundle_id)
            return Finding.of(self.folder.path_of(name), error)
        self.index.add(row_of(manifest, bundle_id, size_bytes))
        self.unreadable_versions.discard(bundle_id)
        return None

    def still_known(self, bundle_ids: Collection[str]) -> set[str]:
        """Those of these versions, whose manifests were not found, that were not deleted, by a fresh look: a daemon
        beside us lets a version go from the index's file before its manifest goes. Raises StoreIoError, UnsafePath."""
        if self.has_lock or not bundle_ids:
            return {one for one in bundle_ids if self.index.knows(one)}
        index, _ = Index.load(self.folder)
        with index:
            return {one for one in bundle_ids if index.knows(one)}

    def bases(self) -> dict[SessionUri, str]:
        """The versions behind which turns stand in the journal. Without the lock by a fresh look: a daemon beside us
        covers turns, and then deletes such versions. Raises StoreIoError, UnsafePath."""
        if self.has_lock:
            return self.journal.bases()
        with Journal.load(self.folder, writable=False) as journal:
            return journal.bases()

    def read_again(self) -> list[Finding]:
        """Enter the versions that were put back, or whose manifests could not be read before, as far as they can be
        read now; why others cannot. Before it is decided which versions a session has."""
        with self._writing:
            self.look_if_changed(waiting=True)
            findings = [self.enter_version(bundle_id) for bundle_id in sorted(self.unreadable_versions)]
            return [finding for finding in findings if finding is not None]

    def missing_of(self, block_ids: Collection[bytes], *, stripped: bool = False, again: bool = True) -> set[bytes]:
        """Those of the blocks that no pack has all of now, or (stripped) the header of, by the packs' own directories.
        What is not found is looked for once more: it may have moved, been put back, or not been read for a moment.
        again: False leaves the second look out, which waits for a thread that is `committing`. Raises StoreIoError,
        UnsafePath."""
        missing = set(block_ids)
        for name, some in self.index.packs_with(missing, stripped=stripped).items():
            if not missing.isdisjoint(some):
                with contextlib.suppress(StoreError), self.files.holding(name) as file:
                    missing -= {each for each in some if each in file.frames or (stripped and each in file.heads)}
        if missing and again:
            self.look_again()
            return self.missing_of(missing, stripped=stripped, again=False)
        return missing

    def find_sound(
        self,
        block_id: bytes,
        *,
        head: bool = False,
        but_for: Collection[str] = (),
        tell: Callable[[str, StoreError], None] = lambda _path, _error: None,
    ) -> tuple[str, Stamp] | None:
        """A pack that has a block with every byte right; or (head) its header at least; with the stamp of the file that
        was read. but_for: packs that do not count. tell: is told of copies that are damaged, or that the system
        refuses."""
        for name in self.index.packs_of(block_id, stripped=head):
            if name in but_for:
                continue
            try:
                with self.files.holding(name) as file:
                    stamp = file.stamp()
                    (file.read_head if head else file.check_block)(block_id)
                    return name, stamp
            except (BlockMissing, BundleMissing):
                continue  # it went meanwhile
            except StoreError as error:
                tell(self.folder.path_of(name), error)
        return None


def _is_named_right(core: StoreCore, name: str) -> bool:
    """Whether a file is the manifest, or has the very frames, that its name says, sound or not."""
    try:
        if name.startswith(f"{VERSIONS}/"):
            core.read_manifest(id_in(name))
        else:
            open_frames(core.folder, name).close()
    except StoreError:
        return False
    return True


def drop_superseded(core: StoreCore, missing: Iterable[str]) -> set[str]:
    """Let the index forget those of these versions without a manifest whose number another one has, with a manifest:
    the index was of another moment than the files. Which they are."""
    gone = set()
    for row in core.index.rows_of(missing).values():
        rivals = [each.bundle_id for each in core.index.versions(row.uri) if each.version == row.version]
        if any(each != row.bundle_id and core.folder.has_manifest(each) for each in rivals):
            gone.add(row.bundle_id)
    core.index.drop(gone)
    return gone


def _enter_pack(core: StoreCore, name: str) -> Finding | None:
    """Let the index know a pack; why it cannot be read, if so."""
    try:
        core.index.add_pack(pack_row(core.folder, name))
    except BundleMissing:  # it was moved away, or removed
        return None
    except StoreError as error:
        return Finding.of(core.folder.path_of(name), error)
    return None
