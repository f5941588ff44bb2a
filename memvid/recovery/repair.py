"""Repair: makes a sound store from the remains of one, and throws nothing away.

Owns the order of a repair's steps, and the checks before each. repair_plan.py decides on the steps.

The steps, in this order; each is durable before the next begins, and each may be the last:
1. shelve: the sound frames that others need from a file that is to leave become a retired file of the same bundle.
2. bring back: a version whose whole file was put back is entered again. One in quarantine with all blocks sound
   somewhere again gets its place again, after the versions that it needs.
3. mend: a version with all blocks sound somewhere gets a new file under its own bundle id.
4. salvage: the longest sound beginning of the newest lost version becomes a new version.
5. set aside, into quarantine: damaged retired files, those that only lost versions need, retired files with nothing
   that the live ones beside them lack, saved parts of versions that are back, and last the lost versions' files.
6. versions whose files are nowhere are given up.
7. marks that cannot be read go to quarantine; an index that differs from the bundles is made anew.

Rules:
- The replacement of a damaged file is written, flushed and read back before the damaged one leaves its name, and the
  damaged bytes are in quarantine before anything takes their name.
- A sound version is never written to, and keeps every block that it needs elsewhere.
- A version that is set aside or given up keeps its number, its marks and its needs: the index's file says so before the
  version's file moves. An index that cannot have its file again stops a repair.
- Under the lock, each step checks the facts of its plan again: the file, the version's row, the version that it yields
  to, the blocks that were nowhere, and the users of frames that leave. Somebody may have deleted, slept, imported or
  compacted meanwhile.
- No budget refuses a repair's writes, for they keep sessions from being lost; they count for the day.
- A second run finishes what was begun; after that there is nothing to do.
"""

from __future__ import annotations

import functools

from ..checking import scanning
from ..checking.set_aside_versions import LOST
from ..checking.verify import STRANGER, find_strangers
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..errors import IndexFailed, StoreError
from ..format.records import Finding, IndexRow, MaintenanceReport
from ..index.index import Index
from ..index.unknown_references import find_lost_notes, missed_finding
from ..writing.core import StoreCore
from . import reindexing
from .own_files import OwnFiles
from .repair_plan import plan_repair
from .repair_run import CHANGED, RepairRun
from .repair_steps import RepairSteps
from .survey import open_frames_of, take_survey

__all__ = ["CHANGED", "LOST", "STRANGER", "rebuild_index", "repair"]

# --- the run


def repair(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make a store sound again, or with `dry_run` plan it.

    Raises:
        NoSpace, StoreIoError: the finished steps are whole; run it again. None was taken if the index went on in memory
            and cannot have its file again.
        DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    core.begin_upkeep(dry_run=dry_run)
    run = RepairRun(core, "repair", dry_run)
    own = OwnFiles(run)
    if not dry_run:
        run.require_index_file()
    own.mend_store_file()
    if not _is_readable(core.index):
        own.mend_index(set())
        if dry_run:  # before that the owners of the bundles are unknown
            return run.report()
    run.settle_leaving()
    run.survey = take_survey(core)
    plan = plan_repair(run.survey, core.folder.bundle_path, functools.partial(open_frames_of, core))
    run.problems += plan.problems
    RepairSteps(run).carry_out(plan)
    own.mend_marks()
    own.mend_index(plan.bundle_ids)
    run.problems += [missed_finding(core.folder.bundle_path(one), row) for one, row in _missed(core.index)]
    run.problems += [*find_lost_notes(core.folder, core.index), *find_strangers(core.folder)]
    if not dry_run:
        core.folder.recount()  # files have moved past it
        if run.bytes_written:
            core.count_written(utc_day(now_ns()), run.bytes_written)
    return run.report()


def _is_readable(index: Index) -> bool:
    try:
        index.all_rows()
    except StoreError:
        return False
    return True


def _missed(index: Index) -> list[tuple[bytes, IndexRow]]:
    """The versions that only their marks tell of; none if a failure has left the index unreadable."""
    try:
        return sorted(index.missed().items())
    except StoreError:
        return []


# --- the index alone


def rebuild_index(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make the index anew from the bundles, or with `dry_run` tell its differences.

    Raises:
        StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    if dry_run:
        core.require_open()
        actions, found = reindexing.plan_rebuild(core.folder, core.index)
        return MaintenanceReport("rebuild_index", True, tuple(actions), 0, 0, tuple(found))
    core.require_writable()
    ahead = scanning.read_ahead(core.folder)
    with core.committing():
        actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
        report = reindexing.rebuild(core.folder, core.index, ahead)
    problems = report.unreadable
    if not core.index.has_file:
        message = (
            f"The index was made anew and has no file: {report.index_rebuilt}. Free some space, or see to the disk; "
            "until it has one, each opening makes it anew."
        )
        problems += (Finding(core.index.path, IndexFailed.code, message),)
    return MaintenanceReport("rebuild_index", False, tuple(actions), 0, 0, problems)
