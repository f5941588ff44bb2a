"""Prune: drops the versions that a retention does not keep.

Owns the plan of a prune, its report, and in how large steps it commits. What a retention keeps is in retention.py, how
a version leaves in deletion.py.

Rules:
- Only what was planned is dropped, and only if a second look inside the commit, with the marks as they are then, says
  the same: a version that is tagged meanwhile stays.
- A step retires the versions of some sessions, oldest first, and drops their rows at once. A crash leaves each version
  there or gone; what is gone is only what the retention did not keep. A second prune does the rest.
- Files go last, all at once, for one listing of the folder serves them all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from . import deletion
from .core import StoreCore
from .errors import StoreError
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX
from .index import SHADOWED, UNREADABLE
from .marks import Marks
from .records import Action, Finding, IndexRow, MaintenanceReport
from .retention import Kept, Retention, RetentionPlan, plan_retention
from .uri import SessionUri

_STEP_VERSIONS: Final = 256
"""Versions dropped in one commit, or those of one session: a sleep waits no longer than for so many renames."""


def prune(core: StoreCore, retention: Retention, uri: SessionUri | None, *, dry_run: bool) -> MaintenanceReport:
    """See `Store.prune`."""
    if dry_run:
        core.require_open()
    else:
        core.require_writable()
    now_ns = time.time_ns()
    plan = _plan(core, None if uri is None else [uri], retention, now_ns)
    if dry_run:
        return _expected(core, plan)
    dropped: list[IndexRow] = []
    freed: dict[bytes, int] = {}
    for step in _steps(plan.drop):
        dropped += _drop(core, step, retention, now_ns, freed)
    with core.committing():
        for bundle_id, size_bytes in deletion.remove_unneeded(core.folder, core.index, core.pins).items():
            freed[bundle_id] = freed.get(bundle_id, 0) + size_bytes
    return _report(core, plan, dropped, freed, dry_run=False)


def _plan(core: StoreCore, uris: Iterable[SessionUri] | None, retention: Retention, now_ns: int) -> RetentionPlan:
    marks = Marks.load(core.folder)
    index = core.index
    rows = index.all_rows() if uris is None else [row for uri in uris for row in index.versions(uri)]
    return plan_retention(rows, marks, retention, now_ns)


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
    core: StoreCore, step: Sequence[IndexRow], retention: Retention, now_ns: int, freed: dict[bytes, int]
) -> list[IndexRow]:
    with core.committing():
        planned = {row.bundle_id for row in step}
        again = _plan(core, dict.fromkeys(row.uri for row in step), retention, now_ns)
        rows = [row for row in again.drop if row.bundle_id in planned]
        freed_for_room = deletion.retire(core.folder, core.index, core.pins, _with_rivals(core, rows))
        if freed_for_room:
            freed[rows[-1].bundle_id] = freed_for_room
        return rows


def _with_rivals(core: StoreCore, rows: Sequence[IndexRow]) -> list[bytes]:
    """The bundles of these versions, before each those that lost it to the one that counts: without that one, the next
    index made anew would put one of them in its place."""
    marks = Marks.load(core.folder)
    rivals: dict[tuple[SessionUri, int], list[bytes]] = {}
    for bundle_id in core.index.with_status(SHADOWED):
        stored = core.index.stored(bundle_id)
        if stored is not None and stored.row is not None and not marks.of(bundle_id):
            rivals.setdefault((stored.row.uri, stored.row.version), []).append(bundle_id)
    return [one for row in rows for one in (*rivals.get((row.uri, row.version), ()), row.bundle_id)]


# --- the report


def _expected(core: StoreCore, plan: RetentionPlan) -> MaintenanceReport:
    """What a prune would do now."""
    leaving = {row.bundle_id: row.bundle_bytes for row in plan.drop}
    freed: dict[bytes, int] = {}
    if leaving and not core.index.with_status(UNREADABLE):
        retired = [one for one, suffix in core.folder.list_bundles().items() if suffix == RETIRED_SUFFIX]
        asked = [*leaving, *(one for one in retired if one not in leaving)]
        for bundle_id in deletion.unneeded(core.index, asked, but_for=leaving):
            if not core.pins.count(bundle_id):
                freed[bundle_id] = core.folder.size_of(bundle_id)
    return _report(core, plan, plan.drop, freed, dry_run=True)


def _report(
    core: StoreCore, plan: RetentionPlan, dropped: Sequence[IndexRow], freed: Mapping[bytes, int], *, dry_run: bool
) -> MaintenanceReport:
    suffix = LIVE_SUFFIX if dry_run else RETIRED_SUFFIX
    actions = [_dropped(core, row, freed.get(row.bundle_id), suffix) for row in dropped]
    named = {row.bundle_id for row in dropped}
    for bundle_id, size_bytes in freed.items():
        if bundle_id not in named and size_bytes:
            path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            actions.append(Action("remove", path, None, None, size_bytes, "nothing needs its blocks any more"))
    actions += [_kept(core, kept) for kept in plan.keep if _only_marked(kept)]
    problems = [_unread(core, bundle_id) for bundle_id in core.index.with_status(UNREADABLE)] if dropped else []
    return MaintenanceReport("prune", dry_run, tuple(actions), sum(freed.values()), 0, tuple(problems))


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


def _unread(core: StoreCore, bundle_id: bytes) -> Finding:
    try:
        core.open_bundle(bundle_id).close()
        code = "unreadable"  # it was, when the store was opened; the next opening will take it
    except StoreError as error:
        code = error.code
    path = core.folder.bundle_path(bundle_id)
    message = f"{path} cannot be read, so nobody knows what it needs: until it can be, no file is removed."
    return Finding(path, code, message)
