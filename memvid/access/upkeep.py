"""What keeps a store sound and small."""

from __future__ import annotations

from collections.abc import Callable

from ..folder.rates_file import Figure, Figures, load_rates, save_rates
from ..folder.retention import Retention
from ..folder.scrub_mark import ScrubMark, load_mark, save_mark
from ..format.records import (
    MaintenanceReport,
    Progress,
    UsageReport,
    VerifyReport,
)
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
        from ..checking.verify import verify_store

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

    def forget(self, uri: SessionUri, *, dry_run: bool = False) -> MaintenanceReport:
        """Delete a session and erase every byte of it that is not another session's too, then look whether it is so.

        What is shared stays, and is told with the sessions whose it is (`keep`). `problems` say what could not be
        erased or not be told, and why; without any, nothing of the session is in the store's files. Cut off, or asked
        for while something had it open, it is finished by asking again, also when the session is deleted by then.

        Raises:
            SessionNotFound: there is no such session, and nothing of it is left.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import forgetting

        return forgetting.forget(self._core, uri, self._promised, dry_run=dry_run)

    def usage(self) -> UsageReport:
        """What the store takes, by place and by need, and each session's part of it. Works in a store that was opened
        for reading, beside a daemon. Reads every version's manifest: seconds for thousands of versions. Counts
        the versions that are listed; those whose files are missing or cannot be read are `problems`.

        Raises:
            StoreIoError, StoreClosed
        """
        from ..maintenance import usage

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
        from ..maintenance import pruning

        if uri is not None and self.find_session(uri) is None:
            raise self._not_found(uri, None)
        return pruning.prune(self._core, retention, uri, self._promised, dry_run=dry_run)

    def gc(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove what nothing needs: retired files without a user, leftovers of unfinished writes, marks of versions
        that are gone. While the needs of some bundle are unknown it removes nothing and says so in `problems`. Never
        touches the quarantine. A dry run says what would go, also in a store that was opened for reading.

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
        """Write the files of one session, or of all, anew, so that a wake opens few of them: as `policy` says.

        Nothing that a version holds changes, nor any id; no sleep or wake waits for it, and what is in use is left for
        the next compaction. Damaged bundles, and a disk or budget without room, are `problems`: what depends on them
        stays as it was. `should_stop` is asked between steps; each leaves a sound store, and running it again
        finishes what was begun. A dry run also works in a store that was opened for reading.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost
        """
        from ..maintenance import compaction

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
        from ..recovery import repair

        return repair.repair(self._core, dry_run=dry_run)

    def empty_quarantine(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Remove what repair has set aside, for good: those versions cannot come back then, their tags and pins go, and
        so does what was kept because they need it. Then as `gc`, which a dry run tells as the store is now.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError, NoSpace, UnsafePath
        """
        from ..maintenance import gc

        return gc.empty_quarantine(self._core, dry_run=dry_run)

    def rebuild_index(self, *, dry_run: bool = False) -> MaintenanceReport:
        """Make the index anew from the bundles; a dry run says in what it differs from them.

        Raises:
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..recovery import repair

        return repair.rebuild_index(self._core, dry_run=dry_run)
