"""Forget: deletes a session and proves that nothing of it is left in the store, except bytes that other sessions share.

Order: delete it, as `Store.delete_session` does → its turns in the journal, also those that count no more → the index
without what was dropped → the diary → how new its head in a remote was → packs without blocks that nothing needs → what
lies in `damaged` and `incoming` → look again.
A crash leaves the session there, or deleted with bytes of it remaining; forgetting it again finishes.

The proof: afterwards no manifest, mark, turn or row is the session's, and every frame in the store is of a block that
some remaining version names, so it is that session's byte as well. The search is for any frame that nothing needs, not
for this session's, so it also finds what a forget that was cut off has left. All else in the store's folder was looked
into, or stands in the report. Manifests of other sessions that name this one as their origin cannot change, because
their digest is the bundle id; the report lists them.

This module knows only the store's own files; docs/reference/format.md tells the limits (disks, backups).
"""

from __future__ import annotations

import contextlib
from typing import Final

from ..answers import Action, MaintenanceReport
from ..checking.wholeness import FoundBlocks
from ..disk import durable
from ..disk.paths import opened_folder
from ..errors import BundleMissing, DurabilityLost, LockLost, MarksLost, SessionNotFound, StoreError
from ..folder.diary import DIARY_FILE
from ..folder.folder import manifest_name
from ..folder.marks import MARKS_FILE, Marks
from ..folder.seen_heads import CANNOT_BE_TOLD, HEADS_FILE
from ..folder.store_file import PACKS, VERSIONS
from ..format.frames import FrameReader
from ..format.manifest import decode_manifest, map_tells_of
from ..recovery.mending import Mending
from ..recovery.replaying import keep_turns_behind
from ..units import format_plural
from ..uri import SessionUri, not_found
from ..writing.core import StoreCore
from ..writing.deletion import delete_versions
from ..writing.frame_files import open_frames
from ..writing.maintenance_run import MaintenanceRun
from ..writing.needs import Needed
from ..writing.removal import needed_now
from .remains import Remain, find_remains
from .repack import remove_leftovers, repack_packs
from .repack_plan import CLEARING

STILL_OPEN: Final = "still_open"
NOT_FORGOTTEN: Final = "not_forgotten"
_AGAIN: Final = "forget the session again"


def forget(core: StoreCore, uri: SessionUri, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.forget`. A session without versions may have bytes left by an earlier delete or forget."""
    core.begin_upkeep(dry_run=dry_run)
    core.look_again()
    forgetting = _Forget(core, uri, dry_run=dry_run)
    forgetting.delete()
    forgetting.clear()
    forgetting.prove()
    report = forgetting.run.report()
    if not report.actions and not report.problems:
        unknown = not_found(uri, core.index.near(uri))
        raise SessionNotFound(f"{unknown.message} Nothing of it is in the store.", **unknown.details)
    return report


def forget_what_was_said(core: StoreCore, uri: SessionUri) -> MaintenanceReport:
    """See `Store.forget_what_was_said`."""
    run = MaintenanceRun(core, "forget", False)
    _erase_diary(run, core, uri)
    _forget_heads(run, core, uri)
    return run.report()


def _erase_diary(run: MaintenanceRun, core: StoreCore, uri: SessionUri) -> bool:
    """Whether the diary told of the session, and does so no more."""
    path = core.folder.path_of(DIARY_FILE)
    try:
        if run.dry_run:
            return core.diary.mentions(uri)
        with core.poisoning():
            core.require_writable()
            return core.diary.erase(uri)
    except (DurabilityLost, LockLost):
        raise
    except StoreError as error:
        run.tell(path, NOT_FORGOTTEN, f"{path} may tell of {uri}: {error.message} Then {_AGAIN}.")
        return False


def _forget_heads(run: MaintenanceRun, core: StoreCore, uri: SessionUri) -> bool:
    """Whether it was remembered how new the session's head in a remote was, and is no more."""
    if not core.seen_heads.knows(uri):
        return False
    path = core.folder.path_of(HEADS_FILE)
    try:
        if not run.dry_run:
            with core.poisoning():
                core.require_writable()
                core.seen_heads.forget(uri)
    except (DurabilityLost, LockLost):
        raise
    except StoreError as error:
        run.tell(path, NOT_FORGOTTEN, f"{path} may have a digest of {uri}: {error.message} Then {_AGAIN}.")
        return False
    return True


class _Forget:
    def __init__(self, core: StoreCore, uri: SessionUri, *, dry_run: bool) -> None:
        self.run = MaintenanceRun(core, "forget", dry_run)
        self._older: set[str] = set()  # temporary files that were begun before the delete: they may have its blocks
        self._core = core
        self._uri = uri
        self._look()

    def _look(self) -> None:
        """The versions that go."""
        self._rows = self._core.index.versions(self._uri)
        self._ids = frozenset(row.bundle_id for row in self._rows)
        self._blocks = frozenset(block for each in self._ids for block in self._core.needs.of(each))

    # --- doing

    def delete(self) -> None:
        """The session's manifests, turns and marks, and what the index has of it."""
        core, run = self._core, self.run
        turns_go, had_marks = core.journal.has(self._uri), self._is_marked()
        if run.dry_run:
            sizes = self._sizes()
        else:
            with core.committing(), core.journaling():  # no version may come, and no turn behind one that goes
                self._look()
                sizes = self._sizes()
                keep_turns_behind(core, self._uri, self._ids)
                deleted = delete_versions(core, self._uri, self._rows, whole=True)
                run.bytes_freed += deleted.bytes_freed - sum(sizes)
                turns_go = self._erase_turns() and turns_go
                core.index.remove_file(core.folder, erasing=True)
                self._older = core.folder.being_written()
        for row, size_bytes in zip(self._rows, sizes, strict=True):
            run.freed("remove", row, size_bytes, "It is a version of the session.")
        if _erase_diary(run, core, self._uri):
            path = core.folder.path_of(DIARY_FILE)
            run.actions.append(Action("remove", path, str(self._uri), None, 0, "What the diary tells of it goes."))
        run.problems.extend(core.seen_heads.left_elsewhere(self._uri))
        if _forget_heads(run, core, self._uri):
            path = core.folder.path_of(HEADS_FILE)
            reason = "What is known of its head in a remote goes."
            run.actions.append(Action("remove", path, str(self._uri), None, 0, reason))
        if turns_go:
            reason = "Its turns in the journal go."
            run.actions.append(Action("remove", core.journal.path, str(self._uri), None, 0, reason))
        if had_marks:
            run.actions.append(Action("unmark", self._marks_path, str(self._uri), None, 0, "Its tags and pins go."))

    def _sizes(self) -> list[int]:
        return [self._core.folder.bytes_of(manifest_name(row.bundle_id)) for row in self._rows]

    def _erase_turns(self) -> bool:
        """Whether they are gone."""
        journal = self._core.journal
        try:
            journal.erase(self._uri)
            return True
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            message = f"{journal.path} may hold turns of {self._uri}: {error.message} Then {_AGAIN}."
            self.run.tell(journal.path, NOT_FORGOTTEN, message)
            return False

    @property
    def _marks_path(self) -> str:
        return f"{self._core.path}/{MARKS_FILE}"

    def _is_marked(self) -> bool:
        """Whether the session has marks; False if they cannot be read, which the end reports."""
        with contextlib.suppress(StoreError):
            return bool(Marks.load(self._core.folder).session(self._uri))
        return False

    def clear(self) -> None:
        """Every block that nothing needs, wherever it lies."""
        remove_leftovers(self.run)
        own = [name for name in self._core.folder.list_packs() if self._is_version(name)]
        deletes = self._ids if self.run.dry_run else ()
        repack_packs(self.run, None, CLEARING, deletes=deletes, must_go=own)
        needed = self._needed()
        for remain in find_remains(self._core, self._uri, needed) if not needed.unknown else ():
            if remain.why is None and remain.folder:
                self._remove(remain, needed)

    def _needed(self) -> Needed:
        """By versions: what is only in use is not needed."""
        return needed_now(self._core, deletes=self._ids if self.run.dry_run else (), pins=False)

    def _is_version(self, name: str) -> bool:
        """Whether a pack has a manifest of the session in it."""
        with contextlib.suppress(StoreError), open_frames(self._core.folder, name) as file:
            return self._has_manifest(file)
        return False

    def _has_manifest(self, file: FrameReader) -> bool:
        """A bundle of a store that was carried over has one, and an exported file that was put here."""
        encoded = file.encoded_manifest()
        return bool(encoded) and decode_manifest(encoded, file.path).uri == self._uri

    def _remove(self, remain: Remain, needed: Needed) -> None:
        """What other sessions need of it, and no pack has sound, is copied before."""
        core = self._core
        path = f"{core.path}/{remain.folder}"
        try:
            if not Mending(self.run, FoundBlocks(), set()).keep(remain.path, needed):
                message = (
                    f"{remain.path} holds bytes of {self._uri}, or of a session that is no more. It stays, for it has "
                    "a part of a block that others need and no pack has: with a backup, `torpor repair --from FOLDER` "
                    f"may put that together. Then {_AGAIN}. Or remove the file, and that block is lost."
                )
                self.run.tell(remain.path, NOT_FORGOTTEN, message)
                return
            if not self.run.dry_run:
                with core.committing(), opened_folder(core.folder.root_fd, remain.folder, path) as fd:
                    durable.remove(fd, remain.name, path)
                    durable.sync_folder(fd, path)
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            self.run.fail(remain.path, error)
            return
        self.run.freed("remove", remain.path, remain.size_bytes, "It has blocks that no version needs, or is of it.")

    # --- proving

    def prove(self) -> None:
        """List what is there, and tell of all that is the session's or may be."""
        dry_run = self.run.dry_run
        if not dry_run:
            self._look_for_newcomers()
        self._look_at_manifests()
        self._look_at_journal()
        if not dry_run:
            self._look_at_marks()
        needed = self._needed()
        if needed.unknown:
            return  # that is told already
        if not dry_run:
            self._look_at_packs(needed)
        paths = {finding.path for finding in self.run.problems}
        for remain in find_remains(self._core, self._uri, needed):
            if remain.path not in paths and not (dry_run and remain.why is None and remain.folder):  # that one will go
                self._tell_remain(remain)

    def _look_at_manifests(self) -> None:
        """Versions of the session, those of others that share its blocks, and those that name it."""
        core, run = self._core, self.run
        shared: dict[SessionUri, set[bytes]] = {}
        paths = {finding.path for finding in run.problems}
        for bundle_id in sorted(core.folder.list_versions() - (self._ids if run.dry_run else frozenset())):
            path = core.folder.manifest_path(bundle_id)
            try:
                manifest = core.read_manifest(bundle_id)
            except BundleMissing:
                continue  # deleted meanwhile
            except StoreError as error:
                if path not in paths:
                    run.tell(path, CANNOT_BE_TOLD, f"Whose version {path} is cannot be told: {error.message}")
                continue
            if manifest.uri == self._uri:
                message = f"{path} is a version of {self._uri}: it came while it was being forgotten. Forget it again."
                run.tell(path, NOT_FORGOTTEN, message)
                continue
            if map_tells_of(manifest.session, self._uri):
                reason = f"It names {self._uri} as its origin, which is part of its id; forget it too if that must go."
                run.actions.append(Action("keep", path, str(manifest.uri), manifest.version, 0, reason))
            if common := self._blocks.intersection(entry.id for entry in manifest.blocks):
                shared.setdefault(manifest.uri, set()).update(common)
        for other, blocks in sorted(shared.items()):
            reason = f"It keeps {format_plural(len(blocks), 'block')} that this session has, too."
            run.actions.append(Action("keep", core.folder.path_of(PACKS), str(other), None, 0, reason))

    def _look_at_journal(self) -> None:
        journal = self._core.journal
        for other in journal.uris():
            try:
                record = journal.find(other)
            except StoreError as error:
                message = f"Whether turns of {other} name {self._uri} cannot be told: {error.message}"
                self.run.tell(journal.path, CANNOT_BE_TOLD, message)
                continue
            if record is not None and other != self._uri and map_tells_of(record.session, self._uri):
                reason = f"Its turns name {self._uri} as their origin; forget this one too if the name must go."
                self.run.actions.append(Action("keep", journal.path, str(other), None, 0, reason))

    def _look_at_packs(self, needed: Needed) -> None:
        core, run = self._core, self.run
        paths = {finding.path for finding in run.problems}
        for name in sorted(core.folder.list_packs()):
            path = core.folder.path_of(name)
            try:
                with open_frames(core.folder, name) as file:
                    idle = needed.idle_in(file)
                    is_version = self._has_manifest(file)
            except BundleMissing:
                continue
            except StoreError as error:
                message = (
                    f"{path} cannot be read: whether it holds bytes of {self._uri} cannot be told. {error.message}"
                )
                run.tell(path, CANNOT_BE_TOLD, message)
                continue
            if is_version:
                run.tell(path, NOT_FORGOTTEN, f"{path} has a manifest of {self._uri}. Forget it again.")
            elif not idle.isdisjoint(core.pins.blocks()):
                message = f"Somebody reads or writes blocks of {path}. Let that come to its end, then {_AGAIN}."
                run.tell(path, STILL_OPEN, message)
            elif idle and path not in paths:
                message = f"{path} has {len(idle)} blocks that no version needs. Forget the session again."
                run.tell(path, NOT_FORGOTTEN, message)

    def _tell_remain(self, remain: Remain) -> None:
        if remain.why is None:
            message = f"{remain.path} holds bytes of {self._uri}, or of a session that is no more. Remove it."
            self.run.tell(remain.path, NOT_FORGOTTEN, message)
        else:
            message = (
                f"Whether {remain.path} holds bytes of {self._uri} cannot be told: {remain.why}. Remove it, or not."
            )
            self.run.tell(remain.path, CANNOT_BE_TOLD, message)

    def _look_at_marks(self) -> None:
        path = self._marks_path
        try:
            if Marks.load(self._core.folder).session(self._uri):
                self.run.tell(path, NOT_FORGOTTEN, f"{path} still has tags or pins of {self._uri}. Forget it again.")
        except MarksLost:
            pass  # so there are none of this session
        except StoreError as error:
            self.run.tell(path, error.code, error.message)

    def _look_for_newcomers(self) -> None:
        """A version being written has its bytes in its writer's temporary files. Under the lock, and before the
        manifests are listed: what begins later does not count."""
        core = self._core
        with core.committing():
            writing = core.being_written(self._uri)
            has_turns = core.journal.has(self._uri)
            older = self._older & core.folder.being_written()
        if has_turns:
            message = f"{core.journal.path} has turns of {self._uri}: they came meanwhile. Forget it again."
            self.run.tell(core.journal.path, NOT_FORGOTTEN, message)
        for version in writing:
            message = (
                f"Version {version} of {self._uri} is being written, by a sleep or an import, and its bytes are in the "
                f"store already. Let that come to its end, then {_AGAIN}."
            )
            self.run.tell(core.folder.path_of(VERSIONS), STILL_OPEN, message)
        for path in map(core.folder.path_of, sorted(older)):
            message = (
                f"{path} is being written since before the delete, and may have blocks of {self._uri}. Let that come "
                f"to its end, then {_AGAIN}."
            )
            self.run.tell(path, STILL_OPEN, message)
