"""Checks the disk without changing it: one session, or a whole store. Repairs nothing.

A damaged frame is a finding of its pack, and one of a version only where no other pack has a sound copy of the block.
"""

from __future__ import annotations

from collections.abc import Callable

from ..folder.marks import findings_of_missing
from ..format.records import Progress, VerifyReport
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.removal import packs_of
from .check import Check
from .findings import findings_of_pack, findings_of_rivals, findings_of_store


def verify_store(
    core: StoreCore,
    uri: SessionUri | None,
    *,
    deep: bool,
    on_progress: Progress | None,
    pace: Callable[[int], None] | None,
) -> VerifyReport:
    """See `Store.verify`. For one session: its manifests, and its blocks in all packs that have them. For all: every
    manifest and pack, the small files, the journal, and what belongs to nobody.

    Raises:
        StoreClosed, StoreIoError: the store's folder cannot be listed. And what `pace` raises.
    """
    core.look_again()
    check = Check(core, deep, on_progress, pace)
    if uri is None:
        findings = findings_of_store(core)
        check.read_packs(core.folder.list_packs())
        rows = core.index.rows_of(core.index.bundle_ids())
        others = core.folder.list_versions() - rows.keys()
    else:
        findings, others = findings_of_missing(core.folder, core.index.knows, uri), set()
        rows = {row.bundle_id: row for row in core.index.versions(uri)}
        wanted = {block_id for bundle_id in rows for block_id in core.needs.of(bundle_id)}
        check.read_packs(packs_of(core, wanted), wanted)
    findings += findings_of_rivals(core, rows.values())
    check.read_versions(rows.values(), others)
    check.look_for_blocks()
    of_versions, damaged = check.tell()
    of_packs = [
        finding
        for name, pack in check.faulty.items()
        if core.folder.has(name)  # else it was removed meanwhile
        for finding in findings_of_pack(core, pack)
    ]
    return VerifyReport(
        (*findings, *of_packs, *of_versions),
        check.bundles,
        check.blocks,
        check.bytes_checked,
        damaged=tuple(damaged),
    )
