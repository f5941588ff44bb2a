"""Strip: keeps the ledger and the text of versions, and lets their keys and values go.

Order: turns that stand behind the versions become versions → a mark says that they need no keys and values, durably →
the packs with their blocks are written anew without what no other version needs. A crash behind the mark leaves whole
versions that the next repack strips.

The manifest stays, with its id, tags and receipt, and so do the blocks' headers, which have the tokens. A version whose
blocks come back, since another one needs them, is whole again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..answers import MaintenanceReport
from ..errors import BlockMissing
from ..folder.folder import manifest_name
from ..folder.marks import Marks
from ..format.records import IndexRow
from ..recovery.replaying import keep_turns_behind
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.removal import packs_with
from ..writing.stripped import count_stripped
from .repack import repack_packs
from .repack_plan import CLEARING


def strip(core: StoreCore, rows: Sequence[IndexRow], *, dry_run: bool) -> MaintenanceReport:
    """Strip these versions. See `Store.strip`."""
    core.begin_upkeep(dry_run=dry_run)
    run = MaintenanceRun(core, "strip", dry_run)
    before = Marks.load(core.folder).stripped  # nothing is done to a store without marks
    if not dry_run:
        with core.committing(), core.journaling():  # no turn may come behind a version between
            rows = _with_turns_kept(core, rows)
            _mark(run, rows)
    for row in rows:
        path = core.folder.path_of(manifest_name(row.bundle_id))
        if core.missing_of(core.needs.of(row.bundle_id), stripped=True):
            what = f"Version {row.version} of {row.uri} lacks a part of its tokens: a block is in no pack, not even its"
            run.tell(path, BlockMissing.code, f"{what} header. `torpor verify {row.uri}` says what to put back.")
        if row.bundle_id not in before:
            run.did("strip", path, 0, "Its tokens and text stay; its keys and values are not needed any more.", row)
    ids = [row.bundle_id for row in rows]
    repack_packs(run, packs_with(core, ids), CLEARING, strips=ids if dry_run else ())
    if not dry_run:
        _count(core, {row.uri for row in rows})
    return run.report()


def _with_turns_kept(core: StoreCore, rows: Sequence[IndexRow]) -> list[IndexRow]:
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


def _mark(run: MaintenanceRun, rows: Sequence[IndexRow]) -> None:
    before = marks = Marks.load(run.core.folder)
    for row in rows:
        marks = marks.strip(row.uri, [row.bundle_id])
    if marks.stripped != before.stripped:
        run.bytes_written += marks.save(run.core.folder)
