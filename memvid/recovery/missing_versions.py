"""Versions that have no file under `bundles/`: which are missing, missed, set aside or deleted.

Rules:
- A row whose file is missing stays: a wake then says so, instead of quietly giving the version before, and its version
  number is not given again. Only a row whose file is retired goes: its session was deleted. But where the file lies in
  quarantine as a version, repair has set that aside, and what is retired is what others need of it.
- Of a session whose newest version is retired all others without a file were deleted too. An index that is behind lacks
  versions, so newest is meant of all that anything tells of.
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
    """What the notes of a store tell. They are read once, when that is first asked for: no note is removed that could
    not be read when it was decided which versions there are."""

    def __init__(self, folder: StoreFolder) -> None:
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
    """The versions without a file that notes tell of, but for those that are told of already. One that a cut off delete
    has taken out of quarantine, and that has no mark, is gone. Raises UnsafePath, StoreIoError."""
    found = [one for bundle_id, one in noted.load()[0].items() if bundle_id not in told]
    leaving = list_leaving(folder) - ids_marked(folder) if found else set()
    return [one for one in found if one.bundle_id not in leaving]


def settle_notes(index: Index, files: Mapping[bytes, str], notes: Noted) -> list[Finding]:
    """Let the notes say what the rows of versions without a file say, where the disk takes it: else the next opening
    tries again. What is to be told of those that cannot be read, and of which no row tells either. A private copy of an
    index changes nothing.

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
            index.notes.drop(sorted({*noted, *unread} - wanted - lost))
    return [lost_note_finding(notes.path_of(one), unread[one]) for one in sorted(lost)]


def ids_marked(folder: StoreFolder) -> frozenset[bytes]:
    marks = readable_marks(folder)
    return marks.bundle_ids if marks is not None else frozenset()


def find_missed(folder: StoreFolder, files: Mapping[bytes, str], entered: Iterable[bytes]) -> list[IndexedBundle]:
    """The versions that marks name and that are nowhere, neither as a file nor among what is entered already. A retired
    file says that its version was deleted."""
    marks = readable_marks(folder)
    found = marks.dangling({*files, *entered}) if marks is not None else ()
    return [
        IndexedBundle(bundle_id, MISSED, row_in_marks(marks, bundle_id), (), ())
        for _, bundle_id in found
        if not folder.has_bundle(bundle_id)  # one may have been published, and marked, since the folder was listed
    ]


def no_more_missed(folder: StoreFolder, missed: Mapping[bytes, IndexRow], files: Mapping[bytes, str]) -> set[bytes]:
    """Those of the missed versions that have a file again, even a retired one, or that no mark names any more."""
    marks = readable_marks(folder) if missed else None
    marked = set(missed) if marks is None else {bundle_id for _, bundle_id in marks.dangling(())}
    return {bundle_id for bundle_id in missed if bundle_id in files or bundle_id not in marked}


def named_by_marks(folder: StoreFolder, files: Mapping[bytes, str], known: set[bytes]) -> list[IndexedBundle]:
    """The versions that marks name and that are not known: set aside, or missed. What was deleted while the marks could
    not be read is among them, for nothing else tells of it any more."""
    marks = readable_marks(folder)
    waiting = [
        one for one in read_set_aside(folder, known | live_of(files)) if marks is not None and marks.of(one.bundle_id)
    ]
    return [*waiting, *find_missed(folder, files, known | ids_of(waiting))]


def without_files(folder: StoreFolder, unreadable: Sequence[IndexedBundle]) -> list[IndexedBundle]:
    """What becomes of bundles that could not be read and have no file any more: one that has a mark is missed, any
    other is set aside. What they need stays unknown."""
    marks = readable_marks(folder) if unreadable else None
    return [
        dataclasses.replace(one, status=MISSED if marks is not None and marks.of(one.bundle_id) else ASIDE)
        for one in unreadable
    ]


def find_missing(folder: StoreFolder, rows: Iterable[IndexRow]) -> list[Finding]:
    """Versions whose file is not there, by a second look: one may have been published since the folder was listed."""
    return [missing_finding(folder, row) for row in rows if not folder.has_bundle(row.bundle_id)]


def missing_finding(folder: StoreFolder, row: IndexRow) -> Finding:
    """What to tell of a version whose file is not there."""
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
    """The sessions whose newest version is retired, so that a delete of all of it was cut off, if it was.

    The index may be behind. So what it has no row for counts too: `found`, files under bundles/, also those that cannot
    be read, and what only quarantine or marks tell of. Beside a file that may be of any session it is unknown.
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
