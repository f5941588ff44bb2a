"""Prune: drops the versions that a retention does not keep. And the stand-ins that are not needed any more.

Owns the plan of a prune, its report, and the size of its commits. retention.py has the rules, deletion.py and
removal.py let go.

Rules:
- Each version to keep is looked at, even if nothing goes: its manifest is read, and each of its blocks is looked up. A
  bad one is reported and does not count, so an earlier one stays for it. Damage in a block is left to a deep verify,
  which takes hours. A stripped version can be woken: its tokens are read again.
- Only planned versions are dropped, and only if a second look inside the commit, with the marks of that moment, agrees:
  a version that is tagged meanwhile stays.
- A step drops the versions of some sessions, oldest first. A crash leaves each version there or gone; only unkept ones
  can be gone. A second prune does the rest.
- Packs go last, all at once.
- A stand-in is a version that ends in a ledger alone: what a stop without time, the journal or write behind keeps of a
  session. It goes once a later version of the session begins with all of its tokens, in the same bits, unless it has a
  mark or the journal needs it. No other version is looked at, so this costs little behind each new version. Only the
  next version and the newest one are tried: what stays for that takes room, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..checking.promised import require_same_as_row
from ..errors import BlockMissing, StoreClosed, StoreError, StoreIoError
from ..folder.folder import manifest_name
from ..folder.marks import Marks
from ..folder.retention import Kept, Retention, RetentionPlan, plan_retention
from ..format.ledgers import in_common, ledger_tokens
from ..format.manifest import end_record_of
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore
from ..writing.needs import Needed
from ..writing.removal import dead_bytes, needed_now, packs_with, remove_unneeded

_STEP_VERSIONS: Final = 256
"""Versions dropped in one commit, or those of one session: a sleep waits for no more removals than these."""

_Planned = Callable[[Iterable[SessionUri] | None], RetentionPlan]
"""Plans anew, for some sessions or all, by the marks and the unsound versions of the moment."""


@dataclass(slots=True)
class _Dropped:
    """The versions that went, with the bytes of their manifests; the packs that only these needed, with theirs; and the
    packs to look at."""

    versions: list[tuple[IndexRow, int]] = field(default_factory=list)
    packs: dict[str, int] = field(default_factory=dict)
    candidates: set[str] = field(default_factory=set)


def prune(core: StoreCore, retention: Retention, uri: SessionUri | None, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.prune`."""
    core.begin_upkeep(dry_run=dry_run)
    core.files.close_stale()  # a pack that is missing by now has no blocks
    now_ns = time.time_ns()
    unsound: dict[bytes, Finding] = {}

    def planned(uris: Iterable[SessionUri] | None) -> RetentionPlan:
        marks, index = Marks.load(core.folder), core.index
        rows = index.all_rows() if uris is None else [row for one in uris for row in index.versions(one)]
        return plan_retention(rows, marks, retention, now_ns, unsound, set(core.journal.bases().values()))

    plan = _plan_soundly(core, None if uri is None else [uri], planned, unsound)
    problems = [finding for bundle_id, finding in unsound.items() if core.index.knows(bundle_id)]
    if dry_run:
        expected, unknown = _expect(core, plan.drop)
        return _report(core, plan, expected, [*problems, *unknown], dry_run=True)
    dropped = _Dropped()
    for step in _steps(plan.drop):
        _drop(core, step, planned, dropped)
    if dropped.candidates:
        with core.committing():
            removed = remove_unneeded(core, dropped.candidates)
        dropped.packs = removed.packs
        problems += removed.problems
    return _report(core, plan, dropped, problems, dry_run=False)


def drop_stand_ins(core: StoreCore, uri: SessionUri) -> MaintenanceReport:
    """See `Store.drop_stand_ins`."""
    core.begin_upkeep(dry_run=False)
    core.files.close_stale()
    covered = _covered(core, uri)

    def planned(_uris: Iterable[SessionUri] | None) -> RetentionPlan:
        rows, bases, marks = core.index.versions(uri), core.journal.bases().values(), Marks.load(core.folder)
        there = {row.bundle_id for row in rows}
        drop = (row for row in rows if row.bundle_id in covered and covered[row.bundle_id] in there)
        return RetentionPlan(
            (), tuple(row for row in drop if row.bundle_id not in bases and not marks.of(row.bundle_id).keeps)
        )

    plan = planned(None) if covered else RetentionPlan((), ())
    dropped = _Dropped()
    if plan.drop:
        _drop(core, plan.drop, planned, dropped)
    return _report(core, plan, dropped, (), dry_run=False)


def _covered(core: StoreCore, uri: SessionUri) -> dict[bytes, bytes]:
    """The stand-ins of a session, each with the newest or else the next version, if that begins with all of its
    tokens."""
    rows = core.index.versions(uri)
    if not any(row.unread_tokens for row in rows):
        return {}
    found, stripped = {}, Marks.load(core.folder).stripped
    for at, row in enumerate(rows):
        if not row.unread_tokens:
            continue
        is_stripped = row.bundle_id in stripped
        alike = [
            one for one in rows[at + 1 :] if one.lossy == row.lossy and (is_stripped or one.bundle_id not in stripped)
        ]
        tried = dict.fromkeys([*alike[-1:], *alike[:1]])  # each one costs two openings
        covering = next((one for one in tried if _covers(core, one, row, stripped)), None)
        if covering is not None:
            found[row.bundle_id] = covering.bundle_id
    return found


def _covers(core: StoreCore, later: IndexRow, earlier: IndexRow, stripped: Container[bytes]) -> bool:
    if _problem(core, later, is_stripped=later.bundle_id in stripped) is not None:
        return False
    try:
        with core.open_reader(later.bundle_id) as one, core.open_reader(earlier.bundle_id) as other:
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


# --- the plan


def _plan_soundly(
    core: StoreCore, uris: Iterable[SessionUri] | None, planned: _Planned, unsound: dict[bytes, Finding]
) -> RetentionPlan:
    """A plan without sessions that rest on versions that cannot be woken; adds those to `unsound`, with the reason."""
    plan = planned(uris)
    stripped = Marks.load(core.folder).stripped
    by_session: dict[SessionUri, RetentionPlan] = {}
    kept: dict[SessionUri, list[IndexRow]] = {}
    for one in plan.keep:
        kept.setdefault(one.row.uri, []).append(one.row)
    for uri, rows in kept.items():
        its_plan = _session_plan(core, uri, rows, planned, stripped, unsound)
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
    core: StoreCore,
    uri: SessionUri,
    kept: Sequence[IndexRow],
    planned: _Planned,
    stripped: frozenset[bytes],
    unsound: dict[bytes, Finding],
) -> RetentionPlan | None:
    """Look at the kept versions of a session, and at their substitutes, until all were looked at; None if all are
    sound."""
    plan: RetentionPlan | None = None
    looked: set[bytes] = set()
    while True:
        problems = {
            row.bundle_id: _problem(core, row, is_stripped=row.bundle_id in stripped)
            for row in kept
            if row.bundle_id not in looked
        }
        looked.update(problems)
        found = {bundle_id: problem for bundle_id, problem in problems.items() if problem is not None}
        if not found:
            return plan
        unsound.update(found)
        plan = planned([uri])
        kept = [one.row for one in plan.keep]


def _problem(core: StoreCore, row: IndexRow, *, is_stripped: bool) -> Finding | None:
    """Why a version cannot be woken, by a look that reads no block.

    Raises:
        StoreIoError: the system failed, which says nothing about the version; StoreClosed
    """
    path = core.folder.path_of(manifest_name(row.bundle_id))
    try:
        manifest = core.read_manifest(row.bundle_id)
        require_same_as_row(row, row.uri, manifest, path)
        end = end_record_of(manifest)
        heads = [entry.id for entry in manifest.blocks if entry is not end] if is_stripped else []
        _require_blocks(core, heads, path, stripped=True)
        _require_blocks(core, [entry.id for entry in manifest.blocks[len(heads) :]], path)
    except (StoreClosed, StoreIoError):
        raise
    except StoreError as error:
        message = f"Version {row.version} of {row.uri} cannot be woken, so it does not count for what is kept"
        return Finding(path, error.code, f"{message}: {error.message}")
    return None


def _require_blocks(core: StoreCore, block_ids: Sequence[bytes], path: str, *, stripped: bool = False) -> None:
    """Raises BlockMissing."""
    missing = core.missing_of(block_ids, stripped=stripped)
    if missing:
        core.look_again()  # moved meanwhile, or put back
        missing = core.missing_of(missing, stripped=stripped)
    if missing:
        first = next(block_id for block_id in block_ids if block_id in missing)
        raise BlockMissing(f"No pack has its block {first.hex()[:16]}.", block_id=first.hex(), path=path)


# --- the drop


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


def _drop(core: StoreCore, step: Sequence[IndexRow], planned: _Planned, dropped: _Dropped) -> None:
    """Drop what is still planned. No turn is acknowledged behind one of these meanwhile."""
    with core.committing(), core.journal.lock:
        wanted = {row.bundle_id for row in step}
        again = planned(dict.fromkeys(row.uri for row in step))
        rows = [row for row in again.drop if row.bundle_id in wanted]
        bundle_ids = [row.bundle_id for row in rows]
        dropped.candidates |= packs_with(core, bundle_ids)
        dropped.versions += [(row, _manifest_bytes(core, row)) for row in rows]
        deletion.drop_versions(core, bundle_ids)


def _manifest_bytes(core: StoreCore, row: IndexRow) -> int:
    status = core.folder.status_of(manifest_name(row.bundle_id))
    return status.st_size if status is not None else 0


# --- the report


def _expect(core: StoreCore, drop: Sequence[IndexRow]) -> tuple[_Dropped, Sequence[Finding]]:
    """What would go, and why no pack would, if so."""
    expected = _Dropped([(row, _manifest_bytes(core, row)) for row in drop])
    leaving = {row.bundle_id for row in drop}
    needed = needed_now(core)
    unknown = [finding for finding in needed.unknown if finding.path not in _paths(core, drop)]
    if not leaving or unknown:
        return expected, unknown if leaving else ()
    staying = core.folder.list_versions() - leaving
    blocks = {block_id for bundle_id in staying for block_id in core.needs.of(bundle_id)} | {*core.pins.blocks()}
    left = Needed(frozenset(blocks), frozenset(), ())
    for name in sorted(packs_with(core, leaving)):
        size_bytes = dead_bytes(core, name, left)
        if size_bytes is not None:
            expected.packs[name] = size_bytes
    return expected, ()


def _paths(core: StoreCore, rows: Iterable[IndexRow]) -> set[str]:
    return {core.folder.path_of(manifest_name(row.bundle_id)) for row in rows}


def _report(
    core: StoreCore, plan: RetentionPlan, dropped: _Dropped, problems: Sequence[Finding], *, dry_run: bool
) -> MaintenanceReport:
    actions = [
        Action(
            "remove",
            core.folder.path_of(manifest_name(row.bundle_id)),
            row.uri,
            row.version,
            size_bytes,
            "no rule keeps it",
        )
        for row, size_bytes in dropped.versions
    ]
    actions += [
        Action("remove", core.folder.path_of(name), None, None, size_bytes, "nothing needs its blocks any more")
        for name, size_bytes in dropped.packs.items()
    ]
    actions += [_kept(core, kept) for kept in plan.keep if _only_marked(kept)]
    freed = sum(size_bytes for _, size_bytes in dropped.versions) + sum(dropped.packs.values())
    return MaintenanceReport("prune", dry_run, tuple(actions), freed, 0, tuple(problems))


def _only_marked(kept: Kept) -> bool:
    return all(reason == "pinned" or reason.startswith("tagged ") for reason in kept.reasons)


def _kept(core: StoreCore, kept: Kept) -> Action:
    path = core.folder.path_of(manifest_name(kept.row.bundle_id))
    return Action("keep", path, kept.row.uri, kept.row.version, 0, f"it is {' and '.join(kept.reasons)}")
