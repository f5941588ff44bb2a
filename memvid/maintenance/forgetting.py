"""Forget: deletes a session and proves that nothing of it is left in the store, except bytes that other sessions share.

Owns the places of a session's bytes, the order of their removal, and the proof. This module knows only the store's own
files; docs/reference/format.md tells the limits (disks, backups).

Order: retire the versions, oldest first → drop their rows → marks → remove files that nothing needs → leftovers,
`incoming` and quarantine → strip the files that others need → write the index anew → look again.
A crash leaves the session there, or deleted with bytes of it remaining; forgetting it again finishes.

The proof: afterwards no file's manifest is the session's, and every frame in the store is one that some remaining
version needs and names in its own manifest, so it is that session's byte as well. Manifests of other sessions that name
this one as their origin cannot change, because their digest is the bundle id; the report lists them. All else in the
store's folder was looked into, or stands in the report. The search is for any frame that nothing needs, not for this
session's frames, so it also finds the leftovers of a forget that was cut off.

Rules:
- A frame goes only once a look at every user of its file, with no one changed since, says that nothing needs it.
- While a bundle cannot be read, or its file is missing, nothing that it may need is touched, and the report says so.
- A file in use stays until it is closed, and the report says so.
- A version of the session that is being written is let be, because its writer may not lose it: the last step, under the
  lock, reports it, and versions that came since the last look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ..checking.set_aside_versions import names_of_versions
from ..disk import durable
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.paths import Stamp, opened_folder, plain_bytes
from ..errors import (
    BundleMissing,
    CorruptStoreFile,
    DurabilityLost,
    LockLost,
    MarksLost,
    SessionNotFound,
    StoreError,
    Truncated,
)
from ..folder import quarantine
from ..folder.folder import list_retired
from ..folder.marks import MARKS_FILE, Marks
from ..folder.store_file import ABSENT, QUARANTINE, STORE_FILE
from ..format.bundle import BundleFile, FrameFile
from ..format.directory import file_bytes_with
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.manifest import Manifest, map_tells_of
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..recovery.replaying import keep_turns_behind
from ..uri import SessionUri, not_found
from ..writing import deletion
from ..writing.block_references import read_needs
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.rewriting import Contents, prepared
from .residue import Remain, find_remains

STILL_OPEN: Final = "still_open"
NOT_FORGOTTEN: Final = "not_forgotten"
CANNOT_BE_TOLD: Final = "cannot_be_told"

_ROUNDS: Final = 4
"""Looks over the store: to find the frames to strip, to prove, and two more for changes meanwhile."""
_TRIES: Final = 3
_AGAIN: Final = "forget the session again"


@dataclass(frozen=True, slots=True)
class Step:
    """A bundle file that goes, or is written anew without the frames that nothing needs: `size_bytes` fewer on the
    disk, `bytes_after` left of it."""

    kind: str
    bundle_id: bytes
    path: str
    session: SessionUri | None
    version: int | None
    size_bytes: int
    bytes_after: int
    reason: str

    def action(self, size_bytes: int) -> Action:
        return Action(self.kind, self.path, self.session, self.version, size_bytes, self.reason)


@dataclass(slots=True)
class Look:
    """One look over the store: the steps, the blocks shared with others, the versions of others that name the session,
    and the problems."""

    steps: list[Step] = field(default_factory=list)
    shared: dict[SessionUri, set[bytes]] = field(default_factory=dict)
    naming: list[Action] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


def forget(core: StoreCore, uri: SessionUri, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.forget`. A session without rows may have files left by an earlier delete or forget."""
    core.begin_upkeep(dry_run=dry_run)  # an index file that is behind also keeps names
    bundle_ids = core.index.bundles_of(uri)
    blocks = _blocks_of(core, uri, bundle_ids)
    forgetting = _Forget(core, uri, blocks, dry_run=dry_run)
    if not dry_run:
        keep_turns_behind(core, uri, bundle_ids)
        forgetting.delete(bundle_ids)
    else:
        forgetting.erase_turns()
    forgetting.clear_other_places()
    look = forgetting.strip() if not dry_run else _look(core, uri, blocks, bundle_ids)
    if dry_run:
        forgetting.plan(look, bundle_ids)
    else:
        forgetting.erase_index()
    forgetting.find_newcomers(look)
    forgetting.find_naming_turns(look)
    report = forgetting.report(look)
    found = bundle_ids or blocks or look.naming or report.problems
    if not (found or any(action.session == uri for action in report.actions)):
        unknown = not_found(uri, core.index.uris())
        raise SessionNotFound(f"{unknown.message} Nothing of it is in the store.", **unknown.details)
    return report


def _blocks_of(core: StoreCore, uri: SessionUri, bundle_ids: Iterable[bytes]) -> set[bytes]:
    """The blocks of a session as far as manifests still tell them, to report those that others share."""
    retired = list_retired(core.folder)
    blocks: set[bytes] = set()
    for bundle_id in {*bundle_ids, *retired}:
        with contextlib.suppress(StoreError), core.open_bundle(bundle_id) as file:
            if file.manifest is not None and file.manifest.uri == uri:
                blocks.update(entry.id for entry in file.manifest.blocks)
    return blocks


# --- looking


def _look(core: StoreCore, uri: SessionUri, blocks: set[bytes], but_for: Iterable[bytes] = ()) -> Look:
    """Look the whole store over, as if the bundles `but_for` were retired. Changes nothing."""
    look = Look()

    def on_file(file: BundleFile, manifest: Manifest) -> None:
        if manifest.uri == uri:
            look.problems.append(_newcomer(uri, file.path))
            return
        if manifest.tells_of(uri):
            look.naming.append(_naming(uri, file.path, manifest))
        if blocks and (common := blocks.intersection(entry.id for entry in manifest.blocks)):
            look.shared.setdefault(manifest.uri, set()).update(common)

    needs = read_needs(core, on_file, but_for)
    look.problems += needs.unread.values()
    if needs.unread:
        return look
    for bundle_id in dict.fromkeys([*needs.retired, *needs.surplus]):
        try:
            with core.open_bundle(bundle_id) as file:
                step = _step(file, uri, set(needs.of(bundle_id)), retired=bundle_id not in needs.surplus)
        except BundleMissing:
            continue
        except StoreError as error:
            if isinstance(error, Truncated) and error.details.get("size_bytes") == 0:
                continue  # emptied on a full disk: it only keeps a name
            path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            message = f"{path} cannot be read and others may need it: whether it holds bytes of {uri} cannot be told."
            look.problems.append(Finding(path, CANNOT_BE_TOLD, f"{message} {error.message}"))
            continue
        if step is not None:
            missing = _missing_users(core, step, but_for)
            look.problems += missing
            look.steps += () if missing else (step,)
    return look


def _missing_users(core: StoreCore, step: Step, but_for: Iterable[bytes]) -> list[Finding]:
    """Why a file must stay as it is: by the index, missing versions look for blocks in it, and cannot say which."""
    others = set(core.index.users_of(step.bundle_id)).difference(but_for)
    missing = sorted(core.promised([user for user in others if not core.folder.has_bundle(user)]))
    rows = core.index.rows_of(missing)
    found = []
    for user in missing:
        path = core.folder.bundle_path(user)
        row = rows.get(user)
        version = f"version {row.version} of {row.uri}" if row is not None else "another version"
        message = (
            f"{step.path} stays as it is: {version} needs blocks of it, and its own file {path} is missing, "
            f"so it is unknown which. Put that file back from a backup, or delete that session, and {_AGAIN}."
        )
        found.append(Finding(step.path, CANNOT_BE_TOLD, message))
    return found


def _step(file: BundleFile, uri: SessionUri, needed: set[bytes], *, retired: bool) -> Step | None:
    manifest = file.manifest
    listed = {entry.id for entry in manifest.blocks} if manifest is not None and not retired else set()
    idle = [frame for frame in file.directory.frames if frame.id not in needed and frame.id not in listed]
    named = manifest is not None and manifest.uri == uri
    session, version = (uri, manifest.version) if named and manifest is not None else (None, None)
    if retired and not needed:
        reason = "nothing needs a block of it"
        return Step("remove", file.bundle_id, file.path, session, version, file.file_bytes, 0, reason)
    if idle or (retired and manifest is not None and (named or manifest.tells_of(uri))):
        after = _bytes_after(file, _contents(file, needed, live=manifest is not None and not retired))
        reason = f"{len(file.frames) - len(idle)} of its {len(file.frames)} blocks are needed; they alone stay"
        return Step("strip", file.bundle_id, file.path, session, version, file.file_bytes - after, after, reason)
    return None


def _contents(file: BundleFile, needed: set[bytes], *, live: bool) -> Contents:
    """The frames that stay in a file: those `needed` from outside, and in a `live` file those of its own version."""
    entries = file.entries if live else ()
    kept = needed | {entry.id for entry in entries}
    return Contents(
        frames=[(frame.id, file.bundle_id) for frame in file.directory.frames if frame.id in kept],
        holders={
            entry.id: entry.bundle_id
            for entry in entries
            if entry.bundle_id is not None and entry.bundle_id != file.bundle_id
        },
        with_manifest=live,
    )


def _bytes_after(file: BundleFile, contents: Contents) -> int:
    blocks = file.manifest.blocks if file.manifest is not None and contents.with_manifest else ()
    manifest_bytes = len(file.encoded_manifest()) if contents.with_manifest else 0
    frames = [file.frame_of(block_id) for block_id, _ in contents.frames]
    return file_bytes_with(frames, blocks, contents.holders, manifest_bytes)


# --- doing


class _Forget:
    def __init__(self, core: StoreCore, uri: SessionUri, blocks: set[bytes], *, dry_run: bool) -> None:
        self._run = MaintenanceRun(core, "forget", dry_run)
        self._core = core
        self._uri = uri
        self._blocks = blocks

    def delete(self, bundle_ids: list[bytes]) -> None:
        core = self._core
        rows = core.index.rows_of(bundle_ids)
        with core.committing():
            unfiled, marked = self._unfiled(bundle_ids), self._marked()
            # The look through quarantine reports, or repairs, what failed here.
            room = deletion.retire(core.folder, core.index, core.pins, bundle_ids, self.erase_turns).freed
            removed = deletion.remove_unneeded(core.folder, core.index, core.pins)
            deletion.unmark(core.folder, self._uri)
            self._tell_rows(unfiled, marked=marked and not self._marked())
        self._run.bytes_freed += room
        for bundle_id, size_bytes in removed.items():
            path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            self._run.freed("remove", path, size_bytes, "nothing needs a block of it", rows.get(bundle_id))

    def erase_turns(self) -> None:
        """What the journal has of the session."""
        journal = self._core.journal
        has = journal.has(self._uri)
        try:
            if not self._run.dry_run:
                with self._core.poisoning():
                    journal.erase(self._uri)
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            message = f"{journal.path} may hold turns of {self._uri}: {error.message} Then {_AGAIN}."
            self._run.tell(journal.path, NOT_FORGOTTEN, message)
            return
        if has:
            self._did(Action("remove", journal.path, self._uri, None, 0, "it holds turns that no version has"))

    def strip(self) -> Look:
        """Look the store over and take the steps, until a look finds nothing more: that one is the proof."""
        failed: dict[bytes, Finding] = {}
        for _ in range(_ROUNDS):
            look = _look(self._core, self._uri, self._blocks)
            steps = [step for step in look.steps if step.bundle_id not in failed]
            if not steps:
                break
            for step in steps:
                problem = self._do(step)
                if problem is not None:
                    failed[step.bundle_id] = problem
        left = [step for step in look.steps if step.bundle_id not in failed]
        look.problems += failed.values()
        look.problems += [Finding(step.path, NOT_FORGOTTEN, "It kept changing. Forget it again.") for step in left]
        return look

    def _unfiled(self, bundle_ids: Iterable[bytes]) -> list[IndexRow]:
        """The versions without a file under bundles/: they are missing, or set aside."""
        core = self._core
        absent = [one for one in bundle_ids if not core.folder.has_bundle(one)]
        return [stored.row for stored in map(core.index.stored, absent) if stored is not None and stored.row]

    def _marked(self) -> bool:
        """Whether the session has marks; False if they cannot be read, which the end reports."""
        with contextlib.suppress(StoreError):
            return bool(Marks.load(self._core.folder).session(self._uri))
        return False

    def _tell_rows(self, unfiled: Iterable[IndexRow], *, marked: bool) -> None:
        for row in unfiled:
            path = self._core.folder.bundle_path(row.bundle_id)
            self._did(Action("index", path, row.uri, row.version, 0, "it has no file there, and its row goes"))
        if marked:
            path = f"{self._core.path}/{MARKS_FILE}"
            self._did(Action("unmark", path, self._uri, None, 0, "its tags and pins go"))

    def plan(self, look: Look, bundle_ids: Iterable[bytes]) -> None:
        self._tell_rows(self._unfiled(bundle_ids), marked=self._marked())
        for step in look.steps:
            self._did(step.action(step.size_bytes))
            self._run.bytes_freed += step.bytes_after  # the whole old file leaves the disk, and that much comes back
            self._run.bytes_written += step.bytes_after

    def _do(self, step: Step) -> Finding | None:
        core = self._core
        if core.pins.count(step.bundle_id):
            return _still_open(step.path)
        if not core.index.given_up().keys().isdisjoint(core.index.users_of(step.bundle_id)):
            return _needed_by_aside(step.path, CANNOT_BE_TOLD)
        try:
            for _ in range(_TRIES):
                freed = self._remove(step) if step.kind == "remove" else self._strip(step)
                if freed is not None:
                    self._did(step.action(freed))
                    return None
                if core.pins.count(step.bundle_id):
                    return _still_open(step.path)
            return Finding(step.path, NOT_FORGOTTEN, f"{step.path} is being used by others. Forget it again.")
        except BundleMissing:
            return None  # it is gone
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            return Finding(step.path, error.code, error.message)

    def _remove(self, step: Step) -> int | None:
        core = self._core
        with core.committing():
            removed = deletion.remove_retired(core.folder, core.index, core.pins, [step.bundle_id])
        for bundle_id, size_bytes in removed.items():
            if bundle_id != step.bundle_id:  # one that had waited for its reader
                path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
                self._run.freed("remove", path, size_bytes, "nothing needs a block of it")
        if step.bundle_id in removed:
            return removed[step.bundle_id]
        if core.pins.count(step.bundle_id) or core.index.needs_unknown():
            return None
        return self._strip(step)  # the index is not sure that nothing needs the file; each of its frames can be proven

    def _strip(self, step: Step) -> int | None:
        """Write a file anew without the frames that nothing needs; None if a user of it came or changed meanwhile."""
        core = self._core
        users: dict[bytes, Stamp] = {}
        needed: set[bytes] = set()
        for user in core.index.users_of(step.bundle_id):
            try:
                file = core.open_bundle(user)
            except BundleMissing:
                return None  # deleted since the look, or else the next look says so
            with file:
                users[user] = file.stamp()
                needed.update(entry.id for entry in file.entries if entry.bundle_id == step.bundle_id)
        with core.open_bundle(step.bundle_id) as file:
            live = file.path.endswith(LIVE_SUFFIX) and file.manifest is not None
            contents = _contents(file, needed, live=live)
        with prepared(core, step.bundle_id, contents) as fresh, core.committing():
            current = set(core.index.users_of(step.bundle_id)) == set(users) and all(
                core.folder.is_current(user, stamp) for user, stamp in users.items()
            )
            self._run.bytes_written += fresh.bytes_after
            core.count_written(utc_day(now_ns()), fresh.bytes_after)  # though no budget refuses it
            if not current or core.index.needs_unknown() or not fresh.commit():
                return None
            self._run.bytes_freed += fresh.bytes_after  # the whole old file left the disk; that much came back
            return fresh.bytes_before - fresh.bytes_after

    def _did(self, action: Action) -> None:
        self._run.actions.append(action)
        self._run.bytes_freed += action.size_bytes

    # --- places beside bundles/

    def clear_other_places(self) -> None:
        """Clear leftovers of unfinished writes, handed-over files that were not taken, and files that repair moved
        away. Anything else in the store's folder, and anything unreadable, is reported and left."""
        self._clear_temps()
        for remain in find_remains(self._core, self._uri):
            if remain.why is not None:
                message = (
                    f"Whether {remain.path} holds bytes of {self._uri} cannot be told: {remain.why}. Look yourself; "
                    f"move it out of the store, or remove it, and {_AGAIN}."
                )
                self._run.tell(remain.path, CANNOT_BE_TOLD, message)
            elif not remain.folder:
                message = (
                    f"{remain.path} holds a version of {self._uri}, and is no file of the store's: it stays. Move it "
                    f"out of the store, or remove it, and {_AGAIN}."
                )
                self._run.tell(remain.path, NOT_FORGOTTEN, message)
            else:
                self._clear(remain)

    def _clear(self, remain: Remain) -> None:
        try:
            with self._run.committing():
                if remain.folder == QUARANTINE and self._is_needed_by_aside(remain.name):
                    self._run.problems.append(_needed_by_aside(remain.path, NOT_FORGOTTEN))
                    return
                self._unlink(remain)
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            self._run.tell(remain.path, NOT_FORGOTTEN, error.message)
            return
        reason = f"it {'tells of' if remain.folder == ABSENT else 'holds'} a version of {self._uri}"
        self._did(Action("remove", remain.path, self._uri, None, remain.size_bytes, reason))

    def _is_needed_by_aside(self, name: str) -> bool:
        """Whether a version of another session that repair has set aside may need a block of a file in quarantine: by
        its own file, or else by the index. Raises the errors of reading the file."""
        core = self._core
        others = {one for one, row in core.index.given_up().items() if row.uri != self._uri}
        if quarantine.bundle_of(name) is None or not others:
            return False
        with FrameFile(*quarantine.open_name(core.folder, name), None) as file:
            bundle_id, frames = file.bundle_id, frozenset(file.frames)
        if not others.isdisjoint(core.index.users_of(bundle_id)):
            return True
        lying = names_of_versions(core.folder)
        return any(
            not frames.isdisjoint(_blocks_in_quarantine(core, other, inside))
            for other in others
            for inside in lying.get(other, ())
        )

    def _clear_temps(self) -> None:
        core = self._core
        folder_path = core.folder.bundles_path
        if self._run.dry_run and not core.has_lock:
            return  # a daemon beside us may be writing some
        with self._run.committing():
            for name in core.folder.temps.leftovers():
                size_bytes = plain_bytes(core.folder.bundles_fd, name)
                if not self._run.dry_run:
                    durable.remove(core.folder.bundles_fd, name, folder_path)
                self._run.freed("remove", f"{folder_path}/{name}", size_bytes, "an unfinished write left it")
            if not self._run.dry_run:  # also for removals without a flush: by the opening, or by an unfinished write
                durable.sync_folder(core.folder.bundles_fd, folder_path)

    def _unlink(self, remain: Remain) -> None:
        core = self._core
        if self._run.dry_run:
            return
        path = f"{core.path}/{remain.folder}"
        with opened_folder(core.folder.root_fd, remain.folder, path) as fd:
            durable.remove(fd, remain.name, path)
            durable.sync_folder(fd, path)

    # --- the index, the marks, the end

    def erase_index(self) -> None:
        core = self._core
        try:
            with core.committing():
                core.index.erase_dropped()
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            message = f"Names may remain in free space of {core.index.path}: {error.message}"
            self._run.tell(core.index.path, error.code, message)
        path = f"{core.path}/{MARKS_FILE}"
        try:
            if Marks.load(core.folder).session(self._uri):
                core.folder.require_store_file()  # without store.json no marks are written
                self._run.tell(path, NOT_FORGOTTEN, f"{path} still has tags or pins of {self._uri}. Forget it again.")
        except MarksLost:
            pass  # so there are none of this session
        except CorruptStoreFile as error:
            message = f"Tags and pins of {self._uri} may be left: {error.message} Then {_AGAIN}."
            self._run.tell(f"{core.path}/{STORE_FILE}", error.code, message)
        except StoreError as error:
            self._run.tell(path, error.code, error.message)

    def find_newcomers(self, look: Look) -> None:
        """Versions of the session that came after the last look, or may still come: a version being written has its
        bytes in its writer's temporary file."""
        core = self._core
        with self._run.committing():
            arrived = [] if self._run.dry_run else core.index.bundles_of(self._uri)
            versions = core.being_written(self._uri)
        told = {problem.path for problem in look.problems}
        paths = [core.folder.bundle_path(bundle_id) for bundle_id in arrived]
        self._run.problems += [_newcomer(self._uri, path) for path in paths if path not in told]
        for version in versions:
            message = (
                f"Version {version} of {self._uri} is being written, by a sleep or an import, and its bytes are in the "
                f"store already. Let that come to its end, then {_AGAIN}."
            )
            self._run.tell(core.folder.bundles_path, STILL_OPEN, message)

    def find_naming_turns(self, look: Look) -> None:
        """Turns of other sessions in the journal that name this one."""
        journal = self._core.journal
        for other in journal.uris():
            try:
                record = journal.find(other)
            except StoreError as error:
                message = f"Whether turns of {other} name {self._uri} cannot be told: {error.message}"
                self._run.tell(journal.path, CANNOT_BE_TOLD, message)
                continue
            if record is not None and other != self._uri and map_tells_of(record.session, self._uri):
                reason = f"its turns name {self._uri} as their origin; forget this one too if the name must go"
                look.naming.append(Action("keep", journal.path, other, None, 0, reason))

    def report(self, look: Look) -> MaintenanceReport:
        for other, common in sorted(look.shared.items()):
            reason = f"{len(common)} blocks are this session's too, and stay"
            path = self._core.folder.bundles_path
            self._run.actions.append(Action("keep", path, other, None, 0, reason))
        self._run.actions += look.naming
        self._run.problems += look.problems
        return self._run.report()


def _blocks_in_quarantine(core: StoreCore, bundle_id: bytes, name: str) -> frozenset[bytes]:
    """The blocks of a version in quarantine, as far as its file tells."""
    with contextlib.suppress(StoreError):
        fd, path = quarantine.open_name(core.folder, name)
        with BundleFile(fd, path, bundle_id) as file:
            return frozenset(entry.id for entry in file.entries)
    return frozenset()


def _needed_by_aside(path: str, code: str) -> Finding:
    message = (
        f"A version of another session that repair has set aside may need blocks of {path}: so it stays. Let `torpor "
        "repair` bring that version back, or `torpor gc --quarantine` give it up. Forget again."
    )
    return Finding(path, code, message)


def _naming(uri: SessionUri, path: str, manifest: Manifest) -> Action:
    reason = f"it names {uri} as its origin, which is part of its id; forget this one too if the name must go"
    return Action("keep", path, manifest.uri, manifest.version, 0, reason)


def _newcomer(uri: SessionUri, path: str) -> Finding:
    message = f"{path} is a version of {uri}: it came while it was being forgotten. Forget it again."
    return Finding(path, NOT_FORGOTTEN, message)


def _still_open(path: str) -> Finding:
    return Finding(path, STILL_OPEN, f"Somebody has {path} open. Let go of it and forget the session again.")
