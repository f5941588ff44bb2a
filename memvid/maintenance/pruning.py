"""Prune: drops the versions that a retention does not keep. And the stand-ins that are not needed any more.

Owns the plan of a prune, its report, and the size of its commits. retention.py has the rules, deletion.py the removal.

Rules:
- Each version to keep is opened, and the head of each of its blocks is read, even if nothing goes: a bad one is
  reported and does not count, so an earlier one stays for it. Damage inside a block's bytes is left to a deep verify,
  which takes hours.
- Only planned versions are dropped, and only if a second look inside the commit, with the marks of that moment, agrees:
  a version that is tagged meanwhile stays.
- A step retires the versions of some sessions, oldest first, and drops their rows at once. A crash leaves each version
  there or gone; only unkept ones can be gone. A second prune does the rest.
- A saved part that repair set aside because its original is whole again goes just before that original: else the next
  repair would take it for lost, and bring back what the rule removes. It stays if it has a mark, or if the original
  cannot be woken.
- Files go last, all at once, with one listing of the folder.
- A stand-in is a version that ends in a ledger alone: what a stop without time, the journal or write behind keeps of a
  session. It goes once a later version of the session begins with all of its tokens, in the same bits, unless it has a
  mark or the journal needs it. No other version is looked at, so this costs little behind each new version. Only the
  next version and the newest one are tried: what stays for that takes room, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..checking.set_aside_versions import gave_way_to
from ..checking.verify import require_same_as_row
from ..errors import StoreClosed, StoreError, StoreIoError
from ..folder.folder import list_retired
from ..folder.marks import Marks
from ..folder.quarantine import LEAVING_SUFFIX
from ..folder.retention import Kept, Retention, RetentionPlan, plan_retention
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.ledgers import in_common, ledger_tokens
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..index.rows import SHADOWED
from ..index.unknown_references import find_unknown_needs
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore

_STEP_VERSIONS: Final = 256
"""Versions dropped in one commit, or those of one session: a sleep waits for no more renames than these."""

_Planned = Callable[[Iterable[SessionUri] | None], RetentionPlan]
"""Plans anew, for some sessions or all, by the marks and the unsound versions of the moment."""


def prune(core: StoreCore, retention: Retention, uri: SessionUri | None, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.prune`."""
    core.begin_upkeep(dry_run=dry_run)
    now_ns = time.time_ns()
    unsound: dict[bytes, Finding] = {}

    def planned(uris: Iterable[SessionUri] | None) -> RetentionPlan:
        marks, index = Marks.load(core.folder), core.index
        rows = index.all_rows() if uris is None else [row for one in uris for row in index.versions(one)]
        return plan_retention(rows, marks, retention, now_ns, unsound, set(core.journal.bases().values()))

    plan = _plan_soundly(core, None if uri is None else [uri], planned, unsound)
    problems = [unsound[one] for one in sorted(core.promised(unsound))] if unsound else []
    if dry_run:
        return _expected(core, plan, problems)
    dropped: list[IndexRow] = []
    freed: dict[bytes, int] = {}
    for step in _steps(plan.drop):
        rows, left = _drop(core, step, planned, freed)
        dropped += rows
        problems += left
    with core.committing():
        for bundle_id, size_bytes in deletion.remove_unneeded(core.folder, core.index, core.pins).items():
            freed[bundle_id] = freed.get(bundle_id, 0) + size_bytes
    return _report(core, plan, dropped, freed, problems, dry_run=False)


def drop_stand_ins(core: StoreCore, uri: SessionUri) -> MaintenanceReport:
    """See `Store.drop_stand_ins`."""
    core.begin_upkeep(dry_run=False)
    covered = _covered(core, uri)

    def planned(_uris: Iterable[SessionUri] | None) -> RetentionPlan:
        rows, bases = core.index.versions(uri), core.journal.bases().values()
        there, marks = {row.bundle_id for row in rows}, Marks.load(core.folder)
        drop = (row for row in rows if row.bundle_id in covered and covered[row.bundle_id] in there)
        return RetentionPlan(
            (), tuple(row for row in drop if row.bundle_id not in bases and not marks.of(row.bundle_id))
        )

    plan = planned(None) if covered else RetentionPlan((), ())
    dropped: list[IndexRow] = []
    problems: tuple[Finding, ...] = ()
    freed: dict[bytes, int] = {}
    if plan.drop:
        leaving = [row.bundle_id for row in plan.drop]
        files = {*leaving, *(holder for one in leaving for holder in core.index.refs_of(one))}
        dropped, problems = _drop(core, plan.drop, planned, freed)
        with core.committing():
            asked = {one: suffix for one in files if (suffix := core.folder.suffix_of(one)) is not None}
            freed.update(deletion.remove_unneeded(core.folder, core.index, core.pins, asked))
    return _report(core, plan, dropped, freed, problems, dry_run=False)


def _covered(core: StoreCore, uri: SessionUri) -> dict[bytes, bytes]:
    """The stand-ins of a session, each with the newest or else the next version, if that begins with all of its
    tokens."""
    found, rows = {}, core.index.versions(uri)
    for at, row in enumerate(rows):
        if not row.unread_tokens:
            continue
        alike = [one for one in rows[at + 1 :] if (one.lossy, one.salvaged) == (row.lossy, row.salvaged)]
        tried = dict.fromkeys([*alike[-1:], *alike[:1]])  # each one costs two openings
        covering = next((one for one in tried if _covers(core, one, row)), None)
        if covering is not None:
            found[row.bundle_id] = covering.bundle_id
    return found


def _covers(core: StoreCore, later: IndexRow, earlier: IndexRow) -> bool:
    try:
        with core.open_reader(later.bundle_id) as one, core.open_reader(earlier.bundle_id) as other:
            require_same_as_row(later, later.uri, one.manifest, one.path)
            same = in_common(
                one.manifest,
                lambda entry: one.read_header(entry).tokens,
                other.manifest,
                lambda entry: other.read_header(entry).tokens,
            )
            return same.least == ledger_tokens(other.manifest)
    except (StoreClosed, StoreIoError):
        raise
    except StoreError:
        return False


def _plan_soundly(
    core: StoreCore, uris: Iterable[SessionUri] | None, planned: _Planned, unsound: dict[bytes, Finding]
) -> RetentionPlan:
    """A plan without sessions that rest on versions that cannot be woken; adds those to `unsound`, with the reason."""
    plan = planned(uris)
    by_session: dict[SessionUri, RetentionPlan] = {}
    kept: dict[SessionUri, list[IndexRow]] = {}
    for one in plan.keep:
        kept.setdefault(one.row.uri, []).append(one.row)
    for uri, rows in kept.items():
        its_plan = _session_plan(core, uri, rows, planned, unsound)
        if its_plan is not None:
            by_session[uri] = its_plan
    keep = [one for one in plan.keep if one.row.uri not in by_session]
    drop = [row for row in plan.drop if row.uri not in by_session]
    for its_plan in by_session.values():
        keep += its_plan.keep
        drop += its_plan.drop
    keep.sort(key=lambda one: (one.row.uri, one.row.version))
    drop.sort(key=lambda row: (row.uri, row.version))
    return RetentionPlan(tuple(keep), tuple(drop))


def _session_plan(
    core: StoreCore, uri: SessionUri, kept: Sequence[IndexRow], planned: _Planned, unsound: dict[bytes, Finding]
) -> RetentionPlan | None:
    """Look at the kept versions of a session, and at their substitutes, until all were looked at; None if all are
    sound."""
    plan: RetentionPlan | None = None
    looked: set[bytes] = set()
    while True:
        problems = {row.bundle_id: _problem(core, row) for row in kept if row.bundle_id not in looked}
        looked.update(problems)
        found = {bundle_id: problem for bundle_id, problem in problems.items() if problem is not None}
        if not found:
            return plan
        unsound.update(found)
        plan = planned([uri])
        kept = [one.row for one in plan.keep]


def _problem(core: StoreCore, row: IndexRow) -> Finding | None:
    """Why a version cannot be woken, by a look that reads no block's bytes.

    Raises:
        StoreIoError: the system failed, which says nothing about the version; StoreClosed
    """
    try:
        with core.open_reader(row.bundle_id) as reader:
            require_same_as_row(row, row.uri, reader.manifest, reader.path)
            for entry in reader.entries:
                reader.read_header(entry)
    except (StoreClosed, StoreIoError):
        raise
    except StoreError as error:
        message = f"Version {row.version} of {row.uri} cannot be woken, so it does not count for what is kept"
        return Finding(core.folder.bundle_path(row.bundle_id), error.code, f"{message}: {error.message}")
    return None


def _steps(drop: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    """The versions in runs that never split a session."""
    step: list[IndexRow] = []
    for row in drop:
        if len(step) >= _STEP_VERSIONS and row.uri != step[-1].uri:
            yield step
            step = []
        step.append(row)
    if step:
        yield step


def _drop(
    core: StoreCore, step: Sequence[IndexRow], planned: _Planned, freed: dict[bytes, int]
) -> tuple[list[IndexRow], tuple[Finding, ...]]:
    """The dropped versions, and what may tell of one again. No turn is acknowledged behind one of them meanwhile."""
    with core.committing(), core.journal.lock:
        wanted = {row.bundle_id for row in step}
        again = planned(dict.fromkeys(row.uri for row in step))
        rows = [row for row in again.drop if row.bundle_id in wanted]
        replaced = _replaced(core, rows)
        left = deletion.give_ending(core.folder, replaced, LEAVING_SUFFIX) if replaced else []
        leaving = [*replaced, *_with_rivals(core, rows)]
        retirement = deletion.retire(core.folder, core.index, core.pins, leaving)
        if retirement.freed:
            freed[rows[-1].bundle_id] = retirement.freed
        untold = deletion.only_in_memory(core.folder, core.index, leaving)
        return rows, tuple(dict.fromkeys((*left, *retirement.problems, *untold)))


def _replaced(core: StoreCore, rows: Iterable[IndexRow]) -> list[bytes]:
    """The versions set aside that gave way to those of these that can be woken."""
    leaving = {row.bundle_id: row for row in rows}
    found = gave_way_to(core.folder, core.index, leaving)
    marks = Marks.load(core.folder) if found else None
    return [
        one
        for one, source in found.items()
        if marks is not None and not marks.of(one) and _problem(core, leaving[source]) is None
    ]


def _with_rivals(core: StoreCore, rows: Sequence[IndexRow]) -> list[bytes]:
    """The bundles of these versions, each after the ones that lost the same version to it: if it went alone, the next
    index made anew would list one of those."""
    marks = Marks.load(core.folder)
    rivals: dict[tuple[SessionUri, int], list[bytes]] = {}
    for bundle_id in core.index.with_status(SHADOWED):
        stored = core.index.stored(bundle_id)
        if stored is not None and stored.row is not None and not marks.of(bundle_id):
            rivals.setdefault((stored.row.uri, stored.row.version), []).append(bundle_id)
    return [one for row in rows for one in (*rivals.get((row.uri, row.version), ()), row.bundle_id)]


# --- the report


def _expected(core: StoreCore, plan: RetentionPlan, problems: Sequence[Finding]) -> MaintenanceReport:
    leaving = {row.bundle_id: row.bundle_bytes for row in plan.drop}
    freed: dict[bytes, int] = {}
    if leaving and not core.index.needs_unknown():
        asked = [*leaving, *(one for one in list_retired(core.folder) if one not in leaving)]
        for bundle_id in deletion.unneeded(core.index, asked, but_for=[*leaving, *_replaced(core, plan.drop)]):
            if not core.pins.count(bundle_id):
                freed[bundle_id] = core.folder.size_of(bundle_id)
    return _report(core, plan, plan.drop, freed, problems, dry_run=True)


def _report(
    core: StoreCore,
    plan: RetentionPlan,
    dropped: Sequence[IndexRow],
    freed: Mapping[bytes, int],
    problems: Sequence[Finding],
    *,
    dry_run: bool,
) -> MaintenanceReport:
    suffix = LIVE_SUFFIX if dry_run else RETIRED_SUFFIX
    actions = [_dropped(core, row, freed.get(row.bundle_id), suffix) for row in dropped]
    named = {row.bundle_id for row in dropped}
    for bundle_id, size_bytes in freed.items():
        if bundle_id not in named and size_bytes:
            path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            actions.append(Action("remove", path, None, None, size_bytes, "nothing needs its blocks any more"))
    actions += [_kept(core, kept) for kept in plan.keep if _only_marked(kept)]
    unknown = find_unknown_needs(core.folder, core.index) if dropped else []
    return MaintenanceReport("prune", dry_run, tuple(actions), sum(freed.values()), 0, (*problems, *unknown))


def _dropped(core: StoreCore, row: IndexRow, freed: int | None, suffix: str) -> Action:
    path = core.folder.bundle_path(row.bundle_id, suffix)
    if freed is None:
        reason = "no rule keeps it; its file stays while other versions need blocks of it, or somebody has it open"
        return Action("retire", path, row.uri, row.version, 0, reason)
    return Action("remove", path, row.uri, row.version, freed, "no rule keeps it")


def _only_marked(kept: Kept) -> bool:
    return all(reason == "pinned" or reason.startswith("tagged ") for reason in kept.reasons)


def _kept(core: StoreCore, kept: Kept) -> Action:
    path = core.folder.bundle_path(kept.row.bundle_id)
    return Action("keep", path, kept.row.uri, kept.row.version, 0, f"it is {' and '.join(kept.reasons)}")
