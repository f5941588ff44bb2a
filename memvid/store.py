"""The store: sessions' versions put to sleep, opened again, deleted. The only door to what is on disk.

Owns opening and closing, and the order of a wake; every other operation has a module of its own. Knows nothing of
models.

Rules:
- Sleep: temporary file → flush → read back → rename → flush folder → index row → receipt.
- Wake: index row → bundle file → bundle id → owner, version, parent and identity as the row says → reader.
- Delete: retire the files, oldest version first (the last rename is the point of no return) → index rows → remove
  what nothing refers to and no reader has open.
- One writer at a time, by the store's lock between processes and by `_writing` between threads. Readers never wait
  for a writer.
- What checks a store, keeps it in order or carries it elsewhere is imported where it is asked for: who only looks at
  one does not wait for it. Who may write imports it at once, for later the system may have no descriptor left.
- After a failed flush, or when the lock file was replaced, this object writes no more until the store is reopened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from .disk.budget import UNLIMITED, Beyond, Budget
from .disk.lock import StoreLock
from .errors import BundleMissing, SessionNotFound, StoreError
from .folder.folder import (
    StoreFolder,
    create_store,
    has_store_file,
    load_store_uuid,
    open_existing_root,
    open_or_make_root,
    require_creatable,
)
from .folder.marks import Marks, SessionMarks
from .folder.rates_file import Figure, Figures, load_rates, save_rates
from .folder.retention import Retention
from .folder.scrub_mark import ScrubMark, load_mark, save_mark
from .folder.versions import describe_versions, select_version, set_aside
from .format.blocks import BlockDraft, BlockEntry
from .format.bundle import BundleReader
from .format.codecs import RAW, Codec
from .format.identity import Identity
from .format.layout import RETIRED_SUFFIX
from .format.records import (
    DeleteReport,
    ExportReport,
    IndexRow,
    MaintenanceReport,
    OpenReport,
    Receipt,
    StoreStatistics,
    TensorReport,
    UsageReport,
    VerifyReport,
)
from .index.index import Index
from .index.schema import IndexUnusable
from .maintenance.compaction_plan import CompactionPolicy
from .recovery.opening import load_index
from .uri import SessionUri, not_found, parse_reference, parse_version_reference
from .writing import deletion, marking
from .writing.core import StoreCore
from .writing.sleeping import SleepRequest, environment, write_version

__all__ = [
    "DeleteReport",
    "IndexRow",
    "OpenReport",
    "Progress",
    "Receipt",
    "Store",
    "StoreStatistics",
    "VerifyReport",
]

Progress = Callable[[int, int], None]


class Store:
    """An open store. Use `Store.open`; close it when done. All methods may be called from several threads."""

    def __init__(
        self, folder: StoreFolder, lock: StoreLock | None, index: Index, opening: OpenReport, budget: Budget = UNLIMITED
    ) -> None:
        self.path = folder.path
        self.uuid = folder.uuid
        self.index = index
        self.opening = opening
        self._core = StoreCore(folder, lock, index, budget)

    # --- opening and closing

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool, budget: Budget = UNLIMITED) -> Store:
        """Open a store.

        To write: creates it if it is missing, takes its lock, removes what unfinished sleeps and deletes left, and
        makes the index anew where it is missing, foreign, stale or damaged. To read: takes no lock, writes nothing,
        and sees the sessions that were there when it was opened; works beside a live daemon.

        `budget` bounds what is written from now on; deleting it never hinders. One that bounds what the store holds
        costs a look at each bundle file here.

        Raises:
            NoStore, NotAStore, UnsupportedFormat, StoreLocked, UnsafePath, NoSpace, StoreIoError, DurabilityLost
        """
        if writable:
            _import_upkeep()
        store_path = os.path.abspath(os.fspath(path))
        root_fd = open_or_make_root(store_path) if writable else open_existing_root(store_path)
        lock: StoreLock | None = None
        try:
            if writable:
                lock, store_uuid = _claim(root_fd, store_path)
            else:
                store_uuid = load_store_uuid(root_fd, store_path)
            folder = StoreFolder(store_path, root_fd, store_uuid)
        except BaseException:
            if lock is not None:
                lock.close()
            os.close(root_fd)
            raise
        try:
            index, opening = load_index(folder, writable=writable)
        except BaseException:
            if lock is not None:
                lock.close()
            folder.close()
            raise
        return cls(folder, lock, index, opening, budget)

    def close(self) -> None:
        """Let go of files and lock. Open readers stay usable for what they have open. Idempotent."""
        self._core.close()

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._core.has_lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- sleep

    def write_bundle(
        self,
        *,
        uri: SessionUri,
        identity: Identity,
        parent: bytes | None,
        reused: Sequence[BlockEntry],
        blocks: Iterable[BlockDraft],
        session: Mapping[str, Any],
        token_count: int,
        codec: Codec = RAW,
        on_progress: Progress | None = None,
        beyond: Beyond | None = None,
        doubted: Sequence[BlockEntry] = (),
    ) -> Receipt:
        """Make a session's state durable as its next version, then return the receipt.

        `reused` come first in the chain and name the bundles that hold them; `blocks` continue it. The drafts' buffers
        are borrowed until this returns. `on_progress` is told (tokens written, tokens to write). `beyond` is for
        what is lost otherwise: a state may go beyond the store's and the day's budget, and a ledger of a few kilobytes
        into what the disk must keep free. `doubted` are those of the reused blocks that are read before they are
        referred to.

        Raises:
            InvalidDraft, LimitExceeded: what was handed in; nothing was written.
            BlockMissing, BundleMissing: a block that was reused, or found in the store, was deleted under it or cannot
                be read; nothing was written, and with all blocks handed in anew it can be tried again.
            Corruption: so it can where a doubted block is damaged.
            NoSpace, BudgetExceeded, StoreIoError, ReadBackFailed: the store is as it was before.
            DurabilityLost, LockLost: not acknowledged, and this store writes no more until it is opened again.
            ReadOnlyStore, StoreClosed
        """
        return write_version(
            self._core,
            SleepRequest(
                uri=uri,
                identity=identity,
                parent=parent,
                reused=reused,
                blocks=blocks,
                session=session,
                token_count=token_count,
                codec=codec,
                on_progress=on_progress,
                environment=environment(),
                beyond=beyond,
                doubted=doubted,
            ),
        )

    # --- wake and inspection

    def open_session(self, uri: SessionUri, version: int | None = None) -> BundleReader:
        """Open a version of a session, the latest if none is named, once its bundle is proven to be the one promised.

        Raises:
            SessionNotFound, BundleMissing, Truncated, TrailingData, CorruptBundle, BundleMismatch, OwnerMismatch,
            VersionMismatch, ParentMismatch, IndexMismatch, UnsupportedFormat, UnsafePath
        """
        from .checking.verify import require_same_as_row

        self._core.require_open()
        row = self.find_session(uri, version)
        if row is None:
            raise self._not_found(uri, version)
        try:
            reader = self.open_bundle(row.bundle_id)
        except BundleMissing:
            if not self._promised([row.bundle_id]):  # deleted meanwhile
                raise self._not_found(uri, version, but=row) from None
            raise
        now = self.find_session(uri, row.version)
        if now is None or now.bundle_id != row.bundle_id:  # deleted before what it needs was pinned: it may be gone
            reader.close()
            raise self._not_found(uri, version)
        try:
            require_same_as_row(row, uri, reader.manifest, reader.path)
        except BaseException:
            reader.close()
            raise
        return reader

    def open_bundle(self, bundle_id: bytes) -> BundleReader:
        """Open a bundle by its id, of any owner: for inspection. The bundle id is still recomputed.

        Raises:
            BundleMissing: there is no file of it, or one that only holds blocks for other bundles.
        """
        self._core.require_open()
        return self._core.open_reader(bundle_id)

    def resolve(self, text: str, also: Collection[SessionUri] = ()) -> SessionUri:
        """The session that `text` (a URI, NAMESPACE/NAME, or a bare NAME of the default namespace) means, if it is
        one of the store's or of `also`.

        Raises:
            InvalidUri. SessionNotFound: with those that come close, of any namespace.
        """
        self._core.require_open()
        wanted = parse_reference(text)
        if wanted in also or self.index.find(wanted) is not None:
            return wanted
        self._require_none_waiting(wanted)
        raise not_found(wanted, {*also, *self.index.near(wanted.name)})

    def find_session(self, uri: SessionUri, version: int | None = None) -> IndexRow | None:
        self._core.require_open()
        return self.index.find(uri, version)

    def can_be_deleted(self, uri: SessionUri) -> bool:
        """Whether there is anything of a session to delete, also if only versions are left that are listed nowhere:
        repair has set them aside, or they are missed."""
        self._core.require_open()
        return bool(self.index.bundles_of(uri))

    def versions(self, uri: SessionUri) -> list[IndexRow]:
        """All versions of a session, oldest first."""
        self._core.require_open()
        return self.index.versions(uri)

    def iter_sessions(self) -> Iterator[IndexRow]:
        """The latest version of each session, by URI."""
        self._core.require_open()
        yield from self.index.iter_latest()

    def iter_listed(self, namespace: str | None, page_rows: int) -> Iterator[list[tuple[IndexRow, int]]]:
        """As `iter_sessions`, of a namespace or of all, in pages, and with the bytes of the files of all versions."""
        self._core.require_open()
        yield from self.index.iter_listed(namespace, page_rows)

    def iter_uris(self, page_rows: int) -> Iterator[list[SessionUri]]:
        """All sessions, in order, in pages, each fetched when it is asked for; nothing but their names is read."""
        self._core.require_open()
        yield from self.index.iter_uris(page_rows)

    def load_scrub_mark(self) -> ScrubMark:
        """How far the last scrub has come."""
        return load_mark(self._core.folder)

    def save_scrub_mark(self, mark: ScrubMark) -> None:
        """Keep how far the scrub has come. Raises NoSpace, StoreIoError, DurabilityLost, ReadOnlyStore."""
        self._core.require_writable()
        save_mark(self._core.folder, mark)

    def load_rates(self) -> dict[str, dict[str, Figure]]:
        """What the last daemon has measured on its machine."""
        return load_rates(self._core.folder)

    def save_rates(self, figures: Figures) -> None:
        """Keep what was measured. Raises NoSpace, StoreIoError, DurabilityLost, ReadOnlyStore."""
        self._core.require_writable()
        save_rates(self._core.folder, figures)

    def verify(
        self,
        uri: SessionUri | None = None,
        *,
        deep: bool,
        on_progress: Progress | None = None,
        pace: Callable[[int], None] | None = None,
    ) -> VerifyReport:
        """Check one session, or everything: frames of reference only, or (deep) every byte. Changes nothing.

        Damage is reported, not raised. `on_progress` is told (bytes done, bytes in all) of the bundle files; `pace` of
        the bytes of each block that has been read. It may wait, or raise something of its own to give the check up.

        Raises:
            SessionNotFound
        """
        from .checking.verify import verify_store

        self._core.require_open()
        if uri is not None and self.find_session(uri) is None:
            raise self._not_found(uri, None)
        return verify_store(
            self._core.folder,
            self.index,
            uri,
            self._promised,
            deep=deep,
            on_progress=on_progress,
            pace=pace,
            index_now=self._index_now,
            all_known=self._core.writable,
        )

    def statistics(self) -> StoreStatistics:
        self._core.require_open()
        sessions, versions, file_bytes = self.index.totals()
        return StoreStatistics(
            sessions=sessions,
            versions=versions,
            bundle_files=self._core.folder.file_count(),
            file_bytes=file_bytes,
            bundles_pinned=len(self._core.pins),
            writable=self._core.writable,
        )

    # --- export and import

    def export_session(
        self,
        uri: SessionUri,
        version: int | None,
        target: str | os.PathLike[str],
        *,
        replacing: bool = False,
        on_progress: Progress | None = None,
    ) -> ExportReport:
        """Write a version, the latest if none is named, with all its blocks to one file outside the store.

        Every byte is checked on the way, and the file is flushed before it gets its name. Works in a store that was
        opened for reading, beside a live daemon. replacing: a file that is there is replaced, and stays as it is where
        that fails. `on_progress` is told (raw bytes copied, raw bytes in all).

        Raises:
            SessionNotFound
            TargetExists, UnsafePath: there is a file already, or it would lie in the store; nothing was written.
            NoSpace, StoreIoError, DurabilityLost, ReadBackFailed: nothing is left of it.
            Corruption: what a wake raises; nothing is left of it.
        """
        from .exchange import transfer

        with self.open_session(uri, version) as reader:
            return transfer.export_version(self._core, reader, target, on_progress, replacing=replacing)

    def export_tensors(
        self,
        uri: SessionUri,
        version: int | None,
        target: str | os.PathLike[str],
        *,
        kind: str | None = None,
        labels: Sequence[str] | None = None,
        replacing: bool = False,
        on_progress: Progress | None = None,
    ) -> TensorReport:
        """As `export_session`, but the arrays as one `.safetensors` file, for other tools; it cannot be imported.

        labels: the session's, the model's name and the version, unless given. Raises also NotTensors, LimitExceeded: it
        has slots that do not become tensors.
        """
        from .exchange import tensor_file

        with self.open_session(uri, version) as reader:
            return tensor_file.export_tensors(
                self._core,
                reader,
                target,
                kind=kind or tensor_file.DEFAULT_KIND,
                labels=labels,
                replacing=replacing,
                on_progress=on_progress,
            )

    def backup(self, target: str | os.PathLike[str], *, on_progress: Progress | None = None) -> MaintenanceReport:
        """Copy what the folder `target` lacks of this store's versions, tags and pins; it is a store that can take this
        one's place. Works in a store that was opened for reading, beside a live daemon that sleeps and compacts: each
        version is copied whole, or told in `problems`. What was deleted here stays there.

        `on_progress` is told (bytes written, bytes in all).

        Raises:
            UnsafePath, NotAStore, TargetExists: it lies in the store, holds other things, or is another store.
            NoSpace: its disk has no room for all of it; nothing was copied.
            StoreLocked, StoreIoError, DurabilityLost, LockLost: what was copied so far is whole; run it again.
        """
        from .exchange import backup

        self._core.require_open()
        path = backup.claim(self._core.folder, target)
        with Store.open(path, writable=True) as copy:
            return backup.copy_versions(
                self._core, copy._core, lambda row: bool(self._promised([row.bundle_id])), on_progress
            )

    def import_file(
        self,
        source: str | os.PathLike[str],
        *,
        as_uri: SessionUri | None = None,
        only_kin: bool = False,
        on_progress: Progress | None = None,
    ) -> Receipt:
        """Let an exported file become a version; the file is only read.

        It keeps its bundle id where its session has no such version yet. The same bundle again is the version that is
        there: nothing is written (`bytes_written` 0). Where the number is another bundle's, or where `as_uri` is not
        its own name, it becomes the session's next version, and the imported bundle its parent. With `only_kin` it
        comes to no session that has nothing to do with it, not even to one of its own name, and on top of no version
        with tokens that it lacks.

        Raises:
            NameTaken: with `only_kin`, the session has another history: its newest version and that of the file do not
                come from the same one, nor does one of both go on from all tokens of the other. Or it would become
                the newest version and does not begin with all tokens of that which is.
            StoreIoError: it cannot be read, or is no file.
            Corruption, LimitExceeded, UnsupportedFormat: it is no bundle, damaged, not whole, or of a later version.
            NoSpace, BudgetExceeded, ReadBackFailed: the store is as it was before.
            ReadOnlyStore, LockLost, DurabilityLost, StoreClosed
        """
        from .exchange import transfer

        return transfer.import_file(self._core, source, as_uri, on_progress, only_kin=only_kin)

    def adopt_incoming(
        self,
        bundle_id: bytes,
        *,
        as_uri: SessionUri | None = None,
        only_kin: bool = False,
        on_progress: Progress | None = None,
    ) -> Receipt:
        """Import what lies in STORE/incoming under this id, and remove it from there; for a client of a daemon.

        Raises:
            BundleMissing, UnsafePath: there is none, or it is not ours alone.
            As `import_file`; the file stays where it is.
        """
        from .exchange import transfer

        return transfer.adopt_incoming(self._core, bundle_id, as_uri, on_progress, only_kin=only_kin)

    # --- delete

    def delete_session(self, uri: SessionUri) -> DeleteReport:
        """Forget a session, all versions of it, also those that repair has set aside or that are missed, if it has no
        others. Needs no disk space.

        A crash leaves the session as it was, or without its oldest versions, or gone. Bundles that other sessions
        refer to keep their files, but are never listed as this session's again.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
            UnsafePath: repair has set all of it aside, and the quarantine cannot be looked into; nothing was deleted.
        """
        with self._core.committing():
            if not self.can_be_deleted(uri):
                raise self._not_found(uri, None)
            return deletion.delete_session(self._core.folder, self.index, self._core.pins, uri)

    def forget(self, uri: SessionUri, *, dry_run: bool = False) -> MaintenanceReport:
        """Delete a session and erase every byte of it that is not another session's too, then look whether it is so.

        What is shared stays, and is told with the sessions whose it is (`keep`). `problems` say what could not be
        erased or not be told, and why; without any, nothing of the session is in the store's files. Cut off, or asked
        for while something had it open, it is finished by asking again, also when the session is deleted by then.

        Raises:
            SessionNotFound: there is no such session, and nothing of it is left.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from .maintenance import forgetting

        return forgetting.forget(self._core, uri, self._promised, dry_run=dry_run)

    def usage(self) -> UsageReport:
        """What the store takes, by place and by need, and each session's part of it. Works in a store that was opened
        for reading, beside a daemon. Reads every version's manifest: seconds for thousands of versions. Counts
        the versions that are listed; those whose files are missing or cannot be read are `problems`.

        Raises:
            StoreIoError, StoreClosed
        """
        from .maintenance import usage

        return usage.usage(self._core, self._promised)

    def prune(self, retention: Retention, uri: SessionUri | None = None, *, dry_run: bool = False) -> MaintenanceReport:
        """Drop the versions, of one session or of all, that a retention does not keep. Needs no disk space.

        The newest version, tagged and pinned ones always stay. What stays is looked at as a wake would, but for the
        bytes of its blocks: a version that cannot be woken stands in `problems`, and an earlier one stays for it. A
        dry run says what would go and changes nothing; it works in a store that was opened for reading.

        Raises:
            SessionNotFound, CorruptMarks: nothing was dropped.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from .maintenance import pruning

        if uri is not None and self.find_session(uri) is None:
            raise self._not_found(uri, None)
        return pruning.prune(self._core, retention, uri, self._promised, dry_run=dry_run)

    # --- upkeep

    def gc(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove what nothing needs: retired files without a user, leftovers of unfinished writes, marks of versions
        that are gone. While the needs of some bundle are unknown it removes nothing and says so in `problems`. Never
        touches the quarantine. A dry run says what would go, also in a store that was opened for reading.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError, NoSpace
        """
        from .maintenance import gc

        return gc.gc(self._core, dry_run=dry_run)

    def compact(
        self,
        uri: SessionUri | None = None,
        *,
        dry_run: bool = False,
        policy: CompactionPolicy = CompactionPolicy(),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> MaintenanceReport:
        """Write the files of one session, or of all, anew, so that a wake opens few of them: as `policy` says.

        Nothing that a version holds changes, nor any id; no sleep or wake waits for it, and what is in use is left for
        the next compaction. Damaged bundles, and a disk or budget without room, are `problems`: what depends on them
        stays as it was. `should_stop` is asked between steps; each leaves a sound store, and running it again
        finishes what was begun. A dry run also works in a store that was opened for reading.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost
        """
        from .maintenance import compaction

        self._core.require_open()
        if uri is not None and self.find_session(uri) is None:
            raise self._not_found(uri, None)
        return compaction.compact(self._core, uri, policy, dry_run=dry_run, should_stop=should_stop)

    def repair(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Read every byte, and make a sound store of what is left of it; damaged files go to quarantine as they are.

        What was lost for good stands in `problems` (`version_lost`): which session and version, and how many tokens.
        A dry run says what would be done, also in a store that was opened for reading.

        Raises:
            NoSpace, StoreIoError: what was done so far is whole; run it again.
            ReadOnlyStore, LockLost, DurabilityLost
        """
        from .recovery import repair

        return repair.repair(self._core, dry_run=dry_run)

    def empty_quarantine(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove what repair has set aside, for good: those versions cannot come back then, their tags and pins go, and
        so does what was kept because they need it. Then as `gc`, which a dry run tells as the store is now.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError, NoSpace, UnsafePath
        """
        from .maintenance import gc

        return gc.empty_quarantine(self._core, dry_run=dry_run)

    def rebuild_index(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Make the index anew from the bundles; a dry run says in what it differs from them.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from .recovery import repair

        return repair.rebuild_index(self._core, dry_run=dry_run)

    # --- tags and pins

    def tag(self, uri: SessionUri, version: int | None, tag: str, *, move: bool = False) -> IndexRow:
        """Let a tag name a version, the latest if none is named. `move` takes the tag away from another version.

        Raises:
            BundleMissing: the version has no file.
            SessionNotFound, InvalidTag, TagTaken, LimitExceeded, CorruptMarks, NoSpace, StoreIoError
            ReadOnlyStore, LockLost, DurabilityLost
        """
        self._require_session(uri, version)
        return marking.tag(self._core, uri, version, tag, move=move)

    def untag(self, uri: SessionUri, tag: str) -> None:
        """Take a tag away, also one that names a version that is gone or missed.

        Raises:
            InvalidTag, MarkNotFound, CorruptMarks, NoSpace, StoreIoError, ReadOnlyStore, LockLost, DurabilityLost
        """
        marking.untag(self._core, uri, tag)

    def pin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Keep a version, the latest if none is named, whatever a retention says. Raises as `tag` does."""
        self._require_session(uri, version)
        return marking.pin(self._core, uri, version)

    def unpin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Give a version back to the retention, also one that is missed. Raises MarkNotFound, and as `tag` does."""
        self._core.require_open()
        if marking.version_or_missed(self._core, uri, version) is None:
            raise self._not_found(uri, version)
        return marking.unpin(self._core, uri, version)

    def marks(self, uri: SessionUri) -> SessionMarks:
        """A session's tags and pins. Raises CorruptMarks, UnsupportedFormat, UnsafePath."""
        self._core.require_open()
        return Marks.load(self._core.folder).session(uri)

    def resolve_version(self, text: str, *, also_missed: bool = False) -> IndexRow:
        """The one version that `text` means: a session as `resolve` reads it, and after an `@` a version number, a tag,
        or 8 or more hex digits of a bundle id; without it the latest version. `also_missed`: it may be one that is
        missed, which can lose its marks and nothing else.

        Raises:
            InvalidUri, AmbiguousVersion, SessionNotFound
            CorruptMarks: only where a tag is asked for.
        """
        name, selector = parse_version_reference(text)
        uri = self.resolve_marked(name) if also_missed else self.resolve(name)
        if selector is None:
            return self._require_session(uri, None)
        folder = self._core.folder
        marks = Marks.load(folder) if selector.tag is not None else Marks(folder.uuid)
        missed = [row for row in self.index.missed().values() if row.uri == uri] if also_missed else []
        waiting = [row for row in self.index.given_up().values() if row.uri == uri]
        return select_version(uri, [*self.index.versions(uri), *missed], marks, selector, waiting)

    def resolve_marked(self, text: str) -> SessionUri:
        """As `resolve`, also a session that has only missed versions."""
        return self.resolve(text, {row.uri for row in self.index.missed().values()})

    def _require_session(self, uri: SessionUri, version: int | None) -> IndexRow:
        row = self.find_session(uri, version)
        if row is None:
            raise self._not_found(uri, version)
        return row

    def _promised(self, bundle_ids: Collection[bytes]) -> set[bytes]:
        """Those of bundles that are not there, or not whole, which ought to be: by a fresh look, for a daemon beside us
        may have deleted them. A row that the index file never had cannot have left it, so that is no delete; unless a
        daemon has written there since, which has had rows of all that was there."""
        asked = {one for one in bundle_ids if self._core.folder.suffix_of(one) != RETIRED_SUFFIX}
        if self._core.has_lock:
            return set(filter(self.index.knows, asked))
        with self._index_now() as now:
            if now is None:
                return asked
            unwritten = self.index.not_in_file if now.read_at == self.index.read_at else frozenset()
            return {one for one in asked if one in unwritten or now.knows(one)}

    @contextlib.contextmanager
    def _index_now(self) -> Iterator[Index | None]:
        """What the index says now: ours, while no operation changes it; beside a daemon what its file says, None where
        that cannot be read."""
        if self._core.has_lock:
            with self._core.committing() if self._core.writable else contextlib.nullcontext():
                yield self.index
            return
        with contextlib.ExitStack() as stack:
            try:
                copy = Index.copy_to_memory(self.path, self._core.folder.root_fd, self.uuid)
            except (IndexUnusable, StoreError):
                yield None
                return
            yield stack.enter_context(contextlib.closing(copy))

    def _require_none_waiting(self, uri: SessionUri) -> None:
        """Raise SessionNotFound, and why, where repair has set aside all there was of the session that is meant."""
        if waiting := [row.version for row in self.index.given_up().values() if row.uri == uri]:
            raise set_aside(uri, waiting)

    def _not_found(self, uri: SessionUri, version: int | None, but: IndexRow | None = None) -> SessionNotFound:
        """The error for a session or version that is not there; `but` is its last row in an index that is too old."""
        versions = [row.version for row in self.index.versions(uri) if not but]
        waiting = [row.version for row in self.index.given_up().values() if row.uri == uri]
        if waiting and (not versions or version in waiting):
            return set_aside(uri, waiting)
        if not versions:
            return not_found(uri, (near for near in self.index.near(uri.name) if near != uri))
        return SessionNotFound(
            f"{uri} has no version {version}; it has {describe_versions(versions)}.",
            session=str(uri),
            version=version,
            suggestions=[str(uri)],
        )


def _claim(root_fd: int, path: str) -> tuple[StoreLock, str]:
    """Take the lock of a store that this program understands; make the store if the folder is empty.

    Looks before it writes: a store of a later version, or a folder with other things in it, is left as it is.
    """
    if has_store_file(root_fd, path):
        load_store_uuid(root_fd, path)
    else:
        require_creatable(root_fd, path)
    lock = StoreLock(root_fd, path)
    try:
        if not has_store_file(root_fd, path):
            return lock, create_store(root_fd, path)
        return lock, load_store_uuid(root_fd, path)
    except BaseException:
        lock.close()
        raise


def _import_upkeep() -> None:
    from .checking import verify  # noqa: F401
    from .exchange import backup, tensor_file, transfer  # noqa: F401
    from .maintenance import compaction, forgetting, gc, pruning, usage  # noqa: F401
    from .recovery import repair  # noqa: F401
