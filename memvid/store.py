"""The store: puts versions of sessions to sleep, opens and deletes them. All access to the disk goes through it.

Owns opening, closing, sleep, backup and delete. The other methods are in `access/`; every operation has its own module.

Rules:
- Sleep: temporary file → flush → read back → rename → flush folder → index row → receipt.
- Wake: index row → bundle file → bundle id → owner, version, parent and identity as the row says → reader.
- Delete: retire the files, oldest version first (the last rename is the point of no return) → index rows → remove the
  files that no version refers to and no reader has open.
- One writer at a time, by the store's lock between processes and by `_writing` between threads. Readers never wait
  for a writer.
- Modules that check, maintain or export a store are imported at first use: a reader does not wait for them. A writer
  imports them at once, because later the system may have no descriptor left.
- After a failed flush, or when the lock file was replaced, this object writes no more until the store is reopened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .access.acknowledging import Acknowledging
from .access.exchanging import Exchanging
from .access.tagging import Tagging
from .access.upkeep import Upkeep
from .disk.budget import UNLIMITED, Beyond, Budget
from .disk.lock import StoreLock
from .disk.paths import undoing
from .errors import StoreError, StoreIoError
from .folder.folder import StoreFolder
from .folder.group_file import GROUP, Group, drop_group, load_group, save_group
from .folder.journal import Journal
from .folder.store_file import (
    create_store,
    has_store_file,
    load_store_uuid,
    open_existing_root,
    open_or_make_root,
    require_creatable,
)
from .format.blocks import BlockDraft, BlockEntry
from .format.identity import Identity
from .format.records import (
    DeleteReport,
    IndexRow,
    MaintenanceReport,
    OpenReport,
    Progress,
    Receipt,
    StoreStatistics,
    VerifyReport,
)
from .recovery.opening import load_index
from .recovery.replaying import keep_turns_behind, replay
from .uri import SessionUri
from .writing import deletion
from .writing.core import StoreCore
from .writing.sleeping import VersionDraft, write_version

__all__ = ["DeleteReport", "IndexRow", "OpenReport", "Progress", "Receipt", "Store", "StoreStatistics", "VerifyReport"]


class Store(Exchanging, Upkeep, Tagging, Acknowledging):
    """An open store. Use `Store.open`; close it when done. All methods may be called from several threads."""

    _group: Group | None = None
    """The sessions whose versions count together now."""
    _is_ending = False
    """A group has ended, and its file may still be there."""

    # --- opening and closing

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool, budget: Budget = UNLIMITED) -> Store:
        """Open a store.

        To write: creates it if it is missing, takes its lock, removes leftovers of unfinished sleeps and deletes, and
        rebuilds an index that is missing, foreign, stale or damaged. To read: takes no lock, writes nothing, and sees
        the sessions of this moment; works beside a live daemon.

        `budget` limits writes from now on, and never a delete. A limit on the size of the store costs a look at each
        bundle file here. Also removes what is there of a group of new sessions that was not finished (`begin_group`).

        Raises:
            NoStore, NotAStore, UnsupportedFormat, StoreLocked, UnsafePath, NoSpace, StoreIoError, DurabilityLost
        """
        if writable:
            _import_upkeep()
        store_path = os.path.abspath(os.fspath(path))
        root_fd = open_or_make_root(store_path) if writable else open_existing_root(store_path)
        lock: StoreLock | None = None
        with contextlib.ExitStack() as until_open:
            with undoing(partial(os.close, root_fd)):
                if writable:
                    lock, store_uuid = _claim(root_fd, store_path)
                    until_open.callback(lock.close)
                else:
                    store_uuid = load_store_uuid(root_fd, store_path)
                folder = StoreFolder(store_path, root_fd, store_uuid)
            until_open.callback(folder.close)
            journal = Journal.load(folder, writable=writable)
            until_open.callback(journal.close)
            index, opening = load_index(folder, journal, writable=writable)
            until_open.callback(index.close)
            store = cls(StoreCore(folder, lock, index, journal, budget), opening)
            until_open.pop_all()
        with undoing(store.close):
            if writable:
                store.opening = replay(store._core, opening)
                with contextlib.suppress(StoreIoError):  # the next opening, or the next group, asks again
                    store.end_group()
        return store

    def close(self) -> None:
        """Let go of files and lock. Open readers stay usable for what they have open. Idempotent."""
        self._core.close()

    # --- sleep

    def write_bundle(
        self,
        *,
        uri: SessionUri,
        identity: Identity,
        parent: bytes | None,
        reused: Sequence[BlockEntry],
        blocks: Iterable[BlockDraft],
        session: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        token_count: int,
        compressed: bool = False,
        on_progress: Progress | None = None,
        beyond: Beyond | None = None,
        doubted: Sequence[BlockEntry] = (),
        before_publishing: Callable[[], None] | None = None,
        covers: bool = True,
    ) -> Receipt:
        """Make a session's state durable as its next version, then return the receipt.

        `reused` come first in the chain and name the bundles that hold them; `blocks` continue it. The drafts' buffers
        are borrowed until this returns. `on_progress` is told (tokens written, tokens to write). `beyond` is for a
        sleep that cannot be tried again: a state may exceed the budgets of the store and the day, a ledger of a few
        kilobytes also uses the space to be kept free. `doubted` are reused blocks to read before the version refers to
        them. `before_publishing` is called when all is flushed and only the commit is left: what it raises gives the
        version up. `session` may be a function, which is called once the blocks are flushed: between that and the end
        of this call no turn of the session may be acknowledged. `covers`: the session's turns in the journal are in it,
        or were taken back; else they stay there.

        Raises:
            InvalidDraft, LimitExceeded: the input is invalid; nothing was written.
            BlockMissing, BundleMissing: a block reused, or found in the store, was deleted meanwhile or cannot be read;
                nothing was written. Try again with all blocks handed in.
            Corruption: a doubted block is damaged; try again likewise.
            NoSpace, BudgetExceeded, StoreIoError, ReadBackFailed: the store is as it was before.
            DurabilityLost, LockLost: not acknowledged, and this store writes no more until it is opened again.
            ReadOnlyStore, StoreClosed
        """
        self._settle_group(uri)
        return write_version(
            self._core,
            VersionDraft(
                uri=uri,
                identity=identity,
                parent=parent,
                reused=reused,
                blocks=blocks,
                session=(lambda: self._marked(uri, session())) if callable(session) else self._marked(uri, session),
                token_count=token_count,
                compressed=compressed,
                on_progress=on_progress,
                beyond=beyond,
                doubted=doubted,
                before_publishing=before_publishing,
                covers=covers,
            ),
        )

    def begin_group(self, uris: Sequence[SessionUri]) -> None:
        """Before the first versions of new sessions that count together, one group at a time. Write that of the first
        session last: with it all of them count. Until `end_group` they are listed, also where it will not come to that.

        Raises:
            LimitExceeded, NoSpace, StoreIoError, ReadOnlyStore, LockLost, DurabilityLost
        """
        self.end_group()
        with self._core.committing():
            self._group, self._is_ending = save_group(self._core.folder, uris), False

    def end_group(self) -> None:
        """The group is written, or given up: without a version of its first session, the others are removed, as far as
        they were written for it. The next opening does the same after a crash. Raises as `delete_session`."""
        self._group, self._is_ending = None, True
        group = load_group(self._core.folder)
        if group is None:
            self._is_ending = False
            return
        counts = any(self._marks_of(group, group.uris[0], unreadable=True))
        for uri in () if counts else group.uris[1:]:
            marks = self._marks_of(group, uri, unreadable=False)
            if marks and all(marks):
                self._delete(uri)
        try:
            self._drop_group()
        except StoreIoError:
            if not counts:
                raise  # else it is tried again before its first session changes

    def _drop_group(self) -> None:
        with self._core.committing():
            drop_group(self._core.folder)
        self._is_ending = False

    def _settle_group(self, uri: SessionUri) -> None:
        """Before the first session of a group changes: the file of the group goes, or nothing is changed. Beside it the
        others would go with that session."""
        group = load_group(self._core.folder) if self._is_ending else None
        if group is not None and group.uris[0] == uri:
            self.end_group()
            if self._is_ending:
                self._drop_group()

    def _marked(self, uri: SessionUri, session: Mapping[str, Any]) -> Mapping[str, Any]:
        return session if self._group is None or uri not in self._group.uris else {**session, GROUP: self._group.mark}

    def _marks_of(self, group: Group, uri: SessionUri, *, unreadable: bool) -> list[bool]:
        """Of each version of a session whether it was written for a group. unreadable: what one that cannot be read
        counts as."""
        found = []
        for bundle_id in self.index.bundles_of(uri):
            try:
                with self._core.open_reader(bundle_id) as reader:
                    found.append(reader.manifest.session.get(GROUP) == group.mark)
            except StoreIoError:
                raise  # it may be readable later
            except StoreError:
                found.append(unreadable)
        return found

    def backup(self, target: str | os.PathLike[str], *, on_progress: Progress | None = None) -> MaintenanceReport:
        """Copy the versions, tags and pins that the folder `target` lacks; `target` is a store that can replace this
        one. Works in a store opened for reading, beside a live daemon: each version is copied whole, or named in
        `problems`. A version deleted here stays there.

        `on_progress` is told (bytes written, bytes in all).

        Raises:
            UnsafePath, NotAStore, TargetExists: `target` is in the store, holds other things, or is another store.
            NoSpace: the disk of `target` has no room for everything; nothing was copied.
            StoreLocked, StoreIoError, DurabilityLost, LockLost: the copies made so far are whole; run it again.
        """
        from .exchange import backup

        self._core.require_open()
        path = backup.claim(self._core.folder, target)
        with Store.open(path, writable=True) as copy:
            return backup.copy_versions(self._core, copy._core, on_progress)

    # --- delete

    def delete_session(self, uri: SessionUri) -> DeleteReport:
        """Delete all versions of a session, also where all were set aside by repair or are missed, and its part of the
        journal. Needs no disk space.

        A crash leaves the session as it was, or without its oldest versions, or gone. Bundles that others refer to keep
        their files, but are never listed as this session's again.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
            UnsafePath: repair has set all versions aside, and the quarantine cannot be read; nothing was deleted.
        """
        self._settle_group(uri)
        return self._delete(uri)

    def forget(self, uri: SessionUri, *, dry_run: bool = False) -> MaintenanceReport:
        if not dry_run:
            self._settle_group(uri)
        return super().forget(uri, dry_run=dry_run)

    def _delete(self, uri: SessionUri) -> DeleteReport:
        with self._core.committing():
            if not self.can_be_deleted(uri):
                raise self._not_found(uri, None)
            drop_turns = partial(self._core.journal.drop, uri)
            if not (bundle_ids := self.index.bundles_of(uri)):
                drop_turns()
                return DeleteReport(uri, 0, 0, 0, 0)
            keep_turns_behind(self._core, uri, bundle_ids)
            return deletion.delete_session(self._core.folder, self.index, self._core.pins, uri, drop_turns)


def _claim(root_fd: int, path: str) -> tuple[StoreLock, str]:
    """Take a store's lock; make the store if the folder is empty. A store of a later version, or a folder of other
    things, is left as it is."""
    if has_store_file(root_fd, path):
        load_store_uuid(root_fd, path)
    else:
        require_creatable(root_fd, path)
    lock = StoreLock(root_fd, path)
    with undoing(lock.close):
        if not has_store_file(root_fd, path):
            return lock, create_store(root_fd, path)
        return lock, load_store_uuid(root_fd, path)


def _import_upkeep() -> None:
    from .checking import verify  # noqa: F401
    from .exchange import backup, tensor_file, transfer  # noqa: F401
    from .maintenance import compaction, forgetting, gc, pruning, usage  # noqa: F401
    from .recovery import repair  # noqa: F401
