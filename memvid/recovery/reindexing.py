"""Makes the index anew: when one cannot be used, and when it is asked for.

Owns what a new index holds. The old file stays until the new one is whole.

Rules:
- An index that takes the place of one that can be asked takes over from it the versions without a file. One that cannot
  be used for its age still tells of those: they are taken over with all that they may need by now.
- An index made anew of nothing else has no rows of missing files, but marks name bundles: one that is nowhere is
  missed; one whose file lies in quarantine was set aside. Where the marks cannot be read, it says so until an opening
  could.
- Nor does it know what was deleted. So a whole bundle that lies under another one's name and nowhere else (files were
  swapped, or came back under wrong names) is entered as set aside: a repair takes what no row knows for deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
    but_for,
    deleted_sessions,
    find_missed,
    find_missing,
    ids_marked,
    named_by_marks,
    no_more_missed,
    of_sessions,
    read_notes,
    settle_notes,
    without_files,
)

_T = TypeVar("_T")


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


def rebuild(folder: StoreFolder, index: Index, ahead: Readings | None = None) -> OpenReport:
    """Make the index of an open store anew from its bundles. The same object goes on with the new file.

    The versions whose files are missing or cannot be read are taken over from the old rows, as far as those can be
    read, and so are the bytes written each day: no bundle tells them. Everything is read before the old file goes; a
    crash after that leaves a file that is not ours, so the next open makes it again.

    Raises:
        StoreIoError, DurabilityLost: nothing has changed where a bundle could not be read for a failure of the system.
    """
    files = folder.list_bundles()
    scan = read_bundles(folder, live_of(files), ahead)
    contents = _going_on(folder, index, files, scan)
    missed = set(_answer(index.missed) or ())
    with index.replaced() as go_on_with:
        try:
            fresh, why = _made(folder, contents)
        except BaseException:  # a flush failed: nothing more is written, but reads go on
            go_on_with(_in_memory(folder, contents))
            raise
        go_on_with(fresh)
    if ended := missed - ids_of(contents.bundles):
        unmark_deleted(folder, index, ended)
    reason = f"it was asked for{why}"
    notes = settle_notes(folder, index, files)
    findings = (*scan.findings, *_lacking(folder, files, scan, contents), *notes)
    return OpenReport(reason, len(scan.bundles) + len(scan.unread), 0, 0, findings)


def plan_rebuild(
    folder: StoreFolder, index: Index, ahead: Readings | None = None
) -> tuple[list[Action], list[Finding]]:
    """What `rebuild` would change, and what it could not read. Changes nothing."""
    files = folder.list_bundles()
    scan = read_bundles(folder, live_of(files), ahead)
    contents = _going_on(folder, index, files, scan)
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
    folder: StoreFolder, files: Mapping[bytes, str], writable: bool, why: IndexUnusable
) -> tuple[Index, OpenReport]:
    """An index from the bundles, and from what the one that could not be used says for all that: the system may have
    refused a call, and no bundle tells of versions without a file."""
    live = live_of(files)
    scan = read_bundles(folder, live)
    copy = Index.copy_before_replacing(folder.path, folder.root_fd, folder.uuid)
    if copy is None:
        contents = _beginning_anew(folder, None, files, scan)
    else:
        old, is_current = copy
        with contextlib.closing(old):
            is_believed = is_current and not isinstance(why, IndexContradicted)
            contents = (_going_on if is_believed else _beginning_anew)(folder, old, files, scan)
    reason = str(why)
    if writable:
        index, where = _made(folder, contents)
        reason += where
    else:
        index = Index.create_in_memory(folder.path, folder.uuid, contents.bundles)
    findings = (*scan.findings, *_lacking(folder, files, scan, contents))
    return index, OpenReport(reason, len(live), 0, 0, findings)


def _going_on(folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: Scan) -> _Contents:
    """What an index holds that takes the place of one that is there."""
    kept = _taken_over(folder, index, files, scan)
    kept += read_notes(folder, (_answer(index.bundle_ids) or set()) | ids_of([*scan.bundles, *kept]))
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in ids_of(kept)]
    bundles = _entered_anew(folder, index, files, scan, kept)
    return _Contents(bundles, kept, _answer(index.written) or {}, _leaves_marks_unseen(folder, index))


def _beginning_anew(folder: StoreFolder, stale: Index | None, files: Mapping[bytes, str], scan: Scan) -> _Contents:
    """What an index holds that is made from bundles, quarantine and marks, and of a stale one from the versions without
    a file, which nothing else tells of."""
    _look_into_retired(folder, files, scan)
    waiting = _waiting(folder, files, scan)
    told = _only_told(folder, stale, files, scan, waiting) if stale is not None else []
    kept = [one for one in (*waiting, *told) if one.status == LIVE]
    bundles = as_entered(folder, scan, [*waiting, *told], stale)
    bundles += find_missed(folder, files, ids_of(bundles))
    return _Contents(bundles, kept, {}, _leaves_marks_unseen(folder, None))


def _waiting(folder: StoreFolder, files: Mapping[bytes, str], scan: Scan) -> list[IndexedBundle]:
    """What notes and quarantine tell of: a note, unless it does not say what its version needs and the file there does;
    and what lies under another one's name. Takes it out of what the scan could not read."""
    found = {one.bundle_id: one for one in read_set_aside(folder, live_of(files))}
    for note in read_notes(folder, ids_of(scan.bundles)):
        if note.refs or note.blocks:
            found[note.bundle_id] = note
        else:
            found.setdefault(note.bundle_id, note)
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in found]
    return [*found.values(), *_misnamed(folder, files, scan, found)]


def _lacking(folder: StoreFolder, files: Mapping[bytes, str], scan: Scan, contents: _Contents) -> list[Finding]:
    """The versions without a file, and those whose needs are unknown."""
    missing = find_missing(folder, _rows_without_files(contents.kept, files))
    return [*missing, *_told(folder, contents.bundles, scan)]


def _told(folder: StoreFolder, bundles: Iterable[IndexedBundle], scan: Scan) -> list[Finding]:
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


def _entered_anew(
    folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: Scan, kept: Collection[IndexedBundle]
) -> list[IndexedBundle]:
    """What takes the place of an index that is there: it knows which versions are missed, for what it has no row of was
    deleted. Only where it cannot say are the marks asked."""
    entered = as_entered(folder, scan, kept, index)
    missed = _answer(index.missed)
    if missed is None:
        return [*entered, *find_missed(folder, files, ids_of(entered))]
    retired = _answer(lambda: index.rows_of(files.keys() - live_of(files))) or {}
    rows = but_for(set_aside_among(folder, retired), retired)
    others = [one for one in entered if one.bundle_id in files]
    deleted = _answer(lambda: deleted_sessions(folder, index, rows, files, others)) or set()
    found = no_more_missed(folder, missed, files) | of_sessions(deleted, missed)
    entered += [IndexedBundle(one, MISSED, row, (), ()) for one, row in missed.items() if one not in found]
    if _answer(index.marks_unseen):
        entered += named_by_marks(folder, files, ids_of(entered))
    return entered


def _taken_over(folder: StoreFolder, index: Index, files: Mapping[bytes, str], scan: Scan) -> list[IndexedBundle]:
    """What the index alone knows: versions whose files are missing, with no delete cut off behind them, or unreadable,
    or that were set aside.

    Takes those out of what the scan could not read: an index made anew would forget whose they are.
    """
    known = _answer(index.bundle_ids) or set()
    aside = _answer(lambda: index.with_status(ASIDE))
    read = {bundle.bundle_id for bundle in scan.bundles}
    asked = known - files.keys() | known.intersection(scan.unread) | set(aside or ()) - read
    found = (stored_in(index, bundle_id)[0] for bundle_id in sorted(asked))
    told = [one for one in found if one is not None and one.row is not None]
    kept = {one.bundle_id: one for one in told if one.status in (LIVE, ASIDE)}
    vanished = [one for one in told if one.status == UNREADABLE and one.bundle_id not in files]
    kept |= {one.bundle_id: one for one in without_files(folder, vanished)}
    if aside is None:
        kept |= {one.bundle_id: one for one in read_set_aside(folder, read)}
        kept |= {one.bundle_id: one for one in _misnamed(folder, files, scan, kept)}
    retired = _answer(lambda: index.rows_of(known & files.keys() - live_of(files))) or {}
    left = set_aside_among(folder, retired)
    for one in filter(None, (stored_in(index, bundle_id)[0] for bundle_id in left)):
        kept.setdefault(one.bundle_id, dataclasses.replace(one, status=ASIDE))
    others = [*scan.bundles, *enter_unreadable(folder, scan, index)]
    sessions = _answer(lambda: deleted_sessions(folder, index, but_for(left, retired), files, others)) or set()
    absent = [*_rows_without_files(kept.values(), files), *(one.row for one in vanished if one.row is not None)]
    deleted = {row.bundle_id for row in absent if row.uri in sessions}
    scan.unread = [bundle_id for bundle_id in scan.unread if bundle_id not in kept]
    return [bundle for bundle in kept.values() if bundle.bundle_id not in deleted]


def _only_told(
    folder: StoreFolder, stale: Index, files: Mapping[bytes, str], scan: Scan, waiting: Iterable[IndexedBundle]
) -> list[IndexedBundle]:
    """The versions without a file that a stale index tells of, with all that they may need. One that was deleted since
    is among them where nothing is left that says so: rather that than one that was lost and is forgotten."""
    unread = list(scan.unread)
    kept = {one.bundle_id: one for one in _taken_over(folder, stale, files, scan)}
    scan.unread = unread  # what a stale index says that those need may be less than they do
    kept |= {one: IndexedBundle(one, MISSED, row, (), ()) for one, row in (_answer(stale.missed) or {}).items()}
    leaving = list_leaving(folder) - ids_marked(folder)
    there = files.keys() | ids_of(waiting) | leaving
    told = [one for one in kept.values() if one.bundle_id not in there]
    ended = no_more_missed(folder, _rows_with(told, MISSED), files)
    ended |= _deleted_among(folder, stale, files, scan, told)
    told = [one for one in told if one.bundle_id not in ended]
    return [_with_all_needs(one, files, [*scan.bundles, *told]) for one in told]


def _rows_with(bundles: Iterable[IndexedBundle], status: str) -> dict[bytes, IndexRow]:
    return {one.bundle_id: one.row for one in bundles if one.status == status and one.row is not None}


def _deleted_among(
    folder: StoreFolder, stale: Index, files: Mapping[bytes, str], scan: Scan, told: Iterable[IndexedBundle]
) -> set[bytes]:
    rows = _answer(lambda: stale.rows_of(files.keys() - live_of(files))) or {}
    retired = but_for(set_aside_among(folder, rows), rows)
    found = [*scan.bundles, *enter_unreadable(folder, scan, stale)]
    sessions = _answer(lambda: deleted_sessions(folder, stale, retired, files, found)) or set()
    return {one.bundle_id for one in told if one.row is not None and one.row.uri in sessions}


def _with_all_needs(
    bundle: IndexedBundle, files: Mapping[bytes, str], bundles: Iterable[IndexedBundle]
) -> IndexedBundle:
    """A version with what it may need since compactions moved its blocks: to files of its session, be they missing for
    now, or retired ones. Of one whose needs were unknown they stay so."""
    if bundle.row is None or not (bundle.refs or bundle.blocks):
        return bundle
    uri = bundle.row.uri
    kin = [one for one in bundles if one.row is not None and one.row.uri == uri]
    may = {*bundle.refs, *ids_of(kin), *(ref for one in kin for ref in one.refs), *(files.keys() - live_of(files))}
    return dataclasses.replace(bundle, refs=tuple(sorted(may - {bundle.bundle_id})))


def _misnamed(
    folder: StoreFolder, files: Mapping[bytes, str], scan: Scan, entered: Collection[bytes]
) -> list[IndexedBundle]:
    """What lies whole under other ones' names, and under its own neither in its place nor, which says that it was
    deleted, as a retired file: set aside, until a repair gives it its own."""
    found = scan.misnamed.keys() - files.keys() - set(entered)
    found -= list_leaving(folder) if found else set()
    return [scan.misnamed[bundle_id] for bundle_id in sorted(found)]


def _look_into_retired(folder: StoreFolder, files: Mapping[bytes, str], scan: Scan) -> None:
    """Note what lies whole under the names of deleted versions: what no row knows is removed with those."""
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


def _leaves_marks_unseen(folder: StoreFolder, index: Index | None) -> bool:
    """Whether an index that takes the place of this one, or of none, lacks what marks tell that cannot be read now."""
    knows = index is not None and _answer(index.missed) is not None and _answer(index.marks_unseen) is False
    return not knows and readable_marks(folder) is None


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


def _answer(ask: Callable[[], _T]) -> _T | None:
    """The answer of an index that may be damaged: what it cannot say, asked twice, is not taken over."""
    for _ in range(2):
        with contextlib.suppress(StoreError):
            return ask()
    return None


def _made(folder: StoreFolder, contents: _Contents) -> tuple[Index, str]:
    """A new index file; on a full disk one in memory, and why: a store must still open, for a delete is the way out.
    The old file stays until there is a new one."""
    index = _in_memory(folder, contents)
    try:
        index.return_to_file()
    except (NoSpace, StoreIoError) as error:
        why = error.details.get("reason", error.message) if isinstance(error, IndexFailed) else error.message
        return index, f"; it is kept in memory because {why}"
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
