"""Strip: keeps the ledger and the text of versions, and lets their keys and values go.

Order: turns that stand behind the versions become versions → a mark says that they need no keys and values, durably →
the packs with their blocks are written anew without what no other version needs. A crash behind the mark leaves whole
versions that the next repack strips.

The manifest stays, with its id, tags and receipt, and so do the blocks' headers, which have the tokens. A version whose
blocks come back, since another one needs them, is whole again.

Where a store has too little room, the plan says which versions are stripped (`strip_plan.py`). First goes what nothing
needs. Then the plan's first steps are taken, a part at a time, but for versions that a tag, a use or a turn has come to
since. A pack that is damaged stays, and stops no other one from going.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ..answers import MaintenanceReport, VersionInfo
from ..disk.clock import now_ns
from ..errors import BlockMissing, LimitExceeded, StoreError
from ..folder.journals_beside import bases_beside
from ..folder.marks import MARKS_FILE, Marks
from ..limits import MAX_STRIPS
from ..recovery.replaying import keep_turns_behind
from ..units import format_count, format_plural
from ..uri import SessionUri, parse_reference
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.needs import Needed
from ..writing.removal import needed_now, packs_with
from ..writing.stripped import count_stripped
from .repack import repack_packs
from .repack_plan import CLEARING, RepackPolicy
from .strip_plan import Planned, RoomPolicy, Stock, plan_deletes, plan_strips

_UNNEEDED: Final = RepackPolicy(max_packs=CLEARING.max_packs)
"""What nothing needs leaves the disk, where it is more than a quarter of a pack."""

_NO_MORE: Final = (
    f"A store has at most {format_count(MAX_STRIPS)} stripped versions. No more keys and values go behind these: "
    "`torpor prune --keep-last 1` removes earlier versions."
)

_AT_ONCE: Final = 256
"""Steps of a plan in a part: no turn is acknowledged while they are marked, and a use saves those of later parts."""


def strip(core: StoreCore, rows: Sequence[VersionInfo], *, dry_run: bool) -> MaintenanceReport:
    """Strip these versions. See `Store.strip`."""
    core.begin_upkeep(dry_run=dry_run)
    run = MaintenanceRun(core, "strip", dry_run)
    before = Marks.load(core.folder).stripped  # nothing is done to a store without marks
    if not dry_run:
        with core.committing(), core.journaling():  # no turn may come behind a version between
            rows = _with_turns_kept(core, rows)
            _mark(run, rows)
    ids = [row.bundle_id for row in rows]
    needed = needed_now(core, strips=ids, pins=False)
    for row in rows:
        if core.missing_of(core.needs.of(row.bundle_id), stripped=True):
            what = f"Version {row.version} of {row.uri} lacks a part of its tokens: a block is in no pack, not even its"
            message = f"{what} header. `torpor verify {row.uri}` says what to put back."
            run.tell(core.folder.manifest_path(row.bundle_id), BlockMissing.code, message)
        if row.bundle_id not in before:
            run.did("strip", row, 0, _what_stays(core, row, needed))
    repack_packs(run, packs_with(core, ids), CLEARING, strips=ids if dry_run else ())
    if not dry_run:
        _count(core, {row.uri for row in rows})
    return run.report()


def _what_stays(core: StoreCore, row: VersionInfo, needed: Needed) -> str:
    """needed: as if it were stripped."""
    ends = core.needs.ends()
    shared = [each for each in core.needs.of(row.bundle_id) if needed.has_whole(each) and each not in ends]
    if not shared:
        return "Its tokens and text stay; its keys and values are not needed any more."
    return f"Its tokens and text stay, and keys and values of {format_plural(len(shared), 'block')} that others need."


def plan_room(
    core: StoreCore, policy: RoomPolicy, busy: Collection[SessionUri], elsewhere: Collection[str]
) -> MaintenanceReport:
    """See `Store.plan_room`."""
    core.require_open()
    run = MaintenanceRun(core, "strip", dry_run=True)
    stock, now = replace(_stock(core, busy), elsewhere=elsewhere), now_ns()
    for step in plan_deletes(stock, policy, now):
        size_bytes = sum(row.bundle_bytes for row in step.rows)
        run.freed("remove", step.rows[-1], size_bytes, step.reason)
    planned = set[str]()
    for step in _strips(core, stock, policy, now):
        _tell(run, step)
        run.bytes_freed += step.bytes_freed
        planned.update(row.bundle_id for row in step.rows)
    if len(stock.marks.stripped) + len(planned) >= MAX_STRIPS:
        run.tell(core.folder.path_of(MARKS_FILE), LimitExceeded.code, _NO_MORE)
    for step in _strips(core, stock, policy, now, even_recent=True):
        for row in step.rows:
            if row.bundle_id not in planned:
                run.did("keep", row, 0, f"{step.reason}; it stays for an hour behind that")
    return run.report()


def unused(
    core: StoreCore, policy: RoomPolicy, busy: Collection[SessionUri], uri: SessionUri | None
) -> list[SessionUri]:
    """See `Store.unused`."""
    core.require_open()
    rows = None if uri is None else core.index.versions(uri)
    return [step.uri for step in plan_deletes(_stock(core, busy, rows), policy, now_ns())]


def make_room(
    core: StoreCore,
    most_bytes: int,
    policy: RoomPolicy,
    busy: Callable[[], Collection[SessionUri]],
    elsewhere: Callable[[], Collection[str]],
    or_nothing: int | None,
    should_stop: Callable[[], bool],
) -> MaintenanceReport:
    """See `Store.make_room`."""
    core.begin_upkeep(dry_run=False)
    run, held_bytes = MaintenanceRun(core, "strip", dry_run=False), core.folder.held_bytes
    goes_on = held_bytes() <= most_bytes or repack_packs(run, None, _UNNEEDED, should_stop=should_stop)
    while goes_on and (before := held_bytes()) > most_bytes:
        stock = replace(_stock(core, busy()), elsewhere=elsewhere())
        steps = _first(core, stock, before - most_bytes, policy)
        if or_nothing is not None and before - sum(step.bytes_freed for step in steps) > or_nothing:
            break
        parts = (steps[at : at + _AT_ONCE] for at in range(0, len(steps), _AT_ONCE))
        goes_on = all(not should_stop() and _take(run, part, busy, should_stop) for part in parts)
        if held_bytes() >= before:
            break  # nothing may go, or what went is still read
    if stripped := {action.session for action in run.actions if action.kind == "strip"}:
        _count(core, {parse_reference(session) for session in stripped if session is not None})
    return run.report()


def _first(core: StoreCore, stock: Stock, too_much: int, policy: RoomPolicy) -> list[Planned]:
    """The first steps of the plan, as many as free so many bytes."""
    steps = list[Planned]()
    for step in _strips(core, stock, policy, now_ns()):
        steps.append(step)
        too_much -= step.bytes_freed
        if too_much <= 0:
            break
    return steps


def _take(
    run: MaintenanceRun,
    steps: Sequence[Planned],
    busy: Callable[[], Collection[SessionUri]],
    should_stop: Callable[[], bool],
) -> bool:
    """Strip what is planned, but for what has to stay since. Gives as `repack_packs`."""
    core, taken = run.core, list[Planned]()
    with core.committing(), core.journaling():
        now = _stock(core, busy(), rows=())
        for step in steps:
            left = tuple(row for row in step.rows if core.index.knows(row.bundle_id) and not now.keeps(row))
            taken.append(replace(step, rows=left))
        _mark(run, rows := [row for step in taken for row in step.rows])
    for step in taken:
        _tell(run, step)
    packs = packs_with(core, [row.bundle_id for row in rows])
    return repack_packs(run, packs, CLEARING, should_stop=should_stop)


def _tell(run: MaintenanceRun, step: Planned) -> None:
    """Tell of a strip: what it frees with the last of its versions."""
    for row in step.rows:
        run.did("strip", row, step.bytes_freed if row is step.rows[-1] else 0, step.reason)


def _stock(core: StoreCore, busy: Collection[SessionUri], rows: Sequence[VersionInfo] | None = None) -> Stock:
    """What the store has now. rows: None for all."""
    return Stock(
        core.index.all_rows() if rows is None else rows,
        Marks.load(core.folder),
        {*busy, *core.journal.uris()},
        bases_beside(core.journal).union(core.bases().values()),
        core.index.written(),
    )


def _strips(
    core: StoreCore, stock: Stock, policy: RoomPolicy, now: int, even_recent: bool = False
) -> Iterator[Planned]:
    core.needs.read_ahead()
    held, bytes_of = {*core.pins.blocks(), *core.needs.ends()}, partial(_bytes_beyond_head, core)
    return plan_strips(
        stock, policy, now, blocks_of=core.needs.of, held=held, bytes_of=bytes_of, even_recent=even_recent
    )


def _bytes_beyond_head(core: StoreCore, block_id: bytes) -> int:
    """The bytes of a block in a pack without its header, which stays; 0 where no pack has it whole."""
    for name in core.index.packs_of(block_id):
        with contextlib.suppress(StoreError), core.files.holding(name) as file:
            if (frame := file.frames.get(block_id)) is not None:
                return frame.frame_bytes - frame.head_bytes
    return 0


def _with_turns_kept(core: StoreCore, rows: Sequence[VersionInfo]) -> list[VersionInfo]:
    """Make versions of the turns that stand behind these versions: they need their blocks. Where the versions are all
    of a session, its new one is stripped with them."""
    asked = {row.bundle_id for row in rows}
    whole = {row.uri for row in rows if all(each.bundle_id in asked for each in core.index.versions(row.uri))}
    keep_turns_behind(core, None, asked)
    made = [row for uri in sorted(whole) for row in core.index.versions(uri) if row.bundle_id not in asked]
    return [*rows, *made]


def _count(core: StoreCore, uris: Collection[SessionUri]) -> None:
    """Listings tell of what is left of all stripped versions of these sessions: the last one may have let go what the
    others had. Who reads the files beside a daemon sees it, too."""
    with core.committing():
        marks = Marks.load(core.folder)
        count_stripped(core, {each for uri in uris for each in marks.session(uri).stripped})
        core.index.save(core.folder, always=True)


def _mark(run: MaintenanceRun, rows: Sequence[VersionInfo]) -> None:
    before, ids = Marks.load(run.core.folder), dict[SessionUri, list[str]]()
    for row in rows:
        ids.setdefault(row.uri, []).append(row.bundle_id)
    marks = before.strip(ids)
    if marks.stripped != before.stripped:
        run.bytes_written += marks.save(run.core.folder)
