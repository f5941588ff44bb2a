"""A backup: the versions of a store in a folder that is a store itself, of the same uuid, and can take its place.

Owns the backup's place, the choice of versions, and the steps. Works beside a daemon that writes.

How it works: a version never changes, only the files with its blocks. Copying those files would hold up compactions, so
each missing version is written there as by a sleep, with the blocks that the backup lacks, and read back. Each is there
whole or not at all, and a backup that was cut off goes on where it was.

Rules:
- Nothing in the store is written, and no request waits for it.
- Nothing goes from the backup, marks included: a version deleted in the store stays there. If the backup's own versions
  of a session would collide with new ones, or come after them, that session is reported and left as it is.
- Unreadable versions are reported, and the rest is copied. A damaged version never replaces one of the backup.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Final

from ..disk import targets
from ..disk.lock import StoreLock
from ..disk.paths import closing_fd
from ..disk.room import free_bytes_of
from ..errors import (
    BlockMissing,
    BundleMissing,
    CorruptBundle,
    NameTaken,
    NoSpace,
    StoreError,
    StoreIoError,
    TargetExists,
)
from ..folder import duplicate_files
from ..folder.folder import StoreFolder
from ..folder.marks import Marks
from ..folder.store_file import create_store, has_store_file, load_store_uuid, open_or_make_root, require_creatable
from ..format.reader import BundleReader
from ..format.records import Finding, IndexRow, MaintenanceReport, Progress
from ..format.writer import BundleWriter
from ..index.rows import LIVE, IndexedBundle, row_of
from ..units import format_bytes
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.sleeping import Holdings, publish

_TRIES: Final = 8
"""How often a version is read again because a compaction moved its blocks meanwhile."""


def claim(folder: StoreFolder, target: str | os.PathLike[str]) -> str:
    """Make a new or empty folder a backup of this store, or check that it is one; its path.

    Raises:
        UnsafePath: it lies in the store. NotAStore: it holds other things. TargetExists: it is another store.
        StoreLocked, StoreIoError, NoSpace
    """
    path = os.path.abspath(os.fspath(target))
    targets.require_outside(folder.root_fd, path)
    with closing_fd(open_or_make_root(path)) as root_fd:
        if not has_store_file(root_fd, path):
            require_creatable(root_fd, path)
            with StoreLock(root_fd, path):
                create_store(root_fd, path, folder.uuid)
        elif load_store_uuid(root_fd, path) != folder.uuid:
            raise TargetExists(
                f"{path} is another store, and no backup of {folder.path}. Name a folder that is new or empty.",
                path=path,
            )
    return path


def copy_versions(core: StoreCore, into: StoreCore, on_progress: Progress | None = None) -> MaintenanceReport:
    """Write into the backup what it lacks. See `Store.backup`."""
    rows = sorted(core.index.all_rows(), key=lambda row: (row.created_ns, row.uri, row.version))
    present = into.index.rows_of(row.bundle_id for row in rows)
    missing = [row for row in rows if row.bundle_id not in present]
    others = _others(core, into, missing)
    missing = [row for row in missing if row.uri not in others]
    total = _require_room(core, into, missing)
    run = MaintenanceRun(core, "backup", False, problems=list(others.values()))
    sound: dict[bytes, bytes] = {}
    for row in missing:
        path = into.folder.bundle_path(row.bundle_id)
        try:
            size_bytes = _copy(core, into, row, sound)
        except (StoreIoError, NoSpace):
            raise
        except StoreError as error:
            run.tell(core.folder.bundle_path(row.bundle_id), error.code, error.message)
            continue
        if size_bytes:
            run.bytes_written += size_bytes
            run.did("copy", path, size_bytes, "the backup has not had it", row)
        if on_progress is not None:
            on_progress(min(run.bytes_written, total), total)
    with contextlib.suppress(BundleMissing):
        run.bytes_written += _copy_marks(run, into)
    return run.report()


def _require_room(core: StoreCore, into: StoreCore, missing: Sequence[IndexRow]) -> int:
    """The bytes that all these versions need in the backup. Raises NoSpace, before the first copy, if its disk has
    less."""
    needed: dict[bytes, int] = {}
    total = 0
    for row in missing:
        with contextlib.suppress(StoreError), core.open_bundle(row.bundle_id) as file:
            total += file.file_bytes - file.trailer.manifest_offset
            for entry in file.entries:
                frame = file.frames.get(entry.id)
                if frame is not None or entry.id not in needed:
                    needed[entry.id] = frame.frame_bytes if frame is not None else entry.raw_bytes
    total += sum(size_bytes for block_id, size_bytes in needed.items() if not into.index.holders_of(block_id))
    free = free_bytes_of(into.folder.bundles_fd, into.path)
    if total > free:
        raise NoSpace(
            f"The backup needs {format_bytes(total)}, and the disk of {into.path} has {format_bytes(free)} left. "
            "Nothing was copied. Free some space there, or name a folder on another disk.",
            path=into.path,
            size_bytes=total,
            free_bytes=free,
        )
    return total


def _others(core: StoreCore, into: StoreCore, missing: Sequence[IndexRow]) -> dict[SessionUri, Finding]:
    """The sessions that cannot be copied, with the reason: nothing could tell them from versions of that name in the
    backup alone."""
    of_session: dict[SessionUri, list[IndexRow]] = {}
    for row in missing:
        of_session.setdefault(row.uri, []).append(row)
    return {uri: _refusal(into, uri) for uri, rows in of_session.items() if _has_another(core, into, uri, rows)}


def _has_another(core: StoreCore, into: StoreCore, uri: SessionUri, missing: Sequence[IndexRow]) -> bool:
    """Whether the backup alone has a version with one of these numbers, or has a higher number than the store's newest
    version."""
    numbered = (one for row in missing for one in into.index.bundles_numbered(uri, row.version))
    if any(not core.index.knows(bundle_id) for bundle_id in numbered):
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


def _copy(core: StoreCore, into: StoreCore, row: IndexRow, sound: dict[bytes, bytes]) -> int:
    """Write one version into the backup; the bytes of its file, 0 if it was deleted meanwhile. sound: for each file of
    the backup, the blocks read or written in this run; this adds to it."""
    if into.index.knows(row.bundle_id) and row.bundle_id not in {*into.index.missed(), *into.index.given_up()}:
        path = into.folder.bundle_path(row.bundle_id)
        raise CorruptBundle(
            f"The backup has {path} already and cannot read it. Run `torpor repair --store {into.path}`.",
            path=path,
            part="file",
        )
    for last in (*[False] * (_TRIES - 1), True):
        try:
            with core.open_reader(row.bundle_id) as reader:
                return _write(into, reader, sound)
        except (BundleMissing, BlockMissing):
            if not core.promised([row.bundle_id]):
                return 0
            if last:
                raise
    raise AssertionError("the loop returns or raises")


def _write(into: StoreCore, reader: BundleReader, sound: dict[bytes, bytes]) -> int:
    manifest = reader.manifest
    with contextlib.ExitStack() as stack:
        pin = stack.enter_context(into.pinning())
        holdings = stack.enter_context(Holdings(into, pin))
        stack.enter_context(into.poisoning())
        temp = stack.enter_context(into.folder.temps.new())
        writer = BundleWriter(temp)
        places: dict[bytes, bytes] = {}
        for entry in reader.entries:
            holder = sound.get(entry.id) or holdings.find_sound(entry.id)
            if holder is not None:
                sound[entry.id] = places[entry.id] = holder
                continue
            with reader.holding(entry) as file:
                file.check_block(entry.id)
                writer.add_copy(file, entry.id)
        directory = writer.finish(manifest.encode(), manifest.blocks, reader.bundle_id, places)
        row = row_of(manifest, reader.bundle_id, temp.size_bytes)
        publish(into, temp, IndexedBundle(reader.bundle_id, LIVE, row, directory.holders, tuple(writer.frames)))
        with into.committing():
            duplicate_files.remove_redundant(into.folder, [reader.bundle_id])
        sound.update(dict.fromkeys(writer.frames, reader.bundle_id))
        return temp.size_bytes


def _copy_marks(run: MaintenanceRun, into: StoreCore) -> int:
    """Tags and pins of the versions in the backup, beside those that it alone has; the bytes written."""
    core = run.core
    try:
        marks = Marks.load(core.folder)
        present = Marks.load(into.folder)
        ours = marks.without_bundles(marks.bundle_ids - into.index.rows_of(marks.bundle_ids).keys())
        wanted = present.without_bundles(filter(core.index.knows, present.bundle_ids)).with_those_of(ours)
    except StoreError as error:
        run.fail(core.path, error)
        return 0
    with into.committing():
        return 0 if wanted == present else wanted.save(into.folder)
