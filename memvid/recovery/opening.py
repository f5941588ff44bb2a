"""Brings index and bundle files into agreement when a store is opened. Bundles are the truth.

Owns the choice to use an index, mend it or make it anew, and the removal of leftovers.

Rules:
- An unreadable bundle is read again, and reported, at each opening. If its file is gone, it is set aside or missed,
  with unknown needs, and reported until it is back or given up.
- A row is believed for the file with the stamp in it. Any other file is read again (a backup was put back, or the store
  copied while it was written), and until that succeeds its needs are unknown.
- A bundle is read again if its file was being rewritten, or was missing: its blocks may have moved.
- Each opening asks the marks, for an index may be behind.
- The checks of all bundles use bare ids; a row is read only for those that need a look.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..checking.scanning import (
    Scan,
    enter_unreadable,
    ids_of,
    live_of,
    read_again,
    read_bundles,
    readable_marks,
    without_rivals,
)
from ..checking.set_aside_versions import list_leaving, set_aside_among, settle_leaving
from ..disk.paths import undoing
from ..errors import StoreError, StoreIoError, UnsafePath
from ..folder import duplicate_files
from ..folder.folder import StoreFolder
from ..folder.journal import Journal
from ..folder.pins import Pins
from ..format.layout import RETIRED_SUFFIX
from ..format.records import Finding, IndexRow, OpenReport
from ..index.index import Index
from ..index.rows import ASIDE, LIVE, SHADOWED, UNREADABLE, IndexedBundle
from ..index.schema import IndexUnusable
from ..index.unknown_references import find_told
from ..uri import SessionUri
from ..writing.deletion import give_ending, remove_unneeded, unmark_without_files
from .missing_versions import (
    Noted,
    but_for,
    deleted_sessions,
    drop_notes,
    find_missing,
    ids_marked,
    named_by_marks,
    no_more_missed,
    of_sessions,
    read_notes,
    settle_notes,
    without_files,
)
from .reindexing import make_anew
from .replaying import drop_deleted


def load_index(folder: StoreFolder, journal: Journal, *, writable: bool) -> tuple[Index, OpenReport]:
    """Open the store's index, in agreement with its bundle files; a read-only one lives in memory.

    Raises:
        UnsafePath, NoSpace, StoreIoError, DurabilityLost
    """
    leftovers = folder.temps.remove_all() if writable else 0
    files, both = folder.list_with_twins()
    if writable:  # leftovers of an import or a repair that was cut off
        leftovers += duplicate_files.remove_redundant(folder, both)
    noted = Noted(folder)
    try:
        index, report = _open_and_reconcile(folder, files, noted, writable)
    except IndexUnusable as reason:
        index, report = make_anew(folder, files, noted, writable, reason)
    findings = list(report.unreadable)
    with undoing(index.close):
        findings += settle_notes(index, files, noted)
        if writable:
            with contextlib.suppress(UnsafePath, StoreIoError):  # the next opening, or a repair, tries again
                settle_leaving(folder, index)
            drop_deleted(journal, index, files)
            remove_unneeded(folder, index, Pins(), files)
    if writable:
        retired = {bundle_id for bundle_id, suffix in files.items() if suffix == RETIRED_SUFFIX}
        leftovers += len(retired - folder.list_bundles().keys()) if retired else 0
    return index, dataclasses.replace(report, leftovers_removed=leftovers, unreadable=tuple(findings))


def _open_and_reconcile(
    folder: StoreFolder, files: Mapping[bytes, str], noted: Noted, writable: bool
) -> tuple[Index, OpenReport]:
    opener = Index.open if writable else Index.copy_to_memory
    index = opener(folder.path, folder.root_fd, folder.uuid)
    with undoing(index.close):
        return index, _reconcile(folder, index, files, noted, writable=writable)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The index beside the files. live: the bundles with a live file. known: the bundles with a row, except those set
    aside or missed. unread: unreadable bundles. absent: rows of versions without a file. retired: rows of versions with
    only a retired file."""

    live: set[bytes]
    entered: set[bytes]
    known: set[bytes]
    unread: set[bytes]
    unsettled: set[bytes]
    missed: Mapping[bytes, IndexRow]
    given_up: Mapping[bytes, IndexRow]
    absent: Mapping[bytes, IndexRow]
    retired: set[bytes]
    rows_of_retired: Mapping[bytes, IndexRow]

    @classmethod
    def of(cls, index: Index, files: Mapping[bytes, str]) -> _Seen:
        live = live_of(files)
        with _believed():
            entered, unread, unsettled = index.bundle_ids(), set(index.with_status(UNREADABLE)), index.unsettled()
            missed, given_up = index.missed(), index.given_up()
            known = entered - given_up.keys() - missed.keys()
            absent = index.rows_of(known - files.keys())
            retired = known & files.keys() - live
            rows = index.rows_of(retired)
        return cls(live, entered, known, unread, unsettled, missed, given_up, absent, retired, rows)


@dataclass(frozen=True, slots=True)
class _Deleted:
    """The deleted versions without a file, by the index."""

    absent: set[bytes]
    aside: set[bytes]
    missed: set[bytes]


def _reconcile(
    folder: StoreFolder, index: Index, files: Mapping[bytes, str], notes: Noted, *, writable: bool
) -> OpenReport:
    seen = _Seen.of(index, files)
    live, known, aside = seen.live, seen.known, set(seen.given_up)
    set_aside = set_aside_among(folder, seen.rows_of_retired)
    scan = read_bundles(folder, (live - known) | (live & seen.unread))  # with versions that were set aside and are back
    noted = _noted(folder, index, scan, notes, seen.entered - seen.missed.keys())  # it tells more than a mark
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in aside | ids_of(noted)]
    unreadable = enter_unreadable(folder, scan, index)
    deleted = _deleted(folder, index, files, seen, set_aside, [*scan.bundles, *unreadable, *noted])
    noted = [one for one in noted if one.bundle_id not in deleted.missed]
    retired = seen.retired - set_aside | deleted.absent
    if writable:
        unmark_without_files(folder, deleted.absent | deleted.aside | deleted.missed)
        drop_notes(index, deleted.absent | deleted.aside)
    left = give_ending(folder, deleted.aside, RETIRED_SUFFIX) if writable and deleted.aside else []
    gone = known - files.keys() - seen.absent.keys()
    vanished = _vanished(folder, index, sorted(gone & seen.unread))
    gone -= {bundle.bundle_id for bundle in vanished}
    back = aside.intersection(bundle.bundle_id for bundle in scan.bundles)
    stamps = folder.stamps_of(live & known - seen.unread)
    with _believed():
        others = index.of_other_files(stamps)
    again = read_again(folder, stamps.keys() & (seen.unsettled | others))
    with _believed():
        corrected = sum(_is_told_otherwise(index, one) for one in again.bundles if one.bundle_id not in seen.unsettled)
        rivals = [rival for rival in (_rival(index, bundle) for bundle in scan.bundles) if rival is not None]
    told = _told_by_marks(folder, files, seen.entered | ids_of(noted))
    missing = seen.absent.keys() - retired
    told_missing = {one.bundle_id: one.row for one in noted if one.status == LIVE and one.row is not None}
    found = no_more_missed(folder, seen.missed, files) | deleted.missed | seen.missed.keys() & ids_of(noted)
    added, shadowed = _added(scan, [rival for rival in rivals if rival.bundle_id not in retired | set_aside])
    added += [*unreadable, *vanished, *noted, *(told or ())]
    dropped = retired | gone | seen.unread | back | found | deleted.aside
    unsettled, unproven = missing - seen.unsettled | told_missing.keys(), others.intersection(again.unread)
    marks_seen = told is not None and index.marks_unseen()
    if any((added, dropped, shadowed, set_aside, again.bundles, unsettled, unproven, marks_seen)):
        index.reconcile(
            added,
            dropped,
            shadowed=shadowed,
            aside=set_aside,
            settled=again.bundles,
            unsettled=unsettled,
            unproven=unproven,
            marks_seen=marks_seen,
        )
    lacking = find_missing(folder, [*(seen.absent[one] for one in sorted(missing)), *told_missing.values()])
    findings = _with_unknown(folder, index, [*left, *scan.findings, *again.findings, *lacking])
    rows_added = len(live - known - aside) + len(back)
    return OpenReport(None, rows_added, len(gone), 0, tuple(findings), rows_corrected=corrected)


def _noted(folder: StoreFolder, index: Index, scan: Scan, notes: Noted, entered: set[bytes]) -> list[IndexedBundle]:
    """The versions that only notes tell of, because the index is behind; set aside if another version has their number
    by now. None if the notes cannot be read: then the index alone is believed."""
    try:
        found = read_notes(folder, notes, entered | ids_of(scan.bundles))
    except (UnsafePath, StoreIoError):
        return []
    with _believed():
        given = set(map(_claims, scan.bundles))
        return [
            dataclasses.replace(one, status=ASIDE) if _claims(one) in given or _rival(index, one) else one
            for one in found
        ]


def _claims(bundle: IndexedBundle) -> tuple[SessionUri, int] | None:
    return (bundle.row.uri, bundle.row.version) if bundle.row is not None else None


def _deleted(
    folder: StoreFolder,
    index: Index,
    files: Mapping[bytes, str],
    seen: _Seen,
    set_aside: set[bytes],
    found: Iterable[IndexedBundle],
) -> _Deleted:
    absent_aside = {one: row for one, row in seen.given_up.items() if one not in seen.live}
    with _believed():
        sessions = deleted_sessions(folder, index, but_for(set_aside, seen.rows_of_retired), files, found)
        deleted = _Deleted(
            of_sessions(sessions, seen.absent), of_sessions(sessions, absent_aside), of_sessions(sessions, seen.missed)
        )
    if absent_aside:
        with contextlib.suppress(UnsafePath, StoreIoError):  # then it is unknown, and they stay
            deleted.aside.update((absent_aside.keys() & list_leaving(folder)) - ids_marked(folder))
    return deleted


def _with_unknown(folder: StoreFolder, index: Index, findings: list[Finding]) -> list[Finding]:
    """With the bundles of unknown needs, unless they are reported already."""
    with _believed():
        unknown = find_told(folder, index)
    paths = {finding.path for finding in findings}
    return findings + [finding for finding in unknown if finding.path not in paths]


def _is_told_otherwise(index: Index, bundle: IndexedBundle) -> bool:
    stored = index.stored(bundle.bundle_id)
    return stored is None or stored.storage != bundle.storage


@contextlib.contextmanager
def _believed() -> Iterator[None]:
    """Questions to an index that was believed so far; one without an answer ends that."""
    try:
        yield
    except StoreError as error:
        raise IndexUnusable(error.message) from error


def _added(scan: Scan, rivals: Sequence[IndexedBundle]) -> tuple[list[IndexedBundle], set[bytes]]:
    """The rows for bundles just read. `rivals` have rows already: those that lose their version to one of these only
    change status, and are the second value."""
    present = {rival.bundle_id for rival in rivals}
    added, shadowed = [], set()
    for bundle in without_rivals({one.bundle_id: one for one in (*rivals, *scan.bundles)}.values()):
        if bundle.bundle_id not in present:
            added.append(bundle)
        elif bundle.status == SHADOWED:
            shadowed.add(bundle.bundle_id)
    return added, shadowed


def _vanished(folder: StoreFolder, index: Index, bundle_ids: Sequence[bytes]) -> list[IndexedBundle]:
    """The new status of unreadable bundles without a file but with a known owner: missed with a mark, else set aside.
    Their numbers stay taken."""
    with _believed():
        known = [one for one in map(index.stored, bundle_ids) if one is not None and one.row is not None]
    return without_files(folder, known)


def _told_by_marks(folder: StoreFolder, files: Mapping[bytes, str], entered: set[bytes]) -> list[IndexedBundle] | None:
    """The versions that only marks tell of: the index was made without them, or is behind. None if the marks cannot be
    read."""
    marks = readable_marks(folder)
    if marks is None:
        return None
    unknown = [one for one in marks.bundle_ids if one not in files and one not in entered]
    return named_by_marks(folder, files, entered) if unknown else []


def _rival(index: Index, bundle: IndexedBundle) -> IndexedBundle | None:
    """The bundle in the index for the version that another bundle claims."""
    row = index.find(bundle.row.uri, bundle.row.version) if bundle.row else None
    return None if row is None or row.bundle_id == bundle.bundle_id else IndexedBundle(row.bundle_id, LIVE, row, (), ())
