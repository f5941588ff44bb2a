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
  mark, the journal needs it, or it is the first of a fork, which alone tells what it goes on from. No other version is
  looked at, so this costs little behind each new version. Only the next version and the newest one are tried: what
  stays for that takes room, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Final

from ..answers import Finding, MaintenanceReport, VersionInfo
from ..checking.promised import require_same_as_row
from ..errors import BlockMissing, StoreClosed, StoreError, StoreIoError
from ..folder.folder import manifest_name
from ..folder.journals_beside import bases_beside
from ..folder.marks import Marks
from ..folder.retention import Kept, Retention, RetentionPlan, plan_retention
from ..format.manifest import Manifest, end_record_of
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.removal import packs_with, remove_unneeded

_STEP_VERSIONS: Final = 256
"""Versions dropped in one commit, or those of one session: a sleep waits for no more removals than these."""

_Planned = Callable[[Iterable[SessionUri] | None], RetentionPlan]
"""Plans anew, for some sessions or all, by the marks and the unsound versions of the moment."""


def prune(core: StoreCore, retention: Retention, uri: SessionUri | None, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.prune`."""
    core.begin_upkeep(dry_run=dry_run)
    now_ns = time.time_ns()
    unsound: dict[str, Finding] = {}

    def planned(uris: Iterable[SessionUri] | None) -> RetentionPlan:
        marks, index = Marks.load(core.folder), core.index
        rows = index.all_rows() if uris is None else [row for one in uris for row in index.versions(one)]
        return plan_retention(rows, marks, retention, now_ns, unsound, _bases(core))

    run = MaintenanceRun(core, "prune", dry_run)
    plan = _plan_soundly(core, None if uri is None else [uri], planned, unsound)
    run.problems += [finding for bundle_id, finding in unsound.items() if core.index.knows(bundle_id)]
    packs: set[str] = set()
    for step in _steps(plan.drop):
        packs |= _drop(run, step, planned)
    _remove(run, packs, [row.bundle_id for row in plan.drop] if dry_run else [])
    for kept in filter(_only_marked, plan.keep):
        run.did("keep", kept.row, 0, f"it is {' and '.join(kept.reasons)}")
    return run.report()


def _bases(core: StoreCore) -> set[str]:
    """The versions behind which turns stand, in whichever journal."""
    return bases_beside(core.journal).union(core.bases().values())


def drop_stand_ins(core: StoreCore, uri: SessionUri) -> MaintenanceReport:
    """See `Store.drop_stand_ins`."""
    core.begin_upkeep(dry_run=False)
    covered = _covered(core, uri)

    def planned(_uris: Iterable[SessionUri] | None) -> RetentionPlan:
        rows, marks = core.index.versions(uri), Marks.load(core.folder)
        bases = _bases(core)
        there = {row.bundle_id for row in rows}
        drop = (row for row in rows if row.bundle_id in covered and covered[row.bundle_id] in there)
        return RetentionPlan(
            (), tuple(row for row in drop if row.bundle_id not in bases and not marks.of(row.bundle_id).keeps)
        )

    run = MaintenanceRun(core, "prune", dry_run=False)
    drop = planned(None).drop if covered else ()
    if drop:
        packs = _drop(run, drop, planned)
        if not all(core.needs.of(covered[row.bundle_id]) for row in drop):  # else their blocks, as a rule, are its own
            _remove(run, packs)
    return run.report()


def _covered(core: StoreCore, uri: SessionUri) -> dict[str, str]:
    """The stand-ins of a session, each with the newest or else the next version, if that begins with all of its
    tokens."""
    rows = core.index.versions(uri)
    if not any(row.unread_tokens for row in rows):
        return {}
    covers, stripped = {}, Marks.load(core.folder).stripped
    for at, row in enumerate(rows):
        begins_fork = row.version == 1 and row.parent is not None  # it alone tells what the session goes on from
        if not row.unread_tokens or begins_fork:
            continue
        is_stripped = row.bundle_id in stripped
        alike = [
            one for one in rows[at + 1 :] if one.lossy == row.lossy and (is_stripped or one.bundle_id not in stripped)
        ]
        tried = dict.fromkeys([*alike[-1:], *alike[:1]])  # each one costs two openings
        covering = next((one for one in tried if _covers(core, one, row, stripped)), None)
        if covering is not None:
            covers[row.bundle_id] = covering.bundle_id
    return covers


def _covers(core: StoreCore, later: VersionInfo, earlier: VersionInfo, stripped: Container[str]) -> bool:
    if _problem(core, later, is_stripped=later.bundle_id in stripped) is not None:
        return False
    try:
        with core.open_reader(later.bundle_id) as one, core.open_reader(earlier.bundle_id) as other:
            same = _in_same_blocks(one.manifest, other.manifest)
            return (one.tokens(same) + one.manifest.tail).startswith(other.tokens(same) + other.manifest.tail)
    except (StoreClosed, StoreIoError):
        raise
    except StoreError:
        return False


def _in_same_blocks(one: Manifest, other: Manifest) -> int:
    """How many tokens two versions have in the same blocks from the first one on: no header of these is read."""
    same = 0
    for mine, theirs in zip(one.blocks, other.blocks, strict=False):
        if mine.id != theirs.id:
            break
        same = mine.end
    return same


# --- the plan


def _plan_soundly(
    core: StoreCore, uris: Iterable[SessionUri] | None, planned: _Planned, unsound: dict[str, Finding]
) -> RetentionPlan:
    """A plan that rests on no version that cannot be woken; adds those to `unsound`, with the reason. Sessions in which
    there are some are planned again, until all versions to keep were looked at."""
    plan, stripped, looked = planned(uris), Marks.load(core.folder).stripped, set[str]()
    keep: list[Kept] = []
    drop: list[VersionInfo] = []
    while True:
        again: set[SessionUri] = set()
        for row in (one.row for one in plan.keep if one.row.bundle_id not in looked):
            looked.add(row.bundle_id)
            problem = _problem(core, row, is_stripped=row.bundle_id in stripped)
            if problem is not None:
                unsound[row.bundle_id] = problem
                again.add(row.uri)
        keep += [one for one in plan.keep if one.row.uri not in again]
        drop += [row for row in plan.drop if row.uri not in again]
        if not again:
            break
        plan = planned(again)
    keep.sort(key=lambda one: (one.row.uri, one.row.version))
    drop.sort(key=lambda row: (row.uri, row.version))
    return RetentionPlan(tuple(keep), tuple(drop))


def _problem(core: StoreCore, row: VersionInfo, *, is_stripped: bool) -> Finding | None:
    """Why a version cannot be woken, by a look that reads no block.

    Raises:
        StoreIoError: the system failed, which says nothing about the version; StoreClosed
    """
    path = core.folder.manifest_path(row.bundle_id)
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
        first = next(block_id for block_id in block_ids if block_id in missing)
        raise BlockMissing(f"No pack has its block {first.hex()[:16]}.", block_id=first.hex(), path=path)


# --- the drop


def _steps(drop: Sequence[VersionInfo]) -> Iterator[list[VersionInfo]]:
    """The versions in runs that never split a session."""
    step: list[VersionInfo] = []
    for row in drop:
        if len(step) >= _STEP_VERSIONS and row.uri != step[-1].uri:
            yield step
            step = []
        step.append(row)
    if step:
        yield step


def _drop(run: MaintenanceRun, step: Sequence[VersionInfo], planned: _Planned) -> set[str]:
    """Drop what is still planned. No turn is acknowledged behind one of these meanwhile. The packs that may have blocks
    of them."""
    core, ids = run.core, {row.bundle_id for row in step}
    with run.committing(), core.journaling():
        again = planned(dict.fromkeys(row.uri for row in step))
        rows = [row for row in again.drop if row.bundle_id in ids]
        bundle_ids = [row.bundle_id for row in rows]
        packs = packs_with(core, bundle_ids)
        for row in rows:
            run.freed("remove", row, core.folder.bytes_of(manifest_name(row.bundle_id)), "no rule keeps it")
        if not run.dry_run:
            deletion.drop_versions(core, bundle_ids)
    return packs


def _remove(run: MaintenanceRun, packs: Collection[str], deletes: Collection[str] = ()) -> None:
    """Remove those of these packs that nothing needs any more. deletes: of a dry run."""
    if not packs:
        return
    with run.committing():
        removed = remove_unneeded(run.core, packs, deletes=deletes, dry_run=run.dry_run)
    for name, size_bytes in removed.packs.items():
        run.freed("remove", run.core.folder.path_of(name), size_bytes, "nothing needs its blocks any more")
    run.problems += removed.problems


def _only_marked(kept: Kept) -> bool:
    return all(reason == "pinned" or reason.startswith("tagged ") for reason in kept.reasons)
