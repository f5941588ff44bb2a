"""A backup: the versions of a store in a folder that is a store itself, of the same uuid, and can take its place.

Owns the backup's place, the choice of versions, and the steps. Works beside a daemon that writes.

How it works: of each version that the backup lacks, the blocks that it lacks go into one new pack there, and then the
manifest gets its name. So each is there whole or not at all, and a backup that was cut off goes on where it was.

Rules:
- Nothing in the store is written, and no request waits for it.
- Nothing goes from the backup, marks included: a version deleted in the store stays there. If the backup's own versions
  of a session would collide with new ones, or come after them, that session is reported and left as it is.
- A version that is not whole, or cannot be read, is reported by its name, and the rest is copied. Of a stripped version
  that goes which is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from ..answers import Action, Finding, MaintenanceReport, VersionInfo
from ..disk import targets
from ..disk.lock import StoreLock
from ..disk.paths import closing_fd, whole_path
from ..disk.room import free_bytes_of
from ..errors import (
    BundleMissing,
    Corruption,
    LimitExceeded,
    NameTaken,
    NoSpace,
    StoreError,
    StoreIoError,
    TargetExists,
    UnsafePath,
    UnsupportedFormat,
)
from ..folder.folder import StoreFolder, id_in
from ..folder.marks import MARKS_FILE, Marks, create_store, findings_of_missing, stripped_in
from ..folder.store_file import (
    has_store_file,
    load_store_uuid,
    open_or_make_root,
    require_creatable,
    uuid_of_format_1,
)
from ..format.blocks import BlockEntry
from ..format.frames import FrameReader
from ..format.manifest import encode_manifest_file
from ..format.records import Progress
from ..units import format_bytes
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.unreadable import sentence_of
from .intake import Intake

_REPAIR_FIRST: Final = (
    " `torpor verify` says how far it is whole, and `torpor repair` copies what is sound out of damaged files; then "
    "run the backup again."
)


def claim(folder: StoreFolder, target: str | os.PathLike[str]) -> str:
    """Make a new or empty folder a backup of this store, or check that it is one, of this format or of format 1; its
    path.

    Raises:
        UnsafePath: it lies in the store. NotAStore: it holds other things. TargetExists: it is another store.
        StoreLocked, StoreIoError, NoSpace
    """
    path = whole_path(target)
    targets.require_outside(folder.root_fd, path)
    with closing_fd(open_or_make_root(path)) as root_fd:
        if not has_store_file(root_fd, path):
            require_creatable(root_fd, path, (MARKS_FILE,))
            with StoreLock(root_fd, path):
                create_store(root_fd, path, folder.uuid)
        elif (uuid_of_format_1(root_fd, path) or load_store_uuid(root_fd, path)) != folder.uuid:
            raise TargetExists(
                f"{path} is another store, and no backup of {folder.path}. Name a folder that is new or empty.",
                path=path,
            )
    return path


def copy_versions(core: StoreCore, into: StoreCore, on_progress: Progress | None = None) -> MaintenanceReport:
    """Write into the backup what it lacks. See `Store.backup`."""
    core.look_again()
    stripped = stripped_in(core.folder) or frozenset()
    rows = sorted(core.index.all_rows(), key=lambda row: (row.created_ns, row.uri, row.version))
    missing = [row for row in rows if _lacks(into, row, is_stripped=row.bundle_id in stripped)]
    others = _others(core, into, missing)
    missing = [row for row in missing if row.uri not in others]
    total = _require_room(core, into, missing)
    unread = [*core.read_again(), *findings_of_missing(core.folder, core.index.knows)]
    unread = [finding for finding in unread if not into.index.knows(id_in(finding.path))]
    run = MaintenanceRun(core, "backup", False, problems=[*unread, *others.values()])
    intake = Intake(into)
    for row in missing:
        size_bytes = _copy_and_tell(run, intake, row, is_stripped=row.bundle_id in stripped)
        if size_bytes:
            path = into.folder.manifest_path(row.bundle_id)
            run.bytes_written += size_bytes
            run.actions.append(Action("copy", path, row.session, row.version, size_bytes, "The backup lacks it."))
        if on_progress is not None:
            on_progress(min(run.bytes_written, total), total)
    run.bytes_written += _copy_marks(run, into)
    return run.report()


def _lacks(into: StoreCore, row: VersionInfo, *, is_stripped: bool) -> bool:
    """Whether the backup lacks a version's manifest, or one of its blocks."""
    if not into.index.knows(row.bundle_id):
        return True
    try:
        blocks = into.read_manifest(row.bundle_id).blocks
    except StoreError:
        return True
    return not all(into.index.packs_of(entry.id, stripped=is_stripped) for entry in blocks)


def _require_room(core: StoreCore, into: StoreCore, missing: Sequence[VersionInfo]) -> int:
    """The bytes that all these versions need in the backup. Raises NoSpace, before the first copy, if its disk has
    less."""
    needed: dict[bytes, int] = {}
    total = 0
    for row in missing:
        with contextlib.suppress(StoreError):
            manifest = core.read_manifest(row.bundle_id)
            total += len(encode_manifest_file(manifest.encode()))
            for entry in manifest.blocks:
                if entry.id not in needed and not into.index.packs_of(entry.id, stripped=True):
                    needed[entry.id] = _frame_bytes(core, entry)
    total += sum(needed.values())
    free = free_bytes_of(into.folder.packs_fd, into.path)
    if total > free:
        raise NoSpace(
            f"The backup needs {format_bytes(total)}, and the disk of {into.path} has {format_bytes(free)} left. "
            "Nothing was copied. Free some space there, or name a folder on another disk.",
            path=into.path,
            size_bytes=total,
            free_bytes=free,
        )
    return total


def _frame_bytes(core: StoreCore, entry: BlockEntry) -> int:
    for name in core.index.packs_of(entry.id, stripped=True):
        with contextlib.suppress(StoreError), core.files.holding(name) as file:
            frame = file.frames.get(entry.id) or file.heads.get(entry.id)
            if frame is not None:
                return frame.frame_bytes
    return 0


def _others(core: StoreCore, into: StoreCore, missing: Sequence[VersionInfo]) -> dict[SessionUri, Finding]:
    """The sessions that cannot be copied, with the reason: nothing could tell them from versions of that name in the
    backup alone."""
    of_session: dict[SessionUri, list[VersionInfo]] = {}
    for row in missing:
        of_session.setdefault(row.uri, []).append(row)
    return {uri: _refusal(into, uri) for uri, rows in of_session.items() if _has_another(core, into, uri, rows)}


def _has_another(core: StoreCore, into: StoreCore, uri: SessionUri, missing: Sequence[VersionInfo]) -> bool:
    """Whether the backup alone has a version with one of these numbers, or has a higher number than the store's newest
    version."""
    theirs_alone = [row for row in into.index.versions(uri) if not core.index.knows(row.bundle_id)]
    if {row.version for row in theirs_alone} & {row.version for row in missing}:
        return True
    ours, theirs = core.index.find(uri), into.index.find(uri)
    if ours is None or theirs is None or core.index.knows(theirs.bundle_id):
        return False
    return theirs.version > ours.version and theirs.created_ns < ours.created_ns


def _refusal(into: StoreCore, uri: SessionUri) -> Finding:
    message = (
        f"Nothing new of {uri} was copied: the backup has another session of that name, or versions in which it went "
        f"on in another way. Back up to another folder, or remove that session from this one (`torpor forget {uri} "
        f"--store {into.path}`) and run the backup again."
    )
    return Finding(into.path, NameTaken.code, message)


def _copy_and_tell(run: MaintenanceRun, intake: Intake, row: VersionInfo, *, is_stripped: bool) -> int:
    """Write one version into the backup; the bytes written, 0 if it was deleted meanwhile, or is not whole, which is
    told. Raises NoSpace, StoreIoError: the backup cannot be written."""
    core = run.core
    try:
        with core.open_reader(row.bundle_id) as reader:

            def source(entry: BlockEntry, checked: bool) -> AbstractContextManager[FrameReader]:
                return reader.holding(entry, checked=checked, stripped=is_stripped)

            return intake.take(reader.entries, lambda _: reader.manifest, source).bytes_written
    except BundleMissing as error:
        if core.still_known([row.bundle_id]):
            _tell_left_out(run, row, error)
    except (Corruption, LimitExceeded, UnsupportedFormat, UnsafePath) as error:
        _tell_left_out(run, row, error)
    except StoreIoError as error:  # a file that the system does not read in the store: the rest can still be copied
        if not str(error.details.get("path")).startswith(f"{core.path}/"):
            raise
        _tell_left_out(run, row, error)
    return 0


def _tell_left_out(run: MaintenanceRun, row: VersionInfo, error: StoreError) -> None:
    """Tell of each version that lacks a file which several need: the file alone does not say what is not copied."""
    path = run.core.folder.manifest_path(row.bundle_id)
    if error.details.get("path") == path:
        run.tell(path, error.code, sentence_of(error, path, row) if isinstance(error, BundleMissing) else error.message)
        return
    advice = "" if "torpor repair" in error.message else _REPAIR_FIRST
    message = f"Version {row.version} of {row.uri} is not in the backup: {error.message}{advice}"
    run.tell(str(error.details.get("path", path)), error.code, message)


def _copy_marks(run: MaintenanceRun, into: StoreCore) -> int:
    """Give the backup the marks of the versions that it has; the bytes written.

    The store's tags and pins come beside those of the backup. A version that both have is stripped there if it is
    stripped here or was there, and is not whole there. A strip of a version that the store does not know stays.
    """
    core = run.core
    try:
        marks = Marks.load(core.folder)
        present = Marks.load(into.folder)
        ours = marks.without_bundles(marks.bundle_ids - into.index.rows_of(marks.bundle_ids).keys())
        merged = present.with_those_of(ours)
        stripped = core.index.rows_of(present.stripped).keys() | ours.stripped
        whole = _whole_in(into, stripped)
        merged = merged.without_bundles(whole, names=False)
        merged = merged.strip({uri: of.stripped - whole for uri, of in ours.sessions.items()})
    except StoreError as error:
        run.fail(core.path, error)
        return 0
    with into.committing():
        return 0 if merged == present else merged.save(into.folder)


def _whole_in(into: StoreCore, bundle_ids: Iterable[str]) -> set[str]:
    """Those of the versions that the backup has with all their keys and values. Raises StoreIoError."""
    blocks: dict[str, list[bytes]] = {}
    for bundle_id in bundle_ids:
        with contextlib.suppress(StoreError):
            blocks[bundle_id] = [entry.id for entry in into.read_manifest(bundle_id).blocks]
    missing = into.missing_of({each for needed in blocks.values() for each in needed})  # one look for all of them
    return {bundle_id for bundle_id, needed in blocks.items() if missing.isdisjoint(needed)}
