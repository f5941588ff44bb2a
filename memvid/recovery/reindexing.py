"""Makes the index anew: if it cannot be used, and on request.

Owns the content of a new index. The old file stays until the new one is whole.

Rules:
- One function, `_contents`, gathers it from bundles, notes, quarantine and marks. A readable old index adds the
  versions that have vanished since the last opening.
- An old index that has noted each rewrite also knows the deletes: all without a row. From any other, the added versions
  keep every need that they may have by now.
- Without such an index, a mark for a bundle that is nowhere means a missed version. If the marks cannot be read, the
  index says so until an opening could. And a whole bundle that lies only under another one's name (files were swapped,
  or came back under wrong names) is entered as set aside: a repair takes a bundle without a row for deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..checking.scanning import (
    Readings,
    Scan,
    as_entered,
    by_content,
    enter_unreadable,
    ids_of,
    live_of,
    read_bundles,
    read_set_aside,
    readable_marks,
    stored_in,
)
from ..checking.set_aside_versions import list_leaving, set_aside_among
from ..disk.budget import utc_day
from ..disk.paths import undoing
from ..errors import IndexFailed, NoSpace, StoreError, StoreIoError
from ..folder.folder import StoreFolder
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action, Finding, IndexRow, OpenReport
from ..index.index import Index
from ..index.rows import ASIDE, LIVE, MISSED, UNREADABLE, IndexedBundle
from ..index.schema import IndexContradicted, IndexUnusable
from ..index.unknown_references import missed_finding, untold_finding
from ..writing.deletion import unmark_deleted
from .missing_versions import (
    Noted,
    but_for,
    deleted_sessions,
    find_missed,
    find_missing,
    ids_marked,
    named_by_marks,
    no_more_missed,
    read_notes,
    settle_notes,
    without_files,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Contents:
    """The content of a new index. `kept`: bundles that only the old index told of; the next opening reads them again.
    `marks_unseen`: the marks could not be read, so their versions are not among them."""

    bundles: list[IndexedBundle]
    kept: list[IndexedBundle]
    written: Mapping[int, int]
    marks_unseen: bool

    @property
    def unsettled(self) -> list[bytes]:
        return [bundle.bundle_id for bundle in self.kept]


def rebuild(folder: StoreFolder, index: Index, ahead: Readings | None = None) -> OpenReport:
    """Make the index of an open store anew from its bundles. The same object goes on with the new file.

    Versions with missing or unreadable files come from the old rows, as far as those can be read, and so do the bytes
    written each day: no bundle tells them. Everything is read before the old file goes; a crash after that leaves a
    file that is not ours, so the next open makes it again.

    Raises:
        StoreIoError, DurabilityLost: if a failure of the system kept a bundle from being read, nothing has changed.
    """
    files = folder.list_bundles()
    scan = read_bundles(folder, live_of(files), ahead)
    noted = Noted(folder, index.notes_left)
    contents = _contents(folder, index, files, scan, noted, is_current=True)
    missed = set(_answer(index.missed) or ())
    with index.replaced() as go_on_with:
        try:
            fresh, why = _made(folder, contents, noted)
        except BaseException:  # a flush failed: nothing more is written, but reads go on
            go_on_with(_in_memory(folder, contents))
            raise
        go_on_with(fresh)
    if ended := missed - ids_of(contents.bundles):
        unmark_deleted(folder, index, ended)
    reason = f"it was asked for{why}"
    notes = settle_notes(index, files, noted)
    findings = (*scan.findings, *_lacking(folder, files, scan, contents), *notes)
    return OpenReport(reason, len(scan.bundles) + len(scan.unread), 0, 0, findings)


def plan_rebuild(
    folder: StoreFolder, index: Index, ahead: Readings | None = None
) -> tuple[list[Action], list[Finding]]:
    """The changes that `rebuild` would make, and the unreadable files. Changes nothing."""
    files = folder.list_bundles()
    scan = read_bundles(folder, live_of(files), ahead)
    contents = _contents(folder, index, files, scan, Noted(folder, index.notes_left), is_current=True)
    wanted = {bundle.bundle_id: bundle for bundle in contents.bundles}
    actions = []
    for bundle_id in sorted(wanted.keys() | (_answer(index.bundle_ids) or set())):
        present, problem = stored_in(index, bundle_id)
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


def make_anew(
    folder: StoreFolder, files: Mapping[bytes, str], noted: Noted, writable: bool, why: IndexUnusable
) -> tuple[Index, OpenReport]:
    """An index from the bundles, and from the answers of the unusable one: the system may have refused one call only,
    and no bundle tells of versions without a file."""
    live = live_of(files)
    scan = read_bundles(folder, live)
    copy = Index.copy_before_replacing(folder.path, folder.root_fd, folder.uuid)
    if copy is None:
        contents = _contents(folder, None, files, scan, noted, is_current=False)
    else:
        old, is_current = copy
        with old:
            is_current &= not isinstance(why, IndexContradicted)
            contents = _contents(folder, old, files, scan, noted, is_current=is_current)
    reason = str(why)
    if writable:
        index, where = _made(folder, contents, noted)
        reason += where
    else:
        index = Index.create_in_memory(folder.path, folder.uuid, contents.bundles)
    findings = (*scan.findings, *_lacking(folder, files, scan, contents))
    return index, OpenReport(reason, len(live), 0, 0, findings)


def _contents(
    folder: StoreFolder, old: Index | None, files: Mapping[bytes, str], scan: Scan, noted: Noted, *, is_current: bool
) -> _Contents:
    """The content of a new index: from bundles, notes, quarantine and marks, and for versions without a file also from
    the old index. `is_current`: that one has noted each rewrite, so a bundle without a row was deleted, and no version
    needs more than its row says."""
    knows = old is not None and is_current and _answer(lambda: old.with_status(ASIDE)) is not None
    missed = _answer(old.missed) if old is not None else None
    unseen = _answer(old.marks_unseen) if old is not None else None
    told = waiting = _waiting(folder, files, scan, noted, notes_alone=knows)
    if old is not None:
        told = _with_old(folder, old, files, scan, waiting, missed or {}, is_current=is_current)
    scan.unread = [one for one in scan.unread if one not in ids_of(told)]
    bundles = as_entered(folder, scan, told, old)
    if not knows or missed is None:
        bundles += find_missed(folder, files, ids_of(bundles))
    elif unseen:
        bundles += named_by_marks(folder, files, ids_of(bundles))
    written = _answer(old.written) if old is not None and is_current else None
    written = _written_by(scan.bundles) if written is None else written
    lacks_marks = (not knows or missed is None or unseen is not False) and readable_marks(folder) is None
    return _Contents(bundles, [one for one in told if one.status == LIVE], written, lacks_marks)


def _written_by(bundles: Iterable[IndexedBundle]) -> dict[int, int]:
    """The bytes of the files made on each day: at least so many were written then."""
    found: Counter[int] = Counter()
    for row in (one.row for one in bundles):
        if row is not None and row.created_ns > 0:
            found[utc_day(row.created_ns)] += row.bundle_bytes
    return found


def _waiting(
    folder: StoreFolder, files: Mapping[bytes, str], scan: Scan, noted: Noted, *, notes_alone: bool
) -> list[IndexedBundle]:
    """The versions from notes and quarantine: a note, unless it lacks the needs and the file there has them; and files
    under other ones' names. `notes_alone`: other files without a row were deleted."""
    found: dict[bytes, IndexedBundle] = {}
    if not notes_alone:
        found = {one.bundle_id: one for one in read_set_aside(folder, live_of(files))}
        found |= {one.bundle_id: one for one in _misnamed(folder, files, scan, found)}
    for note in read_notes(folder, noted, ids_of(scan.bundles)):
        if note.refs or note.blocks:
            found[note.bundle_id] = note
        else:
            found.setdefault(note.bundle_id, note)
    return list(found.values())


def _with_old(
    folder: StoreFolder,
    old: Index,
    files: Mapping[bytes, str],
    scan: Scan,
    waiting: Collection[IndexedBundle],
    missed: Mapping[bytes, IndexRow],
    *,
    is_current: bool,
) -> list[IndexedBundle]:
    """`waiting`, and the versions that an old index adds: missing ones without a cut-off delete behind them, and those
    set aside or missed; a current index also adds unreadable ones.

    A file, a note or the quarantine counts before an index that is not current; its other versions keep every need that
    they may have by now. Some may have been deleted since without a trace: better listed than a lost version forgotten.
    """
    known = _answer(old.bundle_ids) or set()
    aside = set(_answer(lambda: old.with_status(ASIDE)) or ()) - ids_of(scan.bundles)
    asked = known - files.keys() | aside | known.intersection(scan.unread)
    rows = [one for one in (stored_in(old, one)[0] for one in sorted(asked)) if one is not None and one.row is not None]
    kept = {one.bundle_id: one for one in rows if one.status in (LIVE, ASIDE)}
    vanished = [one for one in rows if one.status == UNREADABLE and one.bundle_id not in files]
    kept |= {one.bundle_id: one for one in without_files(folder, vanished)}
    retired = _answer(lambda: old.rows_of(files.keys() - live_of(files))) or {}
    left = set_aside_among(folder, retired)
    for one in filter(None, (stored_in(old, bundle_id)[0] for bundle_id in left)):
        kept.setdefault(one.bundle_id, dataclasses.replace(one, status=ASIDE))
    kept |= {one: IndexedBundle(one, MISSED, missed[one], (), ()) for one in missed.keys() - ids_of(waiting)}
    found = [*scan.bundles, *enter_unreadable(folder, scan, old)]
    sessions = _answer(lambda: deleted_sessions(folder, old, but_for(left, retired), files, found)) or set()
    ended = no_more_missed(folder, missed, files)
    lie = ids_of(one for one in waiting if one.status == ASIDE)
    ended |= {
        one.bundle_id
        for one in kept.values()
        if one.row is not None and one.row.uri in sessions and one.bundle_id not in lie | files.keys()
    }
    waiting = [one for one in waiting if one.bundle_id not in ended]
    if is_current:
        told = [one for one in kept.values() if one.bundle_id not in ended]
        return [*told, *(one for one in waiting if one.bundle_id not in kept)]
    ended |= files.keys() | ids_of(waiting) | (list_leaving(folder) - ids_marked(folder))
    told = [one for one in kept.values() if one.bundle_id not in ended]
    return [*waiting, *(_with_all_needs(one, files, [*scan.bundles, *told]) for one in told)]


def _lacking(folder: StoreFolder, files: Mapping[bytes, str], scan: Scan, contents: _Contents) -> list[Finding]:
    """The versions without a file, and those with unknown needs."""
    missing = find_missing(folder, _rows_without_files(contents.kept, files))
    return [*missing, *_told(folder, contents.bundles, scan)]


def _told(folder: StoreFolder, bundles: Iterable[IndexedBundle], scan: Scan) -> list[Finding]:
    """As `find_told`, for an index with these bundles; the scan has reported its unreadable files."""
    read = {finding.path for finding in scan.findings}
    found = []
    for bundle in bundles:
        path = folder.bundle_path(bundle.bundle_id)
        if bundle.row is not None and bundle.status == MISSED:
            found.append(missed_finding(path, bundle.row))
        elif bundle.row is not None and bundle.status == ASIDE and not (bundle.refs or bundle.blocks or path in read):
            found.append(untold_finding(path, bundle.row))
    return found


def _with_all_needs(
    bundle: IndexedBundle, files: Mapping[bytes, str], bundles: Iterable[IndexedBundle]
) -> IndexedBundle:
    """A version with every need that it may have since compactions moved its blocks: files of its session, even missing
    ones, and retired ones. Unknown needs stay unknown."""
    if bundle.row is None or not (bundle.refs or bundle.blocks):
        return bundle
    uri = bundle.row.uri
    kin = [one for one in bundles if one.row is not None and one.row.uri == uri]
    may = {*bundle.refs, *ids_of(kin), *(ref for one in kin for ref in one.refs), *(files.keys() - live_of(files))}
    return dataclasses.replace(bundle, refs=tuple(sorted(may - {bundle.bundle_id})))


def _misnamed(
    folder: StoreFolder, files: Mapping[bytes, str], scan: Scan, entered: Collection[bytes]
) -> list[IndexedBundle]:
    """The whole bundles under other ones' names that have no file under their own: not in place, and not retired, which
    would mean deleted. They are set aside, until a repair gives them their names."""
    _look_into_retired(folder, files, scan)
    found = scan.misnamed.keys() - files.keys() - set(entered)
    found -= list_leaving(folder) if found else set()
    return [scan.misnamed[bundle_id] for bundle_id in sorted(found)]


def _look_into_retired(folder: StoreFolder, files: Mapping[bytes, str], scan: Scan) -> None:
    """Note the whole bundles under the names of deleted versions: files without a row are removed with those."""
    for bundle_id in sorted(files.keys() - live_of(files)):
        other = by_content(functools.partial(folder.open_as, bundle_id, RETIRED_SUFFIX))
        if other is not None and other.bundle_id != bundle_id:
            scan.misnamed.setdefault(other.bundle_id, other)


def _rows_without_files(bundles: Iterable[IndexedBundle], files: Mapping[bytes, str]) -> list[IndexRow]:
    return [
        bundle.row
        for bundle in bundles
        if bundle.row is not None and bundle.status == LIVE and bundle.bundle_id not in files
    ]


def _difference(present: IndexedBundle | None, wanted: IndexedBundle | None) -> str:
    """The difference between the index and a bundle's file; "" if none."""
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


def _answer(ask: Callable[[], _T]) -> _T | None:
    """The answer of an index that may be damaged; None if it fails twice."""
    for _ in range(2):
        with contextlib.suppress(StoreError):
            return ask()
    return None


def _made(folder: StoreFolder, contents: _Contents, noted: Noted) -> tuple[Index, str]:
    """A new index file; on a full disk one in memory, and the reason: a store must still open, for a delete is the way
    out. The old file stays until there is a new one, and until no note tells of a version that this one leaves out."""
    index = _in_memory(folder, contents)
    with undoing(index.close):
        try:
            index.drop_notes(noted.load()[0].keys() - ids_of(contents.bundles))
            index.return_to_file()
        except (NoSpace, StoreIoError) as error:
            why = error.details.get("reason", error.message) if isinstance(error, IndexFailed) else error.message
            return index, f"; it is kept in memory because {why}"
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
