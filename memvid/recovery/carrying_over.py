"""Carries a store of format 1 over, once: its first opening to write. No key or value is copied.

In format 1 a version was one file, `bundles/ab/ID.mvb`, with its manifest and frames. Its manifest becomes a file of
its own; `bundles/` stays as a second folder of packs. What that store kept elsewhere comes in or goes:

    quarantine/ID.mvb.N   a version that repair had moved: it comes in, as what lies in bundles/
    quarantine/ID.mvr.N   blocks for others, and ID.mvd.N, of a version that was being deleted: their frames come in
    absent/ID.json        a note of a version without a file: it is missing, as the index then tells
    group.json            sessions that were to count together: they stay, as sessions of their own
    marks.json            its tags and pins

Rules:
- Under the lock. Each step may be cut off and done again, with the same result. store.json of version 2 is the point
  of no return: until then an older Torpor opens the store as it is, and may change it; so each run begins with what is
  in `bundles/`, and marks and notes stay as they are.
- The marks become marks of version 2 once store.json is on the disk. So beside them, as beside a pack in `packs`, a
  store.json of version 1 is one that was put back by hand, and `bundles/` tells no more which versions there are.
- What is damaged is told, and stays. A damaged manifest of a version, or a damaged note of one, is a damaged manifest
  in `versions/`, too; the note, and a bundle that one of quarantine takes the place of, goes to `damaged/`. A bundle
  that its disk does not give is damaged; any other read that fails ends the run, and the next opening tries again.
- Two bundles for one version of a session are two versions with one number: `torpor verify` tells what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ..answers import Finding, VersionInfo
from ..disk import durable
from ..disk.paths import (
    closing_fd,
    list_names,
    open_file,
    open_folder,
    opened_folder,
    plain_status,
    read_small,
    undoing,
)
from ..disk.sealed_json import reason_of
from ..errors import (
    PUT_BACK,
    BundleMismatch,
    BundleMissing,
    CorruptBundle,
    Corruption,
    CorruptJournal,
    LimitExceeded,
    StoreError,
    StoreIoError,
    UnsupportedFormat,
)
from ..folder.damaged import move_aside
from ..folder.folder import StoreFolder, id_in, manifest_name
from ..folder.journal import Journal
from ..folder.marks import MARKS_FILE, encode_marks, uuid_in_marks, write_marks
from ..folder.store_file import (
    BUNDLES,
    DAMAGED,
    STORE_FILE,
    create_folders,
    has_own_packs,
    uuid_of_format_1,
    write_store_file,
)
from ..format.manifest import encode_manifest_file
from ..index.index import INDEX_FILE, Index
from ..limits import MAX_MARKS_BYTES, MAX_NOTE_BYTES
from .format_1 import (
    LEFTOVERS,
    MALFORMED,
    MOVED_NAME,
    NOTE_NAME,
    NOTES,
    QUARANTINE,
    OldVersion,
    damaged_manifest,
    decode_note,
    decode_old_marks,
    encode_no_old_marks,
    is_marked,
    read_version,
)

_LIVE: Final = ".mvb"
_BLOCKS: Final = ".mvr"


def carry_over(root_fd: int, path: str) -> tuple[Finding, ...]:
    """Make a store of format 1 one of format 2; what could not come in whole. Call it under the store's lock, and then
    `finish`.

    Raises:
        NoSpace, StoreIoError, UnsafePath, DurabilityLost: open it again, and it goes on.
    """
    store_uuid = uuid_of_format_1(root_fd, path)
    assert store_uuid is not None
    create_folders(root_fd, path)
    durable.make_folder(root_fd, BUNDLES, path)
    with undoing(partial(os.close, own_fd := open_folder(root_fd, ".", path))):
        folder = StoreFolder(path, own_fd, store_uuid)
    with contextlib.closing(folder):
        return _Carrying(folder).run()


def finish(root_fd: int, path: str, store_uuid: str) -> None:
    """What follows store.json: the marks become those of version 2, then what nothing reads any more goes. Each opening
    to write calls it, for a run may have been cut off there; without `bundles` there is nothing to do.

    Raises:
        NoSpace, StoreIoError, UnsafePath, DurabilityLost
    """
    if BUNDLES not in list_names(root_fd, path):
        return
    with contextlib.suppress(FileNotFoundError):
        _renew_marks(root_fd, path, store_uuid)
    with contextlib.suppress(FileNotFoundError), opened_folder(root_fd, NOTES, f"{path}/{NOTES}") as fd:
        _remove(fd, f"{path}/{NOTES}", NOTE_NAME.fullmatch)
    _remove(root_fd, path, LEFTOVERS.fullmatch)
    for name in (NOTES, QUARANTINE):
        _remove_folder(root_fd, name, path)


def _renew_marks(root_fd: int, path: str, store_uuid: str) -> None:
    """Make marks of version 1 those of version 2; others stay. Raises FileNotFoundError, and as `finish`."""
    data = read_small(root_fd, MARKS_FILE, MAX_MARKS_BYTES, f"{path}/{MARKS_FILE}")
    try:
        marks = decode_old_marks(data, store_uuid, f"{path}/{MARKS_FILE}")
    except MALFORMED:
        return
    durable.sync_folder(root_fd, path)  # store.json first, also if the run was cut off before its flush
    write_marks(root_fd, path, encode_marks(marks))


def manifest_in_bundle(folder: StoreFolder, bundle_id: str) -> bytes | None:
    """The manifest in a version's own bundle; None without one, or if it cannot be read."""
    try:
        fd, path = folder.open_name(_bundle_name(bundle_id + _LIVE))
        with closing_fd(fd):
            version = read_version(fd, path)
    except StoreError:
        return None
    return version.encoded if version.bundle_id == bundle_id else None


@dataclass(slots=True)
class _Carrying:
    """One run.

    versions: the bundles in `bundles/` that become versions, by id.
    damaged: the versions that get a damaged manifest, by id, each with what there is of it. Its bundle's manifest or
        its note is damaged, or another bundle has its name.
    misnamed: the files that hold another bundle than their name says: their paths, by the id in the name.
    missing: the versions of which there is a note alone.
    """

    folder: StoreFolder
    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, OldVersion] = field(default_factory=dict)
    damaged: dict[str, bytes] = field(default_factory=dict)
    misnamed: dict[str, str] = field(default_factory=dict)
    missing: list[VersionInfo] = field(default_factory=list)

    def run(self) -> tuple[Finding, ...]:
        folder = self.folder
        folder.remove_leftovers()
        if not self._is_done():
            self._carry()
        write_store_file(folder.root_fd, folder.path, folder.uuid, replacing=True)
        return tuple(self.findings)

    def _is_done(self) -> bool:
        """Whether the store was one of format 2 already: then an older store.json was put back."""
        root_fd, path = self.folder.root_fd, self.folder.path
        return has_own_packs(root_fd, path) or uuid_in_marks(root_fd, path) == self.folder.uuid

    def _carry(self) -> None:
        self._mark_for_the_first_time()
        self._look_at_bundles()
        self._take_in_quarantine()
        self._look_at_misnamed()
        self._remove_unfinished()
        self._look_at_notes()
        self._write_manifests()
        self._drop_deleted_turns()
        self._write_index()

    def _tell(self, path: str, error: StoreError) -> None:
        self.findings.append(Finding.of(path, error))

    # --- what lies in bundles/

    def _look_at_bundles(self) -> None:
        for name in sorted(self.folder.list_packs()):
            if name.endswith(_LIVE):
                self._look_at_bundle(name)

    def _look_at_bundle(self, name: str) -> None:
        path = self.folder.path_of(name)
        try:
            fd, _ = self.folder.open_name(name)
        except BundleMissing:
            return
        with closing_fd(fd):
            try:
                version = read_version(fd, path)
            except StoreError as error:
                _require_damage(error)
                self._tell(path, error)
                self.damaged[id_in(name)] = damaged_manifest(fd, path)
                return
        if version.bundle_id != id_in(name):
            self.misnamed[id_in(name)] = path
        self.versions[version.bundle_id] = version

    def _look_at_misnamed(self) -> None:
        """A bundle under another one's name counts by its content. The one that should be there is missing, unless its
        content is elsewhere."""
        for bundle_id, path in sorted(self.misnamed.items()):
            if bundle_id not in self.versions:
                message = f"{path} holds another bundle than its name says. {PUT_BACK}"
                self.findings.append(Finding(path, BundleMismatch.code, message))
                self.damaged[bundle_id] = b""

    def _remove_unfinished(self) -> None:
        """Remove unfinished files, and those that a delete on a full disk has emptied."""
        folder = self.folder
        path = folder.path_of(BUNDLES)
        with opened_folder(folder.root_fd, BUNDLES, path) as fd:
            _remove(fd, path, durable.TEMP_NAME.fullmatch)
        for name in sorted(folder.list_packs()):
            if name.endswith(_BLOCKS) and (status := folder.status_of(name)) is not None and not status.st_size:
                folder.remove(name)
                folder.flush([name])

    # --- quarantine

    def _take_in_quarantine(self) -> None:
        folder = self.folder
        path = folder.path_of(QUARANTINE)
        with contextlib.suppress(FileNotFoundError), opened_folder(folder.root_fd, QUARANTINE, path) as fd:
            names = [name for name in list_names(fd, path) if plain_status(fd, name)]
            matches = [match for match in map(MOVED_NAME.fullmatch, names) if match]
            for match in sorted(matches, key=lambda match: (match[2], -int(match[3]), match[1])):  # the newest first
                with contextlib.suppress(FileNotFoundError):
                    self._take_in(fd, match[0], match[1], is_version=match[2] == _LIVE)
            for name in names:
                if name.startswith(("marks.json.", "store.json.")):
                    move_aside(folder.root_fd, folder.path, fd, name, path)

    def _take_in(self, fd: int, name: str, bundle_id: str, *, is_version: bool) -> None:
        """One file of quarantine: into bundles/ as a version, or as frames, as what is another copy of a version: its
        frames may be better. Into damaged/ if its name is taken; but a damaged bundle gives way to it."""
        is_version = is_version and bundle_id not in self.versions
        target = _bundle_name(bundle_id + (_LIVE if is_version else _BLOCKS))
        if is_version and bundle_id in self.damaged:
            self.folder.move_to_damaged(target)
        if not self._move_in(fd, name, target):
            move_aside(self.folder.root_fd, self.folder.path, fd, name, self.folder.path_of(QUARANTINE))
        elif is_version:
            self._look_at_bundle(target)

    def _move_in(self, fd: int, name: str, target: str) -> bool:
        """Durably move a file of quarantine into bundles/, if that name is free."""
        folder, (_, prefix, new) = self.folder, target.split("/")
        if folder.has(target):
            return False
        with opened_folder(folder.root_fd, BUNDLES, folder.path_of(BUNDLES)) as bundles_fd:
            durable.make_folder(bundles_fd, prefix, folder.path_of(BUNDLES))
            with opened_folder(bundles_fd, prefix, folder.path_of(f"{BUNDLES}/{prefix}")) as to_fd:
                to_path = folder.path_of(f"{BUNDLES}/{prefix}")
                durable.move(fd, name, folder.path_of(QUARANTINE), to_fd, new, to_path)
        return True

    # --- manifests

    def _write_manifests(self) -> None:
        """Each version gets its manifest; the manifest of one that is no longer there moves to damaged/. A damaged one
        is a file, too: so it is told of, may be replaced by a right one, and no pack goes that it may need."""
        folder = self.folder
        wanted = dict(self.damaged)
        wanted |= {bundle_id: encode_manifest_file(one.encoded) for bundle_id, one in self.versions.items()}
        for bundle_id in sorted(folder.list_versions() - wanted.keys()):
            folder.move_to_damaged(manifest_name(bundle_id))
        for bundle_id, data in sorted(wanted.items()):
            folder.write_manifest(bundle_id, data)

    # --- the journal

    def _drop_deleted_turns(self) -> None:
        """A delete that was cut off had taken the session's last version, and not yet its turns."""
        claimed = {version.manifest.uri for version in self.versions.values()}
        with Journal.load(self.folder, writable=True) as journal:
            for uri in journal.uris():
                with contextlib.suppress(StoreIoError, CorruptJournal):
                    record = journal.find(uri)
                    newest = record.newest[1] if record is not None and record.newest is not None else None
                    if newest is None or uri in claimed:
                        continue
                    if self.folder.has(_bundle_name(newest + _BLOCKS)):
                        journal.drop(uri)

    # --- notes

    def _look_at_notes(self) -> None:
        """Versions without a file. One of which the note is damaged is a damaged version: its id is all that is known,
        and no pack goes that it may need."""
        folder, path = self.folder, self.folder.path_of(NOTES)
        claimed = {(version.manifest.uri, version.manifest.version) for version in self.versions.values()}
        with contextlib.suppress(FileNotFoundError), opened_folder(folder.root_fd, NOTES, path) as fd:
            for match in filter(None, map(NOTE_NAME.fullmatch, list_names(fd, path))):
                if (bundle_id := match[1]) in self.versions:
                    continue
                own = f"{path}/{match[0]}"
                data = read_small(fd, match[0], MAX_NOTE_BYTES, own)
                try:
                    row = decode_note(data, bundle_id)
                except MALFORMED as error:
                    kept = self._keep_in_damaged(match[0], data)
                    message = (
                        f"{own} told of a missing version, and is damaged: {reason_of(error)}. It moves to {kept}."
                    )
                    self.findings.append(Finding(own, CorruptBundle.code, message))
                    self.damaged.setdefault(bundle_id, b"")
                    continue
                if (row.uri, row.version) not in claimed:
                    self.missing.append(row)

    # --- the index

    def _write_index(self) -> None:
        """A new one, which tells of the missing versions. What an earlier run has written may tell of some that an
        older Torpor has deleted since."""
        folder = self.folder
        _remove(folder.root_fd, folder.path, INDEX_FILE.__eq__)
        if self.missing:
            with contextlib.closing(Index(folder.path)) as index:
                index.add_all(self.missing)
                index.save(folder, always=True)
                self._require_saved(index)

    def _require_saved(self, index: Index) -> None:
        """The index's file is on the disk: the notes will go, and nothing else tells of these versions."""
        found, _ = Index.load(self.folder)
        with found:
            if found.bundle_ids() != index.bundle_ids():
                path = self.folder.path_of(INDEX_FILE)
                raise StoreIoError(f"{path} cannot be written.", path=path, action="write", errno=0)
        with _opened(self.folder.root_fd, INDEX_FILE, index.path) as fd:
            durable.sync_file(fd, index.path)
        durable.sync_folder(self.folder.root_fd, self.folder.path)

    # --- marks

    def _mark_for_the_first_time(self) -> None:
        """A store that never had marks gets a file without one, of version 1, as an older Torpor makes it. Of a store
        that had some they are lost, and stay so until somebody marks anew."""
        folder, path = self.folder, self.folder.path_of(STORE_FILE)
        if MARKS_FILE in list_names(folder.root_fd, folder.path):
            return
        if not is_marked(read_small(folder.root_fd, STORE_FILE, 4096, path), path):
            write_marks(folder.root_fd, folder.path, encode_no_old_marks(folder.uuid))

    def _keep_in_damaged(self, name: str, data: bytes) -> str:
        """Write a file into damaged/, unless it is there; its path."""
        folder, path = self.folder, self.folder.path_of(DAMAGED)
        durable.make_folder(folder.root_fd, DAMAGED, folder.path)
        with opened_folder(folder.root_fd, DAMAGED, path) as fd:
            if name not in list_names(fd, path):
                durable.write_file(fd, name, data, path)
        return f"{path}/{name}"


def _bundle_name(name: str) -> str:
    """The name of a bundle's file, relative to the store."""
    return f"{BUNDLES}/{name[:2]}/{name}"


@contextlib.contextmanager
def _opened(folder_fd: int, name: str, path: str) -> Iterator[int]:
    """A file, open for the block. Raises FileNotFoundError, UnsafePath, StoreIoError."""
    with closing_fd(open_file(folder_fd, name, os.O_RDONLY, path)) as fd:
        yield fd


def _require_damage(error: StoreError) -> None:
    """Raise an error that may be another one the next time: nothing is given up for it."""
    if (
        not isinstance(error, Corruption | LimitExceeded | UnsupportedFormat)
        and error.details.get("errno") != errno.EIO
    ):
        raise error


def _remove(folder_fd: int, path: str, is_meant: Callable[[str], object]) -> None:
    """Durably remove the plain files of a folder whose names are meant."""
    names = [name for name in list_names(folder_fd, path) if is_meant(name) and plain_status(folder_fd, name)]
    for name in names:
        durable.remove(folder_fd, name, path)
    if names:
        durable.sync_folder(folder_fd, path)


def _remove_folder(root_fd: int, name: str, path: str) -> None:
    """Durably remove a folder, if nothing of somebody else's is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=root_fd)
        durable.sync_folder(root_fd, path)
