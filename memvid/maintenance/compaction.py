"""Compaction: writes the files of sessions anew so that a wake opens few of them, and no file is kept for dead frames.

Looks at a session's files and takes the steps of a plan; `compaction_plan` decides on the steps and their order.

Rules:
- Nothing waits for a compaction: files are written outside `committing`. A file that is in use, or was written anew
  since the look, stays as it is until the next compaction.
- Just before a file loses frames, everyone who needs some of it is asked again, under the lock.
- Files are looked at one after the other while others write. A contradiction is damage only if no other operation has
  written the file anew meanwhile.
- A damaged bundle, or one that the system refuses to read, is reported and left; the rest goes on. A full disk ends the
  compaction; its finished steps stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

from ..disk.paths import Stamp
from ..errors import (
    BlockMissing,
    BudgetExceeded,
    BundleMissing,
    Corruption,
    DurabilityLost,
    LockLost,
    NoSpace,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
)
from ..folder.folder import list_retired
from ..format.bundle import BundleFile
from ..format.codecs import RAW_CODE, encode_slot
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import IndexRow, MaintenanceReport
from ..index.unknown_references import find_unknown_needs
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.rewriting import Contents, prepared
from .compaction_plan import CompactionPolicy, FileView, Step, choose_targets, plan_compaction

_FATAL = (DurabilityLost, LockLost, StoreClosed, ReadOnlyStore)
_TRIES = 4


def compact(
    core: StoreCore,
    uri: SessionUri | None,
    policy: CompactionPolicy,
    *,
    dry_run: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> MaintenanceReport:
    """Compact one session, or all of them. See `Store.compact`."""
    core.begin_upkeep(dry_run=dry_run)
    compaction = _Compaction(core, policy, dry_run, should_stop)
    run = compaction.run
    run.problems += find_unknown_needs(core.folder, core.index)
    if core.index.needs_unknown():
        return run.report()
    for one in core.index.uris() if uri is None else [uri]:
        if compaction.stopped:
            break
        compaction.session(one)
    if not compaction.stopped:
        compaction.remove_unneeded(everywhere=uri is None)
    return run.report()


class _Compaction:
    def __init__(
        self, core: StoreCore, policy: CompactionPolicy, dry_run: bool, should_stop: Callable[[], bool]
    ) -> None:
        self.run = MaintenanceRun(core, "compact", dry_run)
        self._core = core
        self._policy = policy
        self._should_stop = should_stop
        self._full = False
        self._now_ns = time.time_ns()
        self._retired: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._stamps: dict[bytes, Stamp] = {}
        self._newest = b""
        self._told: set[tuple[str, str]] = set()

    @property
    def stopped(self) -> bool:
        return self._full or self._should_stop()

    def report(self, path: str, code: str, message: str) -> None:
        """Tell of a problem, once for a file and a kind."""
        if (path, code) not in self._told:
            self._told.add((path, code))
            self.run.tell(path, code, message)

    def session(self, uri: SessionUri) -> None:
        """Look, plan, and take the steps; if a holder turns out to be damaged, once more without it."""
        avoided: set[bytes] = set()
        for _ in range(_TRIES):
            look = _Look(self._core, uri, self._policy, self._now_ns, avoided, self.report)
            newest = look.all()
            self._retired.update(file.bundle_id for file in look.files.values() if file.retired)
            if newest is None:
                return
            self._stamps, self._newest = look.stamps, newest.bundle_id
            damaged = self._take(plan_compaction(newest, look.files, self._policy))
            if damaged is None:
                return
            avoided.add(damaged)

    def _take(self, steps: Iterable[Step]) -> bytes | None:
        """Take the steps until told to stop. Returns a damaged holder if a file was to adopt its blocks: the steps
        after that need another plan."""
        for number, step in enumerate(steps):
            if self.stopped:
                return None
            if step.kind == "remove":
                self._remove(step.file.bundle_id, step.reason)
            elif self.run.dry_run:
                self._done(step, step.file.file_bytes, step.after_bytes)
            elif not self._write(step) and number == 0 and step.adopts:
                return self._damaged_source(step)
        return None

    def _write(self, step: Step) -> bool:
        """Write one file anew. False if it must stay as it is for now, or was found damaged."""
        try:
            return self._rewrite(step)
        except _FATAL:
            raise
        except (NoSpace, BudgetExceeded) as error:
            self._full = True
            self.report(step.file.path, error.code, error.message)
        except Corruption as error:
            missing = isinstance(error, BundleMissing) and not _is_missed(self._core, error)
            if not missing and self._is_as_seen(step):
                self.report(step.file.path, error.code, error.message)
        except StoreError as error:  # no writer makes the system refuse
            self.report(step.file.path, error.code, error.message)
        return False

    def _seen(self, bundle_id: bytes) -> None:
        """Note our own new file, so that it counts as unchanged."""
        folder = self._core.folder
        stamp = folder.stamp_of(bundle_id, LIVE_SUFFIX) or folder.stamp_of(bundle_id, RETIRED_SUFFIX)
        if stamp is not None:
            self._stamps[bundle_id] = stamp

    def _is_as_seen(self, step: Step) -> bool:
        """Whether the files of a step are as they were: the newest version's, and the sources of frames; and no delete
        came."""
        core, file = self._core, step.file
        sources = {file.bundle_id, self._newest, *(source for _, source in step.frames)}
        same = all(core.folder.is_current(one, self._stamps[one]) for one in sources)
        return same and (file.retired or core.index.knows(file.bundle_id))

    def _rewrite(self, step: Step) -> bool:
        core, bundle_id = self._core, step.file.bundle_id
        kept = {block for block, _ in step.frames}
        with core.open_frames(bundle_id) as old:
            lost, stamp = old.frames.keys() - kept, old.stamp()
        users = _users_without_need(core, bundle_id, lost) if lost else {}
        if users is None:
            return False
        contents = Contents(step.frames, step.holders, step.with_manifest, step.recompress)
        with core.metering(replacing=True) as room, prepared(core, bundle_id, contents, room) as fresh:
            if step.kind == "recompress" and fresh.bytes_after >= fresh.bytes_before:
                return True
            with core.committing():
                if not core.folder.is_current(bundle_id, stamp) or (lost and not _still(core, bundle_id, users)):
                    return False
                try:
                    return fresh.commit()
                finally:
                    if fresh.is_in_place:  # also if the index could not note that; its marks say so then
                        self._seen(bundle_id)
                        self._done(step, fresh.bytes_before, fresh.bytes_after)

    def _damaged_source(self, step: Step) -> bytes | None:
        """The holder whose frames cannot be copied; None if no other holder is at fault."""
        if not self._is_as_seen(step):
            return None
        for block, source in step.frames:
            if source == step.file.bundle_id:
                continue
            try:
                with self._core.open_frames(source) as file:
                    file.check_block(block)
            except (Corruption, BundleMissing):
                return source
        return None

    def _done(self, step: Step, before: int, after: int) -> None:
        self.run.bytes_freed += before
        self.run.bytes_written += after
        size_bytes = before - after if before > after else after
        self.run.did(step.kind, step.file.path, size_bytes, step.reason, step.file.row)

    # --- retired files

    def remove_unneeded(self, *, everywhere: bool) -> None:
        """Remove the retired files that nothing needs any more: of the whole store, or of the files looked at."""
        retired = self._retired.union(list_retired(self._core.folder) if everywhere else ())
        for bundle_id in sorted(retired - self._removed):
            if not self._core.index.users_of(bundle_id):
                self._remove(bundle_id, "its version is gone, and nothing needs what is in it")

    def _remove(self, bundle_id: bytes, reason: str) -> None:
        core = self._core
        if self.run.dry_run:
            with contextlib.suppress(StoreError), core.open_frames(bundle_id) as file:
                self._record_removal(bundle_id, file.file_bytes, reason)
            return
        with core.committing():
            gone = deletion.remove_unneeded(core.folder, core.index, core.pins, {bundle_id: RETIRED_SUFFIX})
        if bundle_id not in gone:
            return
        if core.folder.suffix_of(bundle_id) is None:
            self._record_removal(bundle_id, gone[bundle_id], reason)
        else:
            left = f"{reason}; its name stays until index and marks take changes"
            self._record_removal(bundle_id, gone[bundle_id], left, kind="strip")

    def _record_removal(self, bundle_id: bytes, freed: int, reason: str, kind: str = "remove") -> None:
        self._removed.add(bundle_id)
        self.run.freed(kind, self._core.folder.bundle_path(bundle_id, RETIRED_SUFFIX), freed, reason)


def _is_missed(core: StoreCore, error: BundleMissing) -> bool:
    """Whether a missing bundle is a loss; else it was deleted meanwhile."""
    bundle_id = bytes.fromhex(str(error.details.get("bundle_id", "")))
    return not bundle_id or core.index.knows(bundle_id) or bool(core.index.users_of(bundle_id))


def _users_without_need(core: StoreCore, holder: bytes, blocks: Iterable[bytes]) -> dict[bytes, Stamp] | None:
    """The bundles that use a holder, each with its file's stamp, if none of them needs any of these blocks in it; else
    None. Raises Corruption, StoreIoError: then it is unknown."""
    asked = frozenset(blocks)
    users = {}
    if not core.index.given_up().keys().isdisjoint(core.index.users_of(holder)):
        return None  # a version set aside may come back, and need them
    for user in core.index.users_of(holder):
        with core.open_bundle(user) as file:
            if any(entry.bundle_id == holder and entry.id in asked for entry in file.entries):
                return None
            users[user] = file.stamp()
    return users


def _still(core: StoreCore, holder: bytes, users: dict[bytes, Stamp]) -> bool:
    """Whether the users of a holder are those that were asked, with the same files. Under the lock: this counts a sleep
    that has ended since; one that has not has the holder pinned."""
    if core.index.needs_unknown():
        return False
    return all(user in users and core.folder.is_current(user, users[user]) for user in core.index.users_of(holder))


class _Look:
    """The files of one session's compaction, as values."""

    def __init__(
        self,
        core: StoreCore,
        uri: SessionUri,
        policy: CompactionPolicy,
        now_ns: int,
        avoided: set[bytes],
        report: Callable[[str, str, str], None],
    ) -> None:
        self.files: dict[bytes, FileView] = {}
        self.stamps: dict[bytes, Stamp] = {}
        self._core = core
        self._uri = uri
        self._policy = policy
        self._now_ns = now_ns
        self._avoided = avoided
        self._report = report
        self._failed: set[bytes] = set()
        self._ids: dict[bytes, bytes] = {}
        self._rows = {row.bundle_id: row for row in core.index.versions(uri)}

    def all(self) -> FileView | None:
        """Fill `files`; returns the view of the newest version, None if no version can be read."""
        newest_id = next(reversed(self._rows), None)
        newest = self._load(newest_id) if newest_id is not None else None
        if newest_id is None or newest is None:
            return None
        self._load_holders(newest)
        self._load_retired()
        dying = self._load_with_surplus()
        self._load_cold()
        while True:
            newest = self.files[newest_id]
            targets = choose_targets(newest, self.files, self._policy)
            asked = [file for file in self.files.values() if file.retired or file.bundle_id in dying]
            asked += [file for file in self.files.values() if targets.moved(file)]
            for file in asked:
                self._know_users(file.bundle_id)
            unsure = [one for one in targets.adopted if not self.files[one].users_known]
            if not unsure:
                return newest
            for one in unsure:  # an unreadable user may need any frame in it
                self.files[one] = dataclasses.replace(self.files[one], exclusive=False)

    def _load_holders(self, newest: FileView) -> None:
        """Adds the holders that only this session uses, and the session's other files with a block of theirs."""
        for holder in dict.fromkeys(newest.places.values()):
            if self._is_exclusive(holder):
                self._load(holder)
        for block, place in newest.places.items():
            if place not in self.files:
                continue
            if block not in self.files[place].frames:
                self._report_missing(block, newest, self.files[place].path)
            for holder in self._core.index.holders_of(block):
                if holder != place and holder in self._rows:
                    self._load(holder)

    def _report_missing(self, block: bytes, user: FileView, path: str) -> None:
        """The user's file was read before the holder's: unless it is unchanged, the block has only moved."""
        core = self._core
        if core.folder.is_current(user.bundle_id, self.stamps[user.bundle_id]) and core.index.knows(user.bundle_id):
            self._report(path, BlockMissing.code, f"{path} does not hold the block {block.hex()} of {user.path}.")

    def _load_retired(self) -> None:
        refs = {ref for bundle_id in self._rows for ref in self._core.index.refs_of(bundle_id)}
        for ref in sorted(refs - self._rows.keys()):
            if self._core.folder.suffix_of(ref) == RETIRED_SUFFIX:
                self._load(ref)

    def _load_with_surplus(self) -> set[bytes]:
        """The versions whose files hold frames that their own manifests do not look for there."""
        found = set()
        for bundle_id in self._rows:
            with self._reporting(bundle_id), self._core.open_frames(bundle_id) as file:
                if len(file.frames) > file.directory.places.count(0):
                    found.add(bundle_id)
        for bundle_id in found:
            self._load(bundle_id)
        return found

    def _load_cold(self) -> None:
        for row in self._rows.values():
            if self._policy.is_cold(row.created_ns, self._now_ns):
                self._load(row.bundle_id)

    def _know_users(self, bundle_id: bytes) -> None:
        if not self.files[bundle_id].users_known:
            users = self._core.index.users_of(bundle_id)
            known = self._core.index.given_up().keys().isdisjoint(users)  # those cannot be asked
            known = known and all(view is not None for view in [self._load(user) for user in users])
            self.files[bundle_id] = dataclasses.replace(self.files[bundle_id], users_known=known)

    def _load(self, bundle_id: bytes) -> FileView | None:
        if bundle_id not in self.files and bundle_id not in self._failed:
            self._failed.add(bundle_id)
            with self._reporting(bundle_id), self._core.open_bundle(bundle_id) as file:
                self.stamps[bundle_id] = file.stamp()
                self.files[bundle_id] = self._view(file)
                self._failed.remove(bundle_id)
        return self.files.get(bundle_id)

    def _view(self, file: BundleFile) -> FileView:
        retired = file.path.endswith(RETIRED_SUFFIX)
        bundle_id = self._same(file.bundle_id)
        row = self._rows.get(bundle_id) or self._core.index.rows_of([bundle_id]).get(bundle_id)
        frames = {self._same(frame.id): frame.frame_bytes for frame in file.directory.frames}
        entries = () if retired else file.entries
        return FileView(
            bundle_id,
            file.path,
            None if retired else row,
            retired,
            frames,
            {self._same(entry.id): self._same(entry.bundle_id or bundle_id) for entry in entries},
            file.file_bytes - sum(frames.values()),
            has_manifest=file.manifest is not None,
            exclusive=self._is_exclusive(bundle_id),
            raw=self._compressible(file, row),
        )

    def _same(self, one: bytes) -> bytes:
        """One object for equal ids: a thousand versions name the same blocks."""
        return self._ids.setdefault(one, one)

    def _is_exclusive(self, bundle_id: bytes) -> bool:
        """Whether a bundle is of this session, or retired, and nothing else uses it."""
        if bundle_id in self._avoided:
            return False
        if bundle_id not in self._rows and self._core.folder.suffix_of(bundle_id) != RETIRED_SUFFIX:
            return False
        return all(user in self._rows for user in self._core.index.users_of(bundle_id))

    def _compressible(self, file: BundleFile, row: IndexRow | None) -> frozenset[bytes]:
        """The frames of a cold file without any compressed frame, if compression makes the largest of them smaller.

        A file is as old as the youngest version that needs it: a version that is woken often must not wait for a
        decoder.
        """
        if self._policy.cold_after_seconds is None:
            return frozenset()
        users = self._core.index.rows_of(self._core.index.users_of(file.bundle_id)).values()
        dates = [one.created_ns for one in (row, *users) if one is not None]
        if not dates or not self._policy.is_cold(max(dates), self._now_ns):
            return frozenset()
        raw = [frame for frame in file.directory.frames if _is_raw(file, frame.id)]
        largest = max(raw, key=lambda frame: frame.frame_bytes, default=None)
        if largest is None or not self._shrinks(file, largest.id):
            return frozenset()
        return frozenset(self._same(frame.id) for frame in raw)

    def _shrinks(self, file: BundleFile, block: bytes) -> bool:
        header, head = file.read_head(block)
        for number, (spec, _) in enumerate(header.slots):
            data = memoryview(bytearray(spec.size_bytes))
            file.read_slots_into(block, header, head, [(number, [data])])
            if encode_slot([data], spec) is not None:
                return True
        return False

    @contextlib.contextmanager
    def _reporting(self, bundle_id: bytes) -> Iterator[None]:
        """Report damage; a bundle deleted meanwhile is no loss."""
        try:
            yield
        except _FATAL:
            raise
        except StoreError as error:
            if not isinstance(error, BundleMissing) or self._core.index.knows(bundle_id):
                path = error.details.get("path") or self._core.folder.bundle_path(bundle_id)
                self._report(str(path), error.code, error.message)


def _is_raw(file: BundleFile, block: bytes) -> bool:
    _, head = file.read_head(block)
    return all(stored.codec == RAW_CODE for stored in head.stored)
