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

import contextlib
import functools

from ..checking import scanning
from ..checking.set_aside_versions import LOST
from ..checking.verify import STRANGER, find_strangers
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..errors import CorruptMarks, CorruptStoreFile, IndexFailed, MarksLost, StoreError
from ..folder import quarantine
from ..folder.marks import MARKS_FILE, Marks, marks_lost
from ..folder.store_file import STORE_FILE
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..index.index import Index
from ..index.unknown_references import find_lost_notes, missed_finding
from ..writing.core import StoreCore
from . import reindexing, restoring
from .repair_plan import plan_repair
from .repair_run import CHANGED, RepairRun
from .repair_steps import RepairSteps
from .survey import open_frames_of, take_survey

__all__ = ["CHANGED", "LOST", "STRANGER", "rebuild_index", "repair"]

# --- the run


def repair(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """See `Store.repair`. No step is taken if the index went on in memory and cannot have its file again."""
    core.begin_upkeep(dry_run=dry_run)
    run = RepairRun(core, "repair", dry_run)
    if not dry_run:
        run.require_index_file()
    _mend_store_file(run)
    if not _is_readable(core.index):
        _mend_index(run, set())
        if dry_run:  # before that the owners of the bundles are unknown
            return run.report()
    run.settle_leaving()
    run.survey = take_survey(core)
    plan = plan_repair(run.survey, core.folder.bundle_path, functools.partial(open_frames_of, core))
    run.problems += plan.problems
    RepairSteps(run).carry_out(plan)
    _mend_marks(run)
    _mend_index(run, plan.bundle_ids)
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


# --- the store's own files


def _mend_store_file(run: RepairRun) -> None:
    """Repair a store.json that was lost or damaged since the store was opened: without it none opens again."""
    core = run.core
    path = f"{core.path}/{STORE_FILE}"
    try:
        core.folder.require_store_file()
    except CorruptStoreFile as error:
        wrong = f"{error.details['reason'].capitalize()}."
        actions = restoring.actions_for(core.folder.root_fd, core.path, wrong)
        run.do(path, actions, lambda: _make_store_file(run))
    except StoreError as error:
        run.tell(path, error.code, error.message)


def _make_store_file(run: RepairRun) -> None:
    with run.core.committing():
        try:
            run.core.folder.require_store_file()
        except CorruptStoreFile:
            restoring.make_store_file(run.core.folder)


def _mend_marks(run: RepairRun) -> None:
    core = run.core
    path = f"{core.path}/{MARKS_FILE}"
    try:
        Marks.load(core.folder)
    except CorruptMarks as error:
        # as a dry run tells it
        lost = marks_lost(core.folder, quarantine.next_place_of(core.folder, MARKS_FILE)).message
        run.do(path, [Action("quarantine", path, None, None, 0, error.message)], lambda: _set_marks_aside(run))
        run.tell(path, MarksLost.code, lost)
    except CorruptStoreFile:
        pass  # a dry run has not mended it; without it, nothing says whether there were marks
    except StoreError as error:
        run.tell(path, error.code, error.message)


def _set_marks_aside(run: RepairRun) -> None:
    with run.committing_to_file():
        try:
            Marks.load(run.core.folder)
        except CorruptMarks:
            folder = run.core.folder
            if not folder.require_store_file().marked:
                folder.write_store_file(marked=True)  # or it would look as if there had never been marks
            quarantine.move_file(folder, MARKS_FILE)


def _mend_index(run: RepairRun, done: set[bytes]) -> None:
    """Make the index anew if it differs from the bundles; `done` were repaired one by one."""
    core = run.core
    ahead = scanning.read_ahead(core.folder)
    actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
    if actions and not run.dry_run:
        run.succeeds(core.index.path, lambda: _rebuild_index(run, ahead))
    elif actions:
        with core.committing() if core.writable else contextlib.nullcontext():
            actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
        paths = {core.folder.bundle_path(one, suffix) for one in done for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)}
        run.actions += [action for action in actions if action.path not in paths]


def _rebuild_index(run: RepairRun, ahead: scanning.Readings) -> None:
    """Under the lock, folder and index are of one moment: sleeps and deletes of others meanwhile are no fault."""
    with run.committing_to_file():
        actions, _ = reindexing.plan_rebuild(run.core.folder, run.core.index, ahead)
        if actions:
            reindexing.rebuild(run.core.folder, run.core.index, ahead)
    run.actions += actions


# --- the index alone


def rebuild_index(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """See `Store.rebuild_index`."""
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
