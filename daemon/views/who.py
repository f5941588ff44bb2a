"""Who needs a block, a version or a pack of a store."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from ...memvid.store import Store
from ..api.blocks import Needer, WhoResult
from .blocks import MAX_PROBLEMS_TOLD

MAX_NEEDERS_TOLD: Final = 1000


def who_needs(store: Store, text: str) -> WhoResult:
    """What a text names, and the versions that need it. Raises as `Store.who_needs`."""
    found = store.who_needs(text)
    thing, sizes, needers = found.thing, found.sizes, found.needers
    of: dict[str, list[bytes]] = defaultdict(list)
    for block_id, versions in needers.of.items():
        for bundle_id in versions:
            of[bundle_id].append(block_id)
    if thing.kind == "version":
        of.setdefault(thing.id, [])  # it needs itself, though it has no block
    rows = store.index.rows_of(of)
    order = sorted(rows.values(), key=lambda row: (row.session, row.version, row.created_ns))
    told, bases = order[:MAX_NEEDERS_TOLD], set(store.bases().values())
    marks = {uri: store.marks_to_show(uri) for uri in {row.uri for row in told}}
    beside = found.beside_bytes
    return WhoResult(
        kind=thing.kind,
        id=thing.id,
        path=f"{store.path}/{thing.name}" if thing.name else "",
        blocks=len(sizes),
        stored_bytes=beside + sum(sizes.values()),
        unneeded_bytes=sum(size for each, size in sizes.items() if not needers.of[each]) + (0 if of else beside),
        needers=tuple(
            Needer(
                session=row.session,
                version=row.version,
                bundle_id=row.bundle_id,
                blocks=len(of[row.bundle_id]),
                stored_bytes=sum(sizes[each] for each in of[row.bundle_id]),
                alone_bytes=sum(sizes[each] for each in of[row.bundle_id] if len(needers.of[each]) == 1)
                + (beside if row.bundle_id == thing.id or len(of) == 1 else 0),
                tags=marks[row.uri].of(row.bundle_id).tags,
                pinned=marks[row.uri].of(row.bundle_id).pinned,
                stripped=marks[row.uri].of(row.bundle_id).stripped,
                journal=row.bundle_id in bases,
            )
            for row in told
        ),
        needers_left_out=len(order) - len(told),
        problems=(*needers.unknown, *found.problems)[:MAX_PROBLEMS_TOLD],
    )
