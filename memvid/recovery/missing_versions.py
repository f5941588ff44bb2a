"""Versions that have no file under `bundles/`: which are missing, missed, set aside or deleted.

Rules:
- The row of a missing file stays: a wake then says so, and does not quietly give the version before; and its version
  number is not given again. If the file is retired, its session was deleted, and the row goes; unless the file also
  lies in quarantine as a version: then repair has set it aside, and retired the blocks that others need.
- If the newest version of a session is retired, all others without a file were deleted too. An index that is behind may
  lack versions, so the newest is the newest by any source.
- A version that only marks name is missed until its file is back, its session is deleted, or no mark names it any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence

from ..checking.scanning import ids_of, live_of, read_set_aside, readable_marks, row_in_marks
from ..checking.set_aside_versions import list_leaving
from ..errors import PUT_BACK, BundleMissing, NoSpace, StoreError, StoreIoError, UnsafePath
from ..folder.folder import StoreFolder
from ..format.records import Finding, IndexRow
from ..index.absent import AbsentNotes
from ..index.index import Index
from ..index.rows import ASIDE, MISSED, UNREADABLE, IndexedBundle
from ..index.unknown_references import lost_among, lost_note_finding
from ..uri import SessionUri


class Noted:
    """The notes of a store, read once, at the first question: a note that could not be read at that time is never
    removed. `left`: versions that are gone, though their notes may be there."""

    def __init__(self, folder: StoreFolder, left: Container[bytes] = ()) -> None:
        self.left = left
        self._notes = AbsentNotes(folder.root_fd, folder.path)
        self.path, self.path_of = self._notes.path, self._notes.path_of

    @functools.cached_property
    def _loaded(self) -> tuple[dict[bytes, IndexedBundle], dict[bytes, str]] | UnsafePath | StoreIoError:
        try:
            return self._notes.load()
        except (UnsafePath, StoreIoError) as error:
            return error

    def load(self) -> tuple[dict[bytes, IndexedBundle], dict[bytes, str]]:
        """As `AbsentNotes.load`."""
        if isinstance(self._loaded, StoreError):
            raise self._loaded
        return self._loaded


def read_notes(folder: StoreFolder, noted: Noted, told: Container[bytes]) -> list[IndexedBundle]:
    """The versions without a file that only notes tell of. Leaves out one without a mark that a cut-off delete has
    taken out of quarantine: it is gone. Raises UnsafePath, StoreIoError."""
    found = [one for each, one in noted.load()[0].items() if each not in told and each not in noted.left]
    leaving = list_leaving(folder) - ids_marked(folder) if found else set()
    return [one for one in found if one.bundle_id not in leaving]


def settle_notes(index: Index, files: Mapping[bytes, str], notes: Noted) -> list[Finding]:
    """Write the notes of versions without a file as their rows are, if the disk takes it; else the next opening tries
    again. Returns findings for unreadable notes of versions without a row. A private copy of an index changes nothing.

    Raises:
        DurabilityLost
    """
    try:
        noted, unread = notes.load()
    except (StoreIoError, UnsafePath) as error:
        return [Finding(notes.path, error.code, error.message)]
    lost = lost_among(index, unread)
    if index.notes is not None:
        wanted = index.given_up().keys() | index.rows_of(index.unsettled() - files.keys()).keys()
        rows = [one for one in map(index.stored, sorted(wanted)) if one is not None and one.row is not None]
        with contextlib.suppress(NoSpace, StoreIoError):
            index.notes.keep(one for one in rows if noted.get(one.bundle_id) != one)
        with contextlib.suppress(StoreIoError):
            drop_notes(index, {*noted, *unread} - wanted - lost)
    return [lost_note_finding(notes.path_of(one), unread[one]) for one in sorted(lost)]


def drop_notes(index: Index, bundle_ids: Iterable[bytes]) -> None:
    """Remove the notes of versions that are gone. If one stays, the index goes on in memory: its file may be all that
    tells the next opening of their end. Raises StoreIoError, DurabilityLost."""
    gone = set(bundle_ids)
    try:
        index.drop_notes(gone)
    except StoreIoError:
        index.go_on_in_memory()
        index.drop_notes(gone)


def ids_marked(folder: StoreFolder) -> frozenset[bytes]:
    marks = readable_marks(folder)
    return marks.bundle_ids if marks is not None else frozenset()


def find_missed(folder: StoreFolder, files: Mapping[bytes, str], entered: Iterable[bytes]) -> list[IndexedBundle]:
    """The versions that marks name and that have no file and no entry yet. A retired file says that its version was
    deleted."""
    marks = readable_marks(folder)
    found = marks.dangling({*files, *entered}) if marks is not None else ()
    return [
        IndexedBundle(bundle_id, MISSED, row_in_marks(marks, bundle_id), (), ())
        for _, bundle_id in found
        if not folder.has_bundle(bundle_id)  # one may have been published, and marked, since the folder was listed
    ]


def no_more_missed(folder: StoreFolder, missed: Mapping[bytes, IndexRow], files: Mapping[bytes, str]) -> set[bytes]:
    """Those of the missed versions that have a file again, even a retired one, or have no mark any more."""
    marks = readable_marks(folder) if missed else None
    marked = set(missed) if marks is None else {bundle_id for _, bundle_id in marks.dangling(())}
    return {bundle_id for bundle_id in missed if bundle_id in files or bundle_id not in marked}


def named_by_marks(folder: StoreFolder, files: Mapping[bytes, str], known: set[bytes]) -> list[IndexedBundle]:
    """The unknown versions that marks name: set aside, or missed. They include those deleted while the marks could not
    be read, for nothing else tells of these any more."""
    marks = readable_marks(folder)
    waiting = [
        one for one in read_set_aside(folder, known | live_of(files)) if marks is not None and marks.of(one.bundle_id)
    ]
    return [*waiting, *find_missed(folder, files, known | ids_of(waiting))]


def without_files(folder: StoreFolder, unreadable: Sequence[IndexedBundle]) -> list[IndexedBundle]:
    """The new status of unreadable bundles without a file: missed with a mark, else set aside. Their needs stay
    unknown."""
    marks = readable_marks(folder) if unreadable else None
    return [
        dataclasses.replace(one, status=MISSED if marks is not None and marks.of(one.bundle_id) else ASIDE)
        for one in unreadable
    ]


def find_missing(folder: StoreFolder, rows: Iterable[IndexRow]) -> list[Finding]:
    """Versions without a file, by a second look: one may have been published since the folder was listed."""
    return [missing_finding(folder, row) for row in rows if not folder.has_bundle(row.bundle_id)]


def missing_finding(folder: StoreFolder, row: IndexRow) -> Finding:
    path = folder.bundle_path(row.bundle_id)
    message = f"{path} is missing: version {row.version} of {row.uri} cannot be woken. {PUT_BACK}"
    return Finding(path, BundleMissing.code, message)


def deleted_sessions(
    folder: StoreFolder,
    index: Index,
    retired: Iterable[IndexRow],
    files: Mapping[bytes, str],
    found: Iterable[IndexedBundle],
) -> set[SessionUri]:
    """The sessions whose newest version is retired: if a delete was cut off, it was of all versions.

    The index may be behind, so versions without a row count too: `found` files under bundles/, even unreadable ones,
    and those that only quarantine or marks tell of. Beside a file of unknown session the answer is unknown.
    """
    newest: dict[SessionUri, int] = {}
    for row in retired:
        listed = index.find(row.uri)
        if listed is not None and listed.version <= row.version:
            newest[row.uri] = row.version
    if not newest:
        return set()
    known = index.bundle_ids()
    others = [one for one in found if one.status != UNREADABLE or one.bundle_id not in known]
    if any(one.row is None for one in others):
        return set()
    try:
        others += read_set_aside(folder, known | files.keys())
    except (UnsafePath, StoreIoError):
        return set()
    others += find_missed(folder, files, known | ids_of(others))
    standing = [one.row for one in others if one.row is not None]
    return newest.keys() - {row.uri for row in standing if row.version > newest.get(row.uri, row.version)}


def of_sessions(uris: Container[SessionUri], rows: Mapping[bytes, IndexRow]) -> set[bytes]:
    return {bundle_id for bundle_id, row in rows.items() if row.uri in uris}


def but_for(bundle_ids: Container[bytes], rows: Mapping[bytes, IndexRow]) -> list[IndexRow]:
    return [row for bundle_id, row in rows.items() if bundle_id not in bundle_ids]
