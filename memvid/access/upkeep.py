"""The operations that keep a store sound and small."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING

from ..answers import MaintenanceReport, Together, UsageReport
from ..disk.budget import Budget, default_store_bytes
from ..disk.room import free_bytes_of
from ..errors import NoSpace
from ..folder.store_file import load_store_file, write_store_file
from ..format.records import Progress, VerifyReport, VersionKey
from ..uri import SessionUri
from .sessions import Sessions

if TYPE_CHECKING:
    from ..folder.diary import Diary
    from ..folder.retention import Retention
    from ..folder.scrub_mark import ScrubMark
    from ..maintenance.needers import Places
    from ..maintenance.repack_plan import RepackPolicy
    from ..maintenance.strip_plan import RoomPolicy
    from ..maintenance.who import Needed
    from ..writing.reader import BundleReader


class Upkeep(Sessions):
    """An open store, asked to be looked after."""

    @property
    def budget(self) -> Budget:
        """What it is held to now."""
        return self._core.account.budget

    @property
    def held_bytes(self) -> int:
        """The bytes of its manifests and packs, which the budget bounds. Raises StoreIoError."""
        return self._core.folder.held_bytes()

    def hold_to_budget(self, most_bytes: int | None) -> None:
        """Let the store hold so many bytes. None: as many as its store.json says. Without a figure there it gets
        `default_store_bytes`, durably, so that the next start finds the same.

        Raises:
            ReadOnlyStore, CorruptStoreFile, StoreIoError, DurabilityLost
        """
        core = self._core
        core.require_writable()
        if most_bytes is None:
            uuid, most_bytes = load_store_file(core.folder.root_fd, core.path)
            if most_bytes is None:
                most_bytes = default_store_bytes(self.held_bytes, free_bytes_of(core.folder.packs_fd, core.path))
                with contextlib.suppress(NoSpace), core.committing():
                    write_store_file(core.folder.root_fd, core.path, uuid, most_bytes, replacing=True)
        core.account.hold_to(most_bytes)

    @property
    def diary(self) -> Diary:
        """What is said of its sessions. It can be read in any store."""
        return self._core.diary

    def write_diary(self) -> None:
        """Append to the diary what was said since the last time, without a flush. Raises StoreError: it is let go."""
        self._core.require_writable()
        self._core.diary.write()

    def load_scrub_mark(self) -> ScrubMark:
        """How far the last scrub has come."""
        from ..folder.scrub_mark import load_mark

        return load_mark(self._core.folder)

    def save_scrub_mark(self, mark: ScrubMark) -> None:
        """Keep how far the scrub has come. Raises NoSpace, StoreIoError, DurabilityLost, ReadOnlyStore."""
        from ..folder.scrub_mark import save_mark

        self._core.require_writable()
        save_mark(self._core.folder, mark)

    def verify(self, uri: SessionUri | None = None, *, deep: bool, on_progress: Progress | None = None) -> VerifyReport:
        """Check one session, or everything: manifests and directories only, or (deep) every byte. Changes nothing.

        Damage is reported, not raised. `on_progress` is told (bytes done, bytes in all).

        Raises:
            SessionNotFound
        """
        from ..checking.check import exhausted

        return exhausted(self.verifying(uri, deep=deep, on_progress=on_progress))

    def verifying(
        self, uri: SessionUri | None = None, *, deep: bool, on_progress: Progress | None = None
    ) -> Generator[int, None, VerifyReport]:
        """As `verify`, in steps: yields the bytes of each block behind it. Whoever runs it may wait in between, or
        close it."""
        from ..checking.check import verify_store

        self._core.require_open()
        if uri is not None:
            self.require_session(uri, None)
        return verify_store(self._core, uri, deep=deep, on_progress=on_progress)

    def forget(self, uri: SessionUri, *, dry_run: bool = False) -> MaintenanceReport:
        """Delete a session, erase all its bytes that no other session shares, then check that they are gone.

        Shared bytes stay; `keep` actions name the sessions that share them. `problems` say what could not be erased or
        checked, and why; without any, nothing of the session is in the store's files. If this is cut off, or a reader
        had the session open, call it again to finish, even if the session is deleted by then.

        Raises:
            SessionNotFound: there is no such session, and nothing of it is left.
            StoreBusy: turns of another session stand behind it, and that one is being put to sleep.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import forgetting

        return forgetting.forget(self._core, uri, dry_run=dry_run)

    def forget_what_was_said(self, uri: SessionUri) -> MaintenanceReport:
        """Erase from the diary what was said of a session while it was forgotten, once nobody knows it, and how
        new its head in a remote was. Raises ReadOnlyStore, LockLost, DurabilityLost."""
        from ..maintenance import forgetting

        return forgetting.forget_what_was_said(self._core, uri)

    def usage(self) -> UsageReport:
        """The disk space of the store, by place and by need, and each session's part. Works in a store opened for
        reading, beside a daemon. Reads every version's manifest: seconds for thousands of versions.

        Raises:
            StoreIoError, StoreClosed
        """
        from ..checking.check import exhausted

        return exhausted(self.usage_in_steps())

    def usage_together(self, uris: Collection[SessionUri]) -> tuple[UsageReport, Together]:
        """As `usage`, and what some sessions need together. Of the parts that are shared, those are told that one of
        these sessions needs."""
        from ..checking.check import exhausted
        from ..maintenance import usage

        return exhausted(usage.usage_together_in_steps(self._core, frozenset(uris)))

    def usage_in_steps(self) -> Generator[None, None, UsageReport]:
        """As `usage`, a file at a time: other work may be done between two, and the figures may then be of more than
        one moment."""
        from ..maintenance import usage

        return usage.usage_in_steps(self._core)

    def places_of(
        self, reader: BundleReader, *, deep: bool = False, at_each_block: Callable[[], object] = lambda: None
    ) -> Places:
        """Where the blocks of an open version lie, in which condition, and which versions need them. deep: every byte
        of them is read and compared. at_each_block: is called before each; what it raises ends the look. Works in a
        store opened for reading. The first time it reads every version's manifest.

        Raises:
            StoreIoError, UnsafePath, StoreClosed
        """
        from ..maintenance import needers

        return needers.places_of(self._core, reader, at_each_block, deep=deep)

    def bases(self) -> dict[SessionUri, str]:
        """The versions behind which turns stand in the journal, by bundle id. Raises StoreIoError, UnsafePath."""
        return self._core.bases()

    def who_needs(self, text: str) -> Needed:
        """A block, a version or a pack, by the first digits of its id or by its path, and which versions need its
        blocks. Works in a store opened for reading.

        Raises:
            NothingNamed, AmbiguousVersion
            Corruption: it is a manifest or a pack that cannot be read. StoreIoError, UnsafePath, StoreClosed
        """
        from ..maintenance import who

        return who.needed(self._core, who.find(self._core, text))

    def prune(self, retention: Retention, uri: SessionUri | None = None, *, dry_run: bool = False) -> MaintenanceReport:
        """Drop the versions, of one session or of all, that a retention does not keep. Needs no disk space.

        The newest version, tagged and pinned ones always stay. Each version to keep is checked as by a wake, but for
        the bytes of its blocks: one that cannot be woken is in `problems`, and an earlier one stays in its place. A dry
        run returns the plan and changes nothing; it works in a store opened for reading.

        Raises:
            SessionNotFound, CorruptMarks, MarksLost: nothing was dropped.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import pruning

        if uri is not None:
            self.require_session(uri, None)
        return pruning.prune(self._core, retention, uri, dry_run=dry_run)

    def drop_stand_ins(self, uri: SessionUri) -> MaintenanceReport:
        """Drop the versions of a session that end in a ledger alone, if the next version or the newest has all of their
        tokens: a stop without time, the journal and write behind make them. Those with a mark stay. Needs no disk
        space. Their packs go with the next repack, or with them where a ledger without any blocks takes their place.

        Raises:
            CorruptMarks, MarksLost: nothing was dropped.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import pruning

        return pruning.drop_stand_ins(self._core, uri)

    def strip(self, uri: SessionUri, version: VersionKey | None = None, *, dry_run: bool = False) -> MaintenanceReport:
        """Keep the ledger and the text of a version, of all versions of a session if none is named, and let its keys
        and values go: those that no other version needs leave the disk with it. Needs no disk space but a mark's, and
        that of the blocks' headers.

        Raises:
            SessionNotFound, CorruptMarks, MarksLost, LimitExceeded, NoSpace
            StoreBusy: turns stand behind them, and their session is being put to sleep.
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import stripping

        rows = self.versions(uri) if version is None else [self.require_session(uri, version)]
        if not rows:
            rows = [self.require_session(uri, None)]
        return stripping.strip(self._core, rows, dry_run=dry_run)

    def plan_room(
        self,
        policy: RoomPolicy | None = None,
        busy: Collection[SessionUri] = (),
        elsewhere: Collection[str] = (),
    ) -> MaintenanceReport:
        """What goes next where the store has too little room, in order, and why: first the sessions that are deleted
        unasked, then all strips that there can be, and as `keep` those that there can be an hour behind the last use.
        busy: the sessions in use. elsewhere: the versions that the remote has, too, by their bundle ids. Works in a
        store opened for reading.

        Raises:
            CorruptMarks, MarksLost, StoreIoError
        """
        from ..maintenance import stripping
        from ..maintenance.strip_plan import RoomPolicy

        return stripping.plan_room(self._core, policy or RoomPolicy(), busy, elsewhere)

    def make_room(
        self,
        most_bytes: int,
        policy: RoomPolicy,
        busy: Callable[[], Collection[SessionUri]],
        elsewhere: Callable[[], Collection[str]] = tuple,
        *,
        or_nothing: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> MaintenanceReport:
        """Let go what nothing needs, and strip what `plan_room` has first, until the store holds no more than so many
        bytes, or nothing more may go. busy, elsewhere: tell what they are for `plan_room`; asked on this thread.
        or_nothing: where it could not come down to so many, nothing is stripped in vain. should_stop: is called between
        steps; each leaves a sound store.

        Raises:
            CorruptMarks, MarksLost, LimitExceeded, NoSpace
            ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        from ..maintenance import stripping

        return stripping.make_room(self._core, most_bytes, policy, busy, elsewhere, or_nothing, should_stop)

    def unused(
        self, policy: RoomPolicy, busy: Collection[SessionUri], uri: SessionUri | None = None
    ) -> list[SessionUri]:
        """The sessions that nobody named and nobody has used for long, which are deleted unasked; or that one alone, if
        it is one. Raises CorruptMarks, MarksLost, StoreIoError."""
        from ..maintenance import stripping

        return stripping.unused(self._core, policy, busy, uri)

    def repack(
        self,
        uri: SessionUri | None = None,
        *,
        dry_run: bool = False,
        policy: RepackPolicy | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> MaintenanceReport:
        """Remove packs that nothing needs, and write those anew that are mostly unneeded or too many for a session, as
        `policy` says. For one session: only packs with blocks of it.

        Versions and ids stay the same; no sleep or wake waits for it. Damaged packs, and a disk or budget without room,
        are `problems`. While the needs of a version are unknown it removes nothing, and `problems` says so.
        `should_stop` is called between steps; each leaves a sound store, and another run finishes the work. A dry run
        also works in a store opened for reading.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost
        """
        from ..maintenance import repack
        from ..maintenance.repack_plan import RepackPolicy

        self._core.require_open()
        if uri is not None:
            self.require_session(uri, None)
        return repack.repack(self._core, uri, policy or RepackPolicy(), dry_run=dry_run, should_stop=should_stop)

    def repair(self, *, dry_run: bool = False, sources: Sequence[str | os.PathLike[str]] = ()) -> MaintenanceReport:
        """Read every byte; copy sound frames out of damaged packs, and move the damaged files to `damaged/`. Gives
        nothing up: a version that lacks blocks stays, whole up to the first of them.

        sources: folders, as a backup, whose packs and manifests are copied as far as versions lack them; `damaged/` is
        looked into last.
        A dry run returns the plan, also in a store opened for reading.

        Raises:
            NoSpace, StoreIoError: what was done so far is whole; run it again.
            ReadOnlyStore, LockLost, DurabilityLost
        """
        from ..recovery import repair

        return repair.repair(self._core, dry_run=dry_run, sources=sources)
