"""Brings index and bundle files into agreement when a store is opened, or when it is asked to. Bundles are the truth.

Owns the decision whether an index can be used, mended or must be made anew, and the removal of leftovers.

Rules:
- A row whose file is missing stays: a wake then says so, instead of quietly giving the version before, and its version
  number is not given again. Only a row whose file is retired goes: its session was deleted. But where the file lies in
  quarantine as a version, repair has set that aside, and what is retired is what others need of it.
- A bundle that cannot be read is read again at each opening, and reported at each. Its number is given to no other:
  it is learnt from its manifest, wherever in the file that stands, or from its marks. Where its file is gone it is set
  aside or missed; it is reported, and what it needs stays unknown, until it is back or given up.
- An index that cannot be used for its age still tells of versions without a file: they are taken over, with all that
  they may need by now.
- An index made anew of nothing else has no rows of missing files, and one that is behind lacks versions, but marks name
  bundles: one that is nowhere is missed, and reported at each opening until its file is back, its session is deleted,
  or no mark names it any more. One whose file lies in quarantine was set aside. Each opening asks the marks. Where they
  could not be read when the index was made anew, it says so until one has.
- Nor does an index made anew know what was deleted. So a whole bundle that lies under another one's name and nowhere
  else (files were swapped, or came back under wrong names) is entered as set aside: a repair takes what no row knows
  for deleted. A bundle that cannot be read is learnt from a file that is it as a whole, and from quarantine, too.
- A bundle whose file was being rewritten, or was missing, is read again: where its blocks lie may have changed. Until
  that succeeds the index covers what the file needed before and after.
- A failure of the system (too many open files, an input/output error) says nothing about a bundle: it is tried again,
  then raised.
- What is asked of every bundle at an opening is asked of bare ids; a row is read for those that need a look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from . import quarantine, twins
from .bundle import BundleFile
from .deletion import let_go, remove_unneeded, unmark_deleted, unmark_without_files
from .errors import BundleMismatch, BundleMissing, NoSpace, StoreError, StoreIoError, UnsafePath
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX, StoreFolder
from .index import (
    ASIDE,
    LIVE,
    MISSED,
    SHADOWED,
    UNREADABLE,
    Index,
    IndexContradicted,
    IndexedBundle,
    IndexUnusable,
    indexed,
    row_of,
)
from .marks import Marks
from .paths import Stamp
from .pins import Pins
from .records import Action, Finding, IndexRow, OpenReport
from .salvage import NamedFile
from .unknown_needs import find_told, missed_finding, untold_finding
from .uri import SessionUri
from .waiting import list_leaving, list_waiting, set_aside_among, settle_leaving

_T = TypeVar("_T")


Readings = dict[bytes, tuple[IndexedBundle, Stamp]]
"""Bundles as they were read, each with what tells whether its file is still the same."""


@dataclass(slots=True)
class _Scan:
    """Bundles read for the index, those that could not be read, and why. `misnamed`: what lies whole under the names of
    those, by what it is."""

    bundles: list[IndexedBundle] = field(default_factory=list)
    misnamed: dict[bytes, IndexedBundle] = field(default_factory=dict)
    unread: list[bytes] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Changes:
    """What `Index.reconcile` is asked for."""

    added: list[IndexedBundle]
    dropped: set[bytes]
    shadowed: set[bytes]
    aside: set[bytes]
    settled: list[IndexedBundle]
    unsettled: set[bytes]

    def __bool__(self) -> bool:
        return bool(self.added or self.dropped or self.shadowed or self.aside or self.settled or self.unsettled)


@dataclass(frozen=True, slots=True)
class _Contents:
    """What an index that is made anew holds. `kept` are those of the bundles that only the old one told of: they are
    read again at the next opening. `marks_unseen`: what marks tell is not among them, for they could not be read."""

    bundles: list[IndexedBundle]
    kept: list[IndexedBundle]
    written: Mapping[int, int]
    marks_unseen: bool

    @property
    def unsettled(self) -> list[bytes]:
        return [bundle.bundle_id for bundle in self.kept]


def load_index(folder: StoreFolder, *, writable: bool) -> tuple[Index, OpenReport]:
    """Open the store's index, in agreement with its bundle files; a read-only one lives in memory.

    Raises:
        UnsafePath, NoSpace, StoreIoError, DurabilityLost
    """
    leftovers = folder.remove_temps() if writable else 0
    files, both = folder.list_with_twins()
    if writable:  # of an import or a repair that was cut off
        leftovers += twins.remove_redundant(folder, both)
    try:
        index, report = _open_and_reconcile(folder, files, writable)
    except IndexUnusable as reason:
        index, report = _make_anew(folder, files, writable, reason)
    if writable:
        try:
            with contextlib.suppress(UnsafePath, StoreIoError):  # the next opening, or a repair, tries again
                settle_leaving(folder, index)
            remove_unneeded(folder, index, Pins(), files)
        except BaseException:
            index.close()
            raise
        retired = {bundle_id for bundle_id, suffix in files.items() if suffix == RETIRED_SUFFIX}
        leftovers += len(retired - folder.list_bundles().keys()) if retired else 0
    return index, dataclasses.replace(report, leftovers_removed=leftovers)


# --- an index that can be used


def _open_and_reconcile(folder: StoreFolder, files: Mapping[bytes, str], writable: bool) -> tuple[Index, OpenReport]:
    opener = Index.open if writable else Index.copy_to_memory
    index = opener(folder.path, folder.root_fd, folder.uuid)
    try:
        return index, _reconcile(folder, index, files, writable=writable)
    except BaseException:
        index.close()
        raise


def _reconcile(folder: StoreFolder, index: Index, files: Mapping[bytes, str], *, writable: bool) -> OpenReport:
    live = _live(files)
    with _believed():
        entered, unread, unsettled = index.bundle_ids(), set(index.with_status(UNREADABLE)), index.unsettled()
        missed, given_up = index.missed(), index.given_up()
        aside = set(given_up)
        known = entered - aside - missed.keys()
        absent = index.rows_of(known - files.keys())
        retired = known & files.keys() - live
        rows_of_retired = index.rows_of(retired)
    set_aside = set_aside_among(folder, rows_of_retired)
    retired -= set_aside
    scan = _read_bundles(folder, (live - known) | (live & unread))  # with what was set aside and is put back
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in aside]
    unreadable = _unreadable(folder, scan, index)
    with _believed():
        gone_with = _deleted_sessions(
            folder, index, _but_for(set_aside, rows_of_retired), files, [*scan.bundles, *unreadable]
        )
        deleted_absent = _of_sessions(gone_with, absent)
        absent_aside = {one: row for one, row in given_up.items() if one not in live}
        deleted_aside = _of_sessions(gone_with, absent_aside)
        deleted_missed = _of_sessions(gone_with, missed)
    retired |= deleted_absent
    if absent_aside:
        with contextlib.suppress(UnsafePath, StoreIoError):  # then nobody knows, and they stay
            deleted_aside |= (absent_aside.keys() & list_leaving(folder)) - _marked(folder)
    if writable:
        unmark_without_files(folder, deleted_absent | deleted_aside | deleted_missed)
    left = let_go(folder, deleted_aside) if writable and deleted_aside else []
    gone = known - files.keys() - absent.keys()
    vanished = _vanished(folder, index, sorted(gone & unread))
    gone -= {bundle.bundle_id for bundle in vanished}
    back = aside.intersection(bundle.bundle_id for bundle in scan.bundles)
    again = _read_bundles(folder, live & unsettled & known - unread)
    with _believed():
        rivals = [rival for rival in (_rival(index, bundle) for bundle in scan.bundles) if rival is not None]
    rivals = [rival for rival in rivals if rival.bundle_id not in retired | set_aside]
    told = _told_by_marks(folder, files, entered)
    marks_seen = told is not None and index.marks_unseen()
    missing = absent.keys() - retired
    found = _no_more_missed(folder, missed, files) | deleted_missed
    changes = _changes(
        scan,
        rivals,
        [*unreadable, *vanished, *(told or ())],
        dropped=retired | gone | unread | back | found | deleted_aside,
        aside=set_aside,
        settled=again.bundles,
        unsettled=missing - unsettled,
    )
    if changes or marks_seen:
        index.reconcile(
            changes.added,
            changes.dropped,
            shadowed=changes.shadowed,
            aside=changes.aside,
            settled=changes.settled,
            unsettled=changes.unsettled,
            marks_seen=marks_seen,
        )
    findings = [*left, *scan.findings, *again.findings, *_missing(folder, [absent[one] for one in sorted(missing)])]
    with _believed():
        unknown = find_told(folder, index)
    paths = {finding.path for finding in findings}
    findings += [finding for finding in unknown if finding.path not in paths]
    return OpenReport(None, len(live - known - aside) + len(back), len(gone), 0, tuple(findings))


@contextlib.contextmanager
def _believed() -> Iterator[None]:
    """Questions to an index that has been believed so far: one that it cannot answer ends that."""
    try:
        yield
    except StoreError as error:
        raise IndexUnusable(error.message) from error


def _changes(
    scan: _Scan,
    rivals: Iterable[IndexedBundle],
    others: Iterable[IndexedBundle],
    *,
    dropped: set[bytes],
    aside: set[bytes],
    settled: list[IndexedBundle],
    unsettled: set[bytes],
) -> _Changes:
    """`rivals` have rows already; of those that lose their version to a bundle just read, only the status changes.
    `others` are entered as they are."""
    present = {rival.bundle_id for rival in rivals}
    added, shadowed = [], set()
    for bundle in _without_rivals({one.bundle_id: one for one in (*rivals, *scan.bundles)}.values()):
        if bundle.bundle_id not in present:
            added.append(bundle)
        elif bundle.status == SHADOWED:
            shadowed.add(bundle.bundle_id)
    added += others
    return _Changes(added, dropped, shadowed, aside, settled, unsettled)


def _live(files: Mapping[bytes, str]) -> set[bytes]:
    return {bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX}


def _but_for(bundle_ids: Container[bytes], rows: Mapping[bytes, IndexRow]) -> list[IndexRow]:
    return [row for bundle_id, row in rows.items() if bundle_id not in bundle_ids]


def _deleted_sessions(
    folder: StoreFolder,
    index: Index,
    retired: Iterable[IndexRow],
    files: Mapping[bytes, str],
    found: Iterable[IndexedBundle],
) -> set[SessionUri]:
    """The sessions whose newest version is retired, so that a delete of all of it was cut off, if it was.

    The index may be behind. So what it has no row of counts too: `found`, files under bundles/, be it that they cannot
    be read, and what only quarantine or marks tell of. Beside a file that may be of any session nobody can tell.
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
        others += _set_aside(folder, known | files.keys())
    except (UnsafePath, StoreIoError):
        return set()
    others += _missed(folder, files, known | _ids_of(others))
    standing = [one.row for one in others if one.row is not None]
    return newest.keys() - {row.uri for row in standing if row.version > newest.get(row.uri, row.version)}


def _of_sessions(uris: Container[SessionUri], rows: Mapping[bytes, IndexRow]) -> set[bytes]:
    return {bundle_id for bundle_id, row in rows.items() if row.uri in uris}


def _missing(folder: StoreFolder, rows: Iterable[IndexRow]) -> list[Finding]:
    """Versions whose file is not there, by a second look: one may have been published since the folder was listed."""
    return [missing_finding(folder, row) for row in rows if not folder.has_bundle(row.bundle_id)]


def missing_finding(folder: StoreFolder, row: IndexRow) -> Finding:
    """What to tell of a version whose file is not there."""
    path = folder.bundle_path(row.bundle_id)
    message = (
        f"{path} is missing: version {row.version} of {row.uri} cannot be woken. Put the file back from a "
        "backup; without one, `torpor repair` saves what is left."
    )
    return Finding(path, BundleMissing.code, message)


def _vanished(folder: StoreFolder, index: Index, bundle_ids: Sequence[bytes]) -> list[IndexedBundle]:
    """What becomes of bundles that could not be read and have no file any more, where it is known whose versions they
    are, for their numbers stay their own: one that has a mark is missed, any other is set aside."""
    with _believed():
        known = [one for one in map(index.stored, bundle_ids) if one is not None and one.row is not None]
    return _without_files(folder, known)


def _without_files(folder: StoreFolder, unreadable: Sequence[IndexedBundle]) -> list[IndexedBundle]:
    """What `_vanished` makes of the bundles. What they need stays unknown."""
    marks = _marks(folder) if unreadable else None
    return [
        dataclasses.replace(one, status=MISSED if marks is not None and marks.of(one.bundle_id) else ASIDE)
        for one in unreadable
    ]


def _no_more_missed(folder: StoreFolder, missed: Mapping[bytes, IndexRow], files: Mapping[bytes, str]) -> set[bytes]:
    """Those of the missed versions that have a file again, be it a retired one, or that no mark names any more."""
    marks = _marks(folder) if missed else None
    marked = set(missed) if marks is None else {bundle_id for _, bundle_id in marks.dangling(())}
    return {bundle_id for bundle_id in missed if bundle_id in files or bundle_id not in marked}


def _marks(folder: StoreFolder) -> Marks | None:
    """The store's marks; None where they cannot be read, which verify and repair tell of."""
    try:
        return Marks.load(folder)
    except StoreError:
        return None


def _marked(folder: StoreFolder) -> frozenset[bytes]:
    marks = _marks(folder)
    return marks.bundle_ids if marks is not None else frozenset()


def _told_by_marks(folder: StoreFolder, files: Mapping[bytes, str], entered: set[bytes]) -> list[IndexedBundle] | None:
    """What marks tell of and neither the index nor a file: it was made without them, or is behind. None where they
    cannot be read."""
    marks = _marks(folder)
    if marks is None:
        return None
    unknown = [one for one in marks.bundle_ids if one not in files and one not in entered]
    return _named_by_marks(folder, files, entered) if unknown else []


def _named_by_marks(folder: StoreFolder, files: Mapping[bytes, str], known: set[bytes]) -> list[IndexedBundle]:
    """The versions that marks name and that are not known: set aside, or missed. What was deleted while the marks could
    not be read is among them, for nothing else tells of it any more."""
    marks = _marks(folder)
    waiting = [one for one in _set_aside(folder, known | _live(files)) if marks is not None and marks.of(one.bundle_id)]
    return [*waiting, *_missed(folder, files, known | _ids_of(waiting))]


def _missed(folder: StoreFolder, files: Mapping[bytes, str], entered: Iterable[bytes]) -> list[IndexedBundle]:
    """The versions that marks name and that are nowhere, neither as a file nor among what is entered already. A retired
    file says that its version was deleted."""
    marks = _marks(folder)
    found = marks.dangling({*files, *entered}) if marks is not None else ()
    return [
        IndexedBundle(bundle_id, MISSED, _row_in_marks(marks, bundle_id), (), ())
        for _, bundle_id in found
        if not folder.has_bundle(bundle_id)  # one may have been published, and marked, since the folder was listed
    ]


def _row_in_marks(marks: Marks | None, bundle_id: bytes) -> IndexRow | None:
    """What marks tell of a version: whose it is, and its number."""
    owner = marks.owner_of(bundle_id) if marks is not None else None
    return None if owner is None else IndexRow(*owner, bundle_id, None, bytes(32), 0, 0, 0, 0, "", ())


def _rival(index: Index, bundle: IndexedBundle) -> IndexedBundle | None:
    """The bundle that the index has for the version that another bundle claims."""
    row = index.find(bundle.row.uri, bundle.row.version) if bundle.row else None
    return None if row is None or row.bundle_id == bundle.bundle_id else IndexedBundle(row.bundle_id, LIVE, row, (), ())


# --- a new index


def read_ahead(folder: StoreFolder) -> Readings:
    """Read every live bundle as it is now, before the store's lock is taken: what is the same file still when `rebuild`
    asks for it need not be read again. What cannot be read is left to that one to say."""
    readings: Readings = {}
    for bundle_id in sorted(_live(folder.list_bundles())):
        with contextlib.suppress(StoreError):
            readings[bundle_id] = _read_bundle(folder, bundle_id)
    return readings


def rebuild(folder: StoreFolder, index: Index, ahead: Readings | None = None) -> OpenReport:
    """Make the index of an open store anew from its bundles. The same object goes on with the new file.

    The versions whose files are missing or cannot be read are taken over from the old rows, as far as those can be
    read, and so are the bytes written each day: no bundle tells them. Everything is read before the old file goes; a
    crash after that leaves a file that is not ours, so the next open makes it again.

    Raises:
        StoreIoError, DurabilityLost: nothing has changed where a bundle could not be read for a failure of the system.
    """
    files = folder.list_bundles()
    scan = _read_bundles(folder, _live(files), ahead)
    contents = _going_on(folder, index, files, scan)
    missed = set(_answer(index.missed) or ())
    with index.replaced() as go_on_with:
        try:
            fresh, why = _made(folder, contents)
        except BaseException:  # a flush failed: nothing more is written, but reads go on
            go_on_with(_in_memory(folder, contents))
            raise
        go_on_with(fresh)
    if ended := missed - _ids_of(contents.bundles):
        unmark_deleted(folder, index, ended)
    reason = f"it was asked for{why}"
    findings = (*scan.findings, *_lacking(folder, files, scan, contents))
    return OpenReport(reason, len(scan.bundles) + len(scan.unread), 0, 0, findings)


def plan_rebuild(
    folder: StoreFolder, index: Index, ahead: Readings | None = None
) -> tuple[list[Action], list[Finding]]:
    """What `rebuild` would change, and what it could not read. Changes nothing."""
    files = folder.list_bundles()
    scan = _read_bundles(folder, _live(files), ahead)
    contents = _going_on(folder, index, files, scan)
    wanted = {bundle.bundle_id: bundle for bundle in contents.bundles}
    actions = []
    for bundle_id in sorted(wanted.keys() | (_answer(index.bundle_ids) or set())):
        present, problem = _stored(index, bundle_id)
        reason = problem or _difference(present, wanted.get(bundle_id))
        row = next((one.row for one in (wanted.get(bundle_id), present) if one is not None and one.row), None)
        if reason:
            actions.append(
                Action(
                    kind="index",
                    path=folder.bundle_path(bundle_id, files.get(bundle_id, LIVE_SUFFIX)),
                    session=row.uri if row else None,
                    version=row.version if row else None,
                    size_bytes=0,
                    reason=reason,
                )
            )
    return actions, [*scan.findings, *_lacking(folder, files, scan, contents)]


def _going_on(folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: _Scan) -> _Contents:
    """What an index holds that takes the place of one that is there."""
    kept = _taken_over(folder, index, files, scan)
    bundles = _entered_anew(folder, index, files, scan, kept)
    return _Contents(bundles, kept, _answer(index.written) or {}, _leaves_marks_unseen(folder, index))


def _lacking(folder: StoreFolder, files: Mapping[bytes, str], scan: _Scan, contents: _Contents) -> list[Finding]:
    """The versions without a file, and those of which nobody knows what they need."""
    missing = _missing(folder, _rows_without_files(contents.kept, files))
    return [*missing, *_told(folder, contents.bundles, scan)]


def _entered_anew(
    folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: _Scan, kept: Collection[IndexedBundle]
) -> list[IndexedBundle]:
    """What takes the place of an index that is there: it knows which versions are missed, for what it has no row of was
    deleted. Only where it cannot say are the marks asked."""
    entered = _as_entered(folder, scan, kept, index)
    missed = _answer(index.missed)
    if missed is None:
        return [*entered, *_missed(folder, files, _ids_of(entered))]
    retired = _answer(lambda: index.rows_of(files.keys() - _live(files))) or {}
    rows = _but_for(set_aside_among(folder, retired), retired)
    others = [one for one in entered if one.bundle_id in files]
    deleted = _answer(lambda: _deleted_sessions(folder, index, rows, files, others)) or set()
    found = _no_more_missed(folder, missed, files) | _of_sessions(deleted, missed)
    entered += [IndexedBundle(one, MISSED, row, (), ()) for one, row in missed.items() if one not in found]
    if _answer(index.marks_unseen):
        entered += _named_by_marks(folder, files, _ids_of(entered))
    return entered


def _ids_of(bundles: Iterable[IndexedBundle]) -> set[bytes]:
    return {bundle.bundle_id for bundle in bundles}


def _leaves_marks_unseen(folder: StoreFolder, index: Index | None) -> bool:
    """Whether an index that takes the place of this one, or of none, lacks what marks tell that cannot be read now."""
    knows = index is not None and _answer(index.missed) is not None and _answer(index.marks_unseen) is False
    return not knows and _marks(folder) is None


def _told(folder: StoreFolder, bundles: Iterable[IndexedBundle], scan: _Scan) -> list[Finding]:
    """As `find_told`, of an index that holds these bundles; what the scan could not read has been told."""
    read = {finding.path for finding in scan.findings}
    found = []
    for bundle in bundles:
        path = folder.bundle_path(bundle.bundle_id)
        if bundle.row is not None and bundle.status == MISSED:
            found.append(missed_finding(path, bundle.row))
        elif bundle.row is not None and bundle.status == ASIDE and not (bundle.refs or bundle.blocks or path in read):
            found.append(untold_finding(path, bundle.row))
    return found


def _stored(index: Index, bundle_id: bytes) -> tuple[IndexedBundle | None, str]:
    try:
        return index.stored(bundle_id), ""
    except StoreError as error:
        return None, f"the index cannot say what it knows of it: {error.details.get('reason', error.message)}"


def _difference(present: IndexedBundle | None, wanted: IndexedBundle | None) -> str:
    """What the index says otherwise than a bundle's file; "" if nothing."""
    if present is None or wanted is None:
        return "the index lacks it" if present is None else "the index has a row for it, and no version has such a file"
    blocks = {block[:8] for block in wanted.blocks}
    differing = [
        name
        for name, same in (
            ("status", present.status == wanted.status),
            ("facts", present.row == wanted.row),
            ("references", set(present.refs) == set(wanted.refs)),
            ("blocks", set(present.blocks) == blocks),
        )
        if not same
    ]
    return f"the index has another {' and '.join(differing)} for it" if differing else ""


def _taken_over(folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: _Scan) -> list[IndexedBundle]:
    """What the index alone knows: versions whose files are missing, with no delete cut off behind them, or unreadable,
    or that were set aside.

    Takes those out of what the scan could not read: an index made anew would forget whose they are.
    """
    known = _answer(index.bundle_ids) or set()
    aside = _answer(lambda: index.with_status(ASIDE))
    read = {bundle.bundle_id for bundle in scan.bundles}
    asked = known - files.keys() | known.intersection(scan.unread) | set(aside or ()) - read
    found = (_stored(index, bundle_id)[0] for bundle_id in sorted(asked))
    told = [one for one in found if one is not None and one.row is not None]
    kept = {one.bundle_id: one for one in told if one.status in (LIVE, ASIDE)}
    vanished = [one for one in told if one.status == UNREADABLE and one.bundle_id not in files]
    kept |= {one.bundle_id: one for one in _without_files(folder, vanished)}
    if aside is None:
        kept |= {one.bundle_id: one for one in _set_aside(folder, read)}
        kept |= {one.bundle_id: one for one in _misnamed(folder, files, scan, kept)}
    retired = _answer(lambda: index.rows_of(known & files.keys() - _live(files))) or {}
    left = set_aside_among(folder, retired)
    for one in filter(None, (_stored(index, bundle_id)[0] for bundle_id in left)):
        kept.setdefault(one.bundle_id, dataclasses.replace(one, status=ASIDE))
    others = [*scan.bundles, *_unreadable(folder, scan, index)]
    sessions = _answer(lambda: _deleted_sessions(folder, index, _but_for(left, retired), files, others)) or set()
    absent = [*_rows_without_files(kept.values(), files), *(one.row for one in vanished if one.row is not None)]
    deleted = {row.bundle_id for row in absent if row.uri in sessions}
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in kept]
    return [bundle for bundle in kept.values() if bundle.bundle_id not in deleted]


def _rows_without_files(bundles: Iterable[IndexedBundle], files: Mapping[bytes, str]) -> list[IndexRow]:
    return [
        bundle.row
        for bundle in bundles
        if bundle.row is not None and bundle.status == LIVE and bundle.bundle_id not in files
    ]


def _answer(ask: Callable[[], _T]) -> _T | None:
    """The answer of an index that may be damaged: what it cannot say is not taken over."""
    try:
        return ask()
    except StoreError:
        return None


def _make_anew(
    folder: StoreFolder, files: Mapping[bytes, str], writable: bool, why: IndexUnusable
) -> tuple[Index, OpenReport]:
    """An index from the bundles, and from what the one that could not be used says for all that: the system may have
    refused a call, and no bundle tells of versions without a file."""
    live = _live(files)
    scan = _read_bundles(folder, live)
    is_believed = not isinstance(why, IndexContradicted)
    old = Index.copy_of_current(folder.path, folder.root_fd, folder.uuid) if is_believed else None
    stale = _stale_copy(folder) if old is None else None
    if old is not None:
        with contextlib.closing(old):
            contents = _going_on(folder, old, files, scan)
    else:
        with contextlib.closing(stale) if stale is not None else contextlib.nullcontext():
            contents = _beginning_anew(folder, stale, files, scan)
    reason = str(why)
    if writable:
        index, where = _made(folder, contents)
        reason += where
    else:
        index = Index.create_in_memory(folder.path, folder.uuid, contents.bundles)
    findings = (*scan.findings, *_lacking(folder, files, scan, contents))
    return index, OpenReport(reason, len(live), 0, 0, findings)


def _misnamed(
    folder: StoreFolder, files: Mapping[bytes, str], scan: _Scan, entered: Collection[bytes]
) -> list[IndexedBundle]:
    """What lies whole under other ones' names, and under its own neither in its place nor, which says that it was
    deleted, as a retired file: set aside, until a repair gives it its own."""
    found = scan.misnamed.keys() - files.keys() - set(entered)
    found -= list_leaving(folder) if found else set()
    return [scan.misnamed[bundle_id] for bundle_id in sorted(found)]


def _look_into_retired(folder: StoreFolder, files: Mapping[bytes, str], scan: _Scan) -> None:
    """Note what lies whole under the names of deleted versions: what no row knows is removed with those."""
    for bundle_id in sorted(files.keys() - _live(files)):
        other = _by_content(functools.partial(folder.open_as, bundle_id, RETIRED_SUFFIX))
        if other is not None and other.bundle_id != bundle_id:
            scan.misnamed.setdefault(other.bundle_id, other)


def _stale_copy(folder: StoreFolder) -> Index | None:
    """A private copy of an index that is ours and sound, but older than the last rewrite or contradicted."""
    try:
        return Index.copy_to_memory(folder.path, folder.root_fd, folder.uuid)
    except (IndexUnusable, StoreIoError):
        return None


def _beginning_anew(folder: StoreFolder, stale: Index | None, files: Mapping[bytes, str], scan: _Scan) -> _Contents:
    """What an index holds that is made from bundles, quarantine and marks, and of a stale one from the versions without
    a file, of which nothing else tells."""
    _look_into_retired(folder, files, scan)
    aside = _set_aside(folder, _live(files))
    waiting = [*aside, *_misnamed(folder, files, scan, _ids_of(aside))]
    told = _only_told(folder, stale, files, scan, waiting) if stale is not None else []
    kept = [one for one in told if one.status == LIVE]
    bundles = _as_entered(folder, scan, [*waiting, *told], stale)
    bundles += _missed(folder, files, _ids_of(bundles))
    return _Contents(bundles, kept, {}, _leaves_marks_unseen(folder, None))


def _only_told(
    folder: StoreFolder, stale: Index, files: Mapping[bytes, str], scan: _Scan, waiting: Iterable[IndexedBundle]
) -> list[IndexedBundle]:
    """The versions without a file of which a stale index tells, with all that they may need. One that was deleted since
    is among them where nothing is left that says so: rather that than one that was lost and is forgotten."""
    unread = list(scan.unread)
    kept = {one.bundle_id: one for one in _taken_over(folder, stale, files, scan)}
    scan.unread = unread  # what a stale index says that those need may be less than they do
    kept |= {one: IndexedBundle(one, MISSED, row, (), ()) for one, row in (_answer(stale.missed) or {}).items()}
    leaving = list_leaving(folder) - _marked(folder)
    there = files.keys() | _ids_of(waiting) | leaving
    told = [one for one in kept.values() if one.bundle_id not in there]
    ended = _no_more_missed(folder, _rows_with(told, MISSED), files)
    ended |= _deleted_among(folder, stale, files, scan, told)
    return [_with_all_needs(one, files, scan) for one in told if one.bundle_id not in ended]


def _rows_with(bundles: Iterable[IndexedBundle], status: str) -> dict[bytes, IndexRow]:
    return {one.bundle_id: one.row for one in bundles if one.status == status and one.row is not None}


def _deleted_among(
    folder: StoreFolder, stale: Index, files: Mapping[bytes, str], scan: _Scan, told: Iterable[IndexedBundle]
) -> set[bytes]:
    rows = _answer(lambda: stale.rows_of(files.keys() - _live(files))) or {}
    retired = _but_for(set_aside_among(folder, rows), rows)
    found = [*scan.bundles, *_unreadable(folder, scan, stale)]
    sessions = _answer(lambda: _deleted_sessions(folder, stale, retired, files, found)) or set()
    return {one.bundle_id for one in told if one.row is not None and one.row.uri in sessions}


def _with_all_needs(bundle: IndexedBundle, files: Mapping[bytes, str], scan: _Scan) -> IndexedBundle:
    """A version with what it may need since compactions moved its blocks: to files of its session, or retired ones.
    Of one whose needs were unknown they stay so."""
    if bundle.row is None or not (bundle.refs or bundle.blocks):
        return bundle
    uri = bundle.row.uri
    kin = [one for one in scan.bundles if one.row is not None and one.row.uri == uri]
    may = {*bundle.refs, *_ids_of(kin), *(ref for one in kin for ref in one.refs), *(files.keys() - _live(files))}
    return dataclasses.replace(bundle, refs=tuple(sorted(may - {bundle.bundle_id})))


def _made(folder: StoreFolder, contents: _Contents) -> tuple[Index, str]:
    """A new index file; on a full disk one in memory, and why: a store must still open, for a delete is the way out.
    The old file stays until there is a new one."""
    index = _in_memory(folder, contents)
    try:
        index.return_to_file()
    except (NoSpace, StoreIoError) as error:
        return index, f"; it is kept in memory because {error.message}"
    except BaseException:
        index.close()
        raise
    return index, ""


def _in_memory(folder: StoreFolder, contents: _Contents) -> Index:
    return Index.create_in_memory(
        folder.path,
        folder.uuid,
        contents.bundles,
        root_fd=folder.root_fd,
        unsettled=contents.unsettled,
        written=contents.written,
        marks_unseen=contents.marks_unseen,
    )


# --- reading bundles


def _read_bundles(folder: StoreFolder, bundle_ids: Iterable[bytes], ahead: Readings | None = None) -> _Scan:
    scan = _Scan()
    for bundle_id in sorted(bundle_ids):
        try:
            known = ahead.get(bundle_id) if ahead else None
            if known is None or folder.stamp_of(bundle_id, LIVE_SUFFIX) != known[1]:
                known = _read_bundle(folder, bundle_id)
            scan.bundles.append(known[0])
        except BundleMissing:
            continue  # deleted by the daemon beside us since the folder was listed
        except StoreIoError:
            raise
        except StoreError as error:
            scan.findings.append(Finding(folder.bundle_path(bundle_id), error.code, error.message))
            scan.unread.append(bundle_id)
            if isinstance(error, BundleMismatch):
                other = _by_content(functools.partial(folder.open_as, bundle_id, LIVE_SUFFIX))
                scan.misnamed |= {other.bundle_id: other} if other is not None else {}
    return scan


def _read_bundle(folder: StoreFolder, bundle_id: bytes) -> tuple[IndexedBundle, Stamp]:
    for last in (False, True):
        try:
            fd, path = folder.open_bundle(bundle_id)
            with contextlib.closing(BundleFile(fd, path, bundle_id)) as file:
                bundle, stamp = indexed(file), file.stamp()
            if path.endswith(RETIRED_SUFFIX):  # it was live when the folder was listed
                raise BundleMissing(f"The session of {path} was deleted.", bundle_id=bundle_id.hex(), path=path)
            return bundle, stamp
        except StoreIoError as error:
            if last:
                raise StoreIoError(
                    f"{error.message} The index lacks what it says, and without it an older version would be woken. "
                    "Try again; if it stays so, move the file out of the store.",
                    **error.details,
                ) from error
    raise AssertionError("the loop returns or raises")


def _by_content(open_file: Callable[[], tuple[int, str]]) -> IndexedBundle | None:
    """The version that a file is as a whole, whatever its name says, as one that is set aside; None for any other
    file."""
    try:
        with contextlib.closing(BundleFile(*open_file(), None)) as file:
            return dataclasses.replace(indexed(file), status=ASIDE)
    except StoreIoError:
        raise
    except StoreError:
        return None


def _set_aside(folder: StoreFolder, but_for: Container[bytes]) -> list[IndexedBundle]:
    """The versions in quarantine, as far as their files, or their marks, tell what they are: their numbers are given,
    and what the files say that they need is needed."""
    found: dict[bytes, IndexedBundle] = {}
    damaged: dict[bytes, IndexRow] = {}
    marks = _marks(folder)
    for bundle_id, suffix, name in list_waiting(folder):
        if suffix != LIVE_SUFFIX or bundle_id in but_for or bundle_id in found:
            continue
        with contextlib.suppress(StoreError):
            fd, path = quarantine.open_name(folder, name)
            with contextlib.closing(BundleFile(fd, path, bundle_id)) as file:
                found[bundle_id] = dataclasses.replace(indexed(file), status=ASIDE)
                continue
        row = _row_in_file(bundle_id, functools.partial(quarantine.open_name, folder, name))
        row = row or _row_in_marks(marks, bundle_id)
        if row is not None:
            damaged.setdefault(bundle_id, row)
    only_told = [IndexedBundle(one, ASIDE, row, (), ()) for one, row in damaged.items() if one not in found]
    return [*found.values(), *only_told]


def _unreadable(folder: StoreFolder, scan: _Scan, index: Index | None = None) -> list[IndexedBundle]:
    """The bundles that could not be read, with what tells of them: their files, what lies whole under another one's
    name or in quarantine, their marks, or the index as it was. What those need in which nothing can be read now, no
    other file tells: it may have been written anew since."""
    rows = {one: _row_in_file(one, functools.partial(folder.open_as, one, LIVE_SUFFIX)) for one in scan.unread}
    rows |= {one: scan.misnamed[one].row for one, row in rows.items() if row is None and one in scan.misnamed}
    rows |= _rows_in_quarantine(folder, [one for one, row in rows.items() if row is None])
    marks = _marks(folder) if rows else None
    found = []
    for bundle_id, told in rows.items():
        row = told or _row_in_marks(marks, bundle_id)
        if row is None and index is not None:
            stored, _ = _stored(index, bundle_id)
            row = stored.row if stored is not None else None
        found.append(IndexedBundle(bundle_id, UNREADABLE, row, (), ()))
    return found


def _rows_in_quarantine(folder: StoreFolder, bundle_ids: Collection[bytes]) -> dict[bytes, IndexRow]:
    """What lies in quarantine of bundles, as far as it tells whose they are; nothing where nobody may look there."""
    found: dict[bytes, IndexRow] = {}
    with contextlib.suppress(UnsafePath):
        for bundle_id, suffix, name in list_waiting(folder) if bundle_ids else ():
            if suffix == LIVE_SUFFIX and bundle_id in bundle_ids and bundle_id not in found:
                row = _row_in_file(bundle_id, functools.partial(quarantine.open_name, folder, name))
                found |= {bundle_id: row} if row is not None else {}
    return found


def _row_in_file(bundle_id: bytes, open_file: Callable[[], tuple[int, str]]) -> IndexRow | None:
    """What a damaged file's own manifest tells of it, wherever that stands; None where nothing of it can be read."""
    with contextlib.suppress(StoreError):
        fd, path = open_file()
        with contextlib.closing(NamedFile(fd, path, bundle_id)) as file:
            if file.manifest is not None:
                return row_of(file.manifest, bundle_id, file.file_bytes)
    return None


def _as_entered(
    folder: StoreFolder, scan: _Scan, kept: Collection[IndexedBundle], index: Index | None = None
) -> list[IndexedBundle]:
    """What a new index holds of the bundles that were read, and of those that only the old one knew."""
    waiting = [bundle for bundle in kept if bundle.status in (ASIDE, MISSED)]
    return [
        *_without_rivals([*scan.bundles, *(bundle for bundle in kept if bundle.status not in (ASIDE, MISSED))]),
        *waiting,
        *_unreadable(folder, scan, index),
    ]


def _without_rivals(bundles: Iterable[IndexedBundle]) -> list[IndexedBundle]:
    """Where two bundles claim one version of one session (a backup put back), the younger one is it."""
    shadowed: list[IndexedBundle] = []
    best: dict[tuple[SessionUri, int], IndexedBundle] = {}
    for bundle in sorted(bundles, key=_age):
        assert bundle.row is not None
        key = (bundle.row.uri, bundle.row.version)
        if key in best:
            shadowed.append(dataclasses.replace(best[key], status=SHADOWED))
        best[key] = bundle
    return [*shadowed, *best.values()]


def _age(bundle: IndexedBundle) -> tuple[int, bytes]:
    return (bundle.row.created_ns if bundle.row else 0, bundle.bundle_id)
