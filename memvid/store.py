"""The store: puts versions of sessions to sleep, opens and deletes them. All access to the disk goes through it.

Owns opening, closing, sleep, backup and delete. The other methods are in `access/`; every operation has its own module.

Rules:
- Sleep: new blocks into a pack → manifest, both flushed → under the lock: every block resolves → pack's name →
  manifest's name, the point of no return → index row → receipt.
- Wake: index row → manifest, whose digest is its name → owner, version, parent and identity as the row says → reader.
- Delete: index → manifests → packs that nothing needs.
- One writer at a time, by the store's lock between processes and by `_writing` between threads. Readers never wait
  for a writer.
- Modules that write, check, maintain or export a store, or read its blocks, are imported at first use: who lists
  sessions does not wait for them. A writer imports them at once, because later the system may have no descriptor left.
- After a failed flush, or when the lock file was replaced, this object writes no more until the store is reopened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .access.acknowledging import Acknowledging
from .access.exchanging import Exchanging
from .access.tagging import Tagging
from .access.upkeep import Upkeep
from .answers import DeleteReport, Finding, MaintenanceReport
from .disk.budget import UNLIMITED, Budget
from .disk.lock import StoreLock
from .disk.paths import undoing, whole_path
from .folder.folder import StoreFolder
from .folder.journal import Journal
from .folder.store_file import load_store_uuid, open_existing_root, open_or_make_root
from .format.records import OpenReport, Progress, Receipt, VersionKey
from .recovery.opening import bring_in_line, claim, load_index
from .uri import SessionUri
from .writing.core import StoreCore

if TYPE_CHECKING:
    from .writing.sleeping import VersionDraft


class Store(Exchanging, Upkeep, Tagging, Acknowledging):
    """An open store. Use `Store.open`; close it when done. All methods may be called from several threads."""

    # --- opening and closing

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool, budget: Budget = UNLIMITED) -> Store:
        """Open a store.

        To write: creates it if it is missing, carries over one of format 1, takes its lock, removes leftovers of
        unfinished sleeps, and makes versions of what the journal has. To read: takes no lock, writes nothing, and sees
        the sessions of this moment; works beside a live daemon.

        `budget` limits writes from now on, and never a delete. A limit on the size of the store costs a look at each
        file here.

        Raises:
            NoStore, NotAStore, UnsupportedFormat, StoreLocked, UnsafePath, NoSpace, StoreIoError, DurabilityLost
        """
        if writable:
            _import_upkeep()
        store_path = whole_path(path)
        root_fd = open_or_make_root(store_path) if writable else open_existing_root(store_path)
        lock: StoreLock | None = None
        with contextlib.ExitStack() as until_open:
            findings: tuple[Finding, ...] = ()
            with undoing(lambda: os.close(root_fd)):
                if writable:
                    lock, store_uuid, findings = claim(root_fd, store_path)
                    until_open.callback(lock.close)
                else:
                    store_uuid = load_store_uuid(root_fd, store_path)
                folder = StoreFolder(store_path, root_fd, store_uuid)
            until_open.callback(folder.close)
            journal = Journal.load(folder, writable=writable)
            until_open.callback(journal.close)
            index, why = load_index(folder, writable=writable)
            until_open.callback(index.close)
            core = StoreCore(folder, lock, index, journal, budget)
            store = cls(core, bring_in_line(core, why, findings))
            until_open.pop_all()
        if writable:
            from .recovery.replaying import replay
            from .writing.removal import remove_waiting

            core.remove_waiting = lambda: remove_waiting(core)
            with undoing(store.close):
                store.opening = replay(core, store.opening)
        return store

    def close(self) -> None:
        """Let go of files and lock. What is asked of an open reader then raises StoreClosed. Idempotent."""
        self._core.close()

    # --- sleep

    def write_bundle(self, draft: VersionDraft) -> Receipt:
        """Make a session's state durable as its next version, then return the receipt.

        Raises:
            InvalidDraft, LimitExceeded: the input is invalid; nothing was written.
            BlockMissing, BundleMissing: a block reused, or found in the store, left it meanwhile or cannot be read;
                nothing was written. Try again with all blocks handed in.
            Corruption: a doubted block is damaged; try again likewise.
            NoSpace, BudgetExceeded, StoreIoError, ReadBackFailed: the store is as it was before.
            DurabilityLost, LockLost: not acknowledged, and this store writes no more until it is opened again.
            ReadOnlyStore, StoreClosed
        """
        from .writing.sleeping import write_version

        return write_version(self._core, draft)

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
        """Delete all versions of a session, and its part of the journal. Needs no disk space.

        A crash leaves the session as it was, or without its tags and pins, some of its older versions, or its last
        turns, or gone.
        Blocks that others need stay.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
            StoreBusy: turns of another session stand behind it, and that one is being put to sleep.
        """
        with self._deleting():
            return self._delete_session(uri)

    def delete_version(self, uri: SessionUri, version: VersionKey) -> DeleteReport:
        """Delete one version of a session, also one whose manifest is missing. Its turns in the journal stay, as the
        next version. Needs no disk space, unless turns stand behind it.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
            StoreBusy: turns stand behind it, and their session is being put to sleep.
        """
        from .recovery.replaying import keep_turns_behind
        from .writing import deletion

        with self._deleting():
            row = self.require_session(uri, version)
            if len(self.index.versions(uri)) == 1 and not self._core.journal.has(uri):
                return self._delete_session(uri)
            keep_turns_behind(self._core, None, [row.bundle_id])
            return deletion.delete_versions(self._core, uri, [row], whole=False)

    def _delete_session(self, uri: SessionUri) -> DeleteReport:
        from .recovery.replaying import keep_turns_behind
        from .writing import deletion

        if not self.can_be_deleted(uri):
            raise self._not_found(uri, None)
        rows = self.index.versions(uri)
        keep_turns_behind(self._core, uri, [row.bundle_id for row in rows])
        report = deletion.delete_versions(self._core, uri, rows, whole=True)
        self._core.diary.end(uri)
        return report

    @contextlib.contextmanager
    def _deleting(self) -> Iterator[None]:
        """No version and no turn is acknowledged within. What manifests need is read before: the first time it takes
        seconds where there are 100,000."""
        self._core.require_writable()
        self._core.needs.read_ahead()
        with self._core.committing(), self._core.journaling():
            self._core.read_again()
            yield


def _import_upkeep() -> None:
    from .checking import check  # noqa: F401
    from .exchange import backup, tensor_file, transfer  # noqa: F401
    from .folder import scrub_mark  # noqa: F401
    from .maintenance import forgetting, pruning, repack, stripping, usage  # noqa: F401
    from .recovery import carrying_over, repair, replaying  # noqa: F401
    from .writing import deletion, reader, removal, sleeping  # noqa: F401


__all__ = ["DeleteReport", "OpenReport", "Progress", "Receipt", "Store", "VersionDraft"]

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name != "VersionDraft":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .writing.sleeping import VersionDraft

        return VersionDraft
