"""The operations that keep a store sound and small."""

from __future__ import annotations

from collections.abc import Callable

from ..folder.retention import Retention
from ..folder.scrub_mark import ScrubMark, load_mark, save_mark
from ..format.records import MaintenanceReport, Progress, UsageReport, VerifyReport
from ..maintenance.compaction_plan import CompactionPolicy
from ..uri import SessionUri
from .sessions import Sessions


class Upkeep(Sessions):
    """An open store, asked to be looked after."""

    def load_scrub_mark(self) -> ScrubMark:
        """How far the last scrub has come."""
        return load_mark(self._core.folder)

    def save_scrub_mark(self, mark: ScrubMark) -> None:
        """Keep how far the scrub has come. Raises NoSpace, StoreIoError, DurabilityLost, ReadOnlyStore."""
        self._core.require_writable()
        save_mark(self._core.folder, mark)

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
        from ..checking.verify import verify_store

        self._core.require_open()
        if uri is not None:
            self.require_session(uri, None)
        return verify_store(
            self._core.folder,
            self.index,
            uri,
            self._core.promised,
            deep=deep,
            on_progress=on_progress,
            pace=pace,
            index_now=self._core.index_now,
            all_known=self._core.writable,
        )

    def forget(self, uri: SessionUri, *, dry_run: bool = False) -> MaintenanceReport:
        """Delete a session, erase all its bytes that no other session shares, then check that they are gone.

        Shared bytes stay; `keep` actions name the sessions that share them. `problems` say what could not be erased or
        checked, and why; without any, nothing of the session is in the store's files. If this is cut off, or a reader
        had the session open, call it again to finish, even if the session is deleted by then.

        Raises:
            SessionNotFound: there is no such session, and nothing of it is left.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import forgetting

        return forgetting.forget(self._core, uri, dry_run=dry_run)

    def usage(self) -> UsageReport:
        """The disk space of the store, by place and by need, and each session's part. Works in a store opened for
        reading, beside a daemon. Reads every version's manifest: seconds for thousands of versions. Counts listed
        versions; those with missing or unreadable files are `problems`.

        Raises:
            StoreIoError, StoreClosed
        """
        from ..maintenance import usage

        return usage.usage(self._core)

    def prune(self, retention: Retention, uri: SessionUri | None = None, *, dry_run: bool = False) -> MaintenanceReport:
        """Drop the versions, of one session or of all, that a retention does not keep. Needs no disk space.

        The newest version, tagged and pinned ones always stay. Each version to keep is checked as by a wake, but for
        the bytes of its blocks: one that cannot be woken is in `problems`, and an earlier one stays in its place. A dry
        run returns the plan and changes nothing; it works in a store opened for reading.

        Raises:
            SessionNotFound, CorruptMarks: nothing was dropped.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import pruning

        if uri is not None:
            self.require_session(uri, None)
        return pruning.prune(self._core, retention, uri, dry_run=dry_run)

    def drop_stand_ins(self, uri: SessionUri) -> MaintenanceReport:
        """Drop the versions of a session that end in a ledger alone, if the next version or the newest has all of their
        tokens: a stop without time, the journal and write behind make them. Those with a mark stay. Needs no disk
        space.

        Raises:
            CorruptMarks: nothing was dropped.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import pruning

        return pruning.drop_stand_ins(self._core, uri)

    def gc(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove unneeded files: retired files without a user, leftovers of unfinished writes, marks of deleted
        versions. While the needs of a bundle are unknown it removes nothing, and `problems` says so. Never touches the
        quarantine. A dry run returns the plan, also in a store opened for reading.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError, NoSpace
        """
        from ..maintenance import gc

        return gc.gc(self._core, dry_run=dry_run)

    def compact(
        self,
        uri: SessionUri | None = None,
        *,
        dry_run: bool = False,
        policy: CompactionPolicy = CompactionPolicy(),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> MaintenanceReport:
        """Rewrite the files of one session, or of all, as `policy` says, so that a wake opens few files.

        The content of versions and all ids stay the same; no sleep or wake waits for it, and files in use are left for
        the next compaction. Damaged bundles, and a disk or budget without room, are `problems`: files that depend on
        them stay as they were. `should_stop` is called between steps; each leaves a sound store, and another run
        finishes the work. A dry run also works in a store opened for reading.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost
        """
        from ..maintenance import compaction

        self._core.require_open()
        if uri is not None:
            self.require_session(uri, None)
        return compaction.compact(self._core, uri, policy, dry_run=dry_run, should_stop=should_stop)

    def repair(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Read every byte, and make a sound store of the intact part; damaged files go to quarantine as they are.

        Permanent losses are in `problems` (`version_lost`): session, version, and number of tokens. A dry run returns
        the plan, also in a store opened for reading.

        Raises:
            NoSpace, StoreIoError: what was done so far is whole; run it again.
            ReadOnlyStore, LockLost, DurabilityLost
        """
        from ..recovery import repair

        return repair.repair(self._core, dry_run=dry_run)

    def empty_quarantine(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove the files that repair has set aside, for good: their versions cannot come back, and their tags, pins
        and the files kept for them go too. Then runs `gc`; a dry run plans that for the store as it is now.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError, NoSpace, UnsafePath
        """
        from ..maintenance import gc

        return gc.empty_quarantine(self._core, dry_run=dry_run)

    def rebuild_index(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Rebuild the index from the bundles; a dry run says how it differs from them.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..recovery import repair

        return repair.rebuild_index(self._core, dry_run=dry_run)
