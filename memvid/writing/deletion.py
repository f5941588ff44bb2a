"""Deletes versions: their rows, their manifests, then the packs that only these needed. Needs no disk space.

Rules:
- The index's file lets go of a version before its manifest goes: else an opening would call it missing.
- Manifests go oldest first. The session's part of the journal goes before the newest manifest: so what a cut-off delete
  leaves is a session without its oldest versions, or without its last turns, or none.
- Turns of others that stand behind a version become versions of their own before it goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial

from ..disk.paths import undoing
from ..errors import DurabilityLost, StoreError
from ..folder.folder import manifest_name
from ..folder.marks import Marks
from ..format.records import DeleteReport, IndexRow
from ..uri import SessionUri
from .core import StoreCore
from .removal import packs_with, remove_unneeded


def delete_session(
    core: StoreCore, uri: SessionUri, rows: Sequence[IndexRow], unreadable: tuple[str, ...] = ()
) -> DeleteReport:
    """Delete all versions of a session (`rows`, oldest first), its turns and its marks. `unreadable` are manifests that
    may be the session's, too, for the report. Call it while `committing`.

    Raises:
        StoreIoError, DurabilityLost: a part of it may be gone.
    """
    candidates = packs_with(core, (row.bundle_id for row in rows))
    bytes_freed = drop_versions(core, [row.bundle_id for row in rows[:-1]])
    core.journal.drop(uri)
    bytes_freed += drop_versions(core, [row.bundle_id for row in rows[-1:]])
    _drop_marks(core, uri)
    removed = remove_unneeded(core, candidates)
    return DeleteReport(
        uri,
        versions_deleted=len(rows),
        bytes_freed=bytes_freed + removed.size_bytes,
        unreadable=unreadable,
        problems=removed.problems,
    )


def drop_versions(core: StoreCore, bundle_ids: Sequence[bytes]) -> int:
    """Let versions go, in this order: index, then manifests, durably. The bytes freed; their packs stay. Call it while
    `committing`. Raises StoreIoError, DurabilityLost: the first ones may be gone."""
    if not bundle_ids:
        return 0
    core.index.forget_in_file(core.folder, bundle_ids)
    bytes_freed = 0
    names = [manifest_name(bundle_id) for bundle_id in bundle_ids]
    for bundle_id, name in zip(bundle_ids, names, strict=True):
        rows = core.index.rows_of([bundle_id])
        core.index.drop([bundle_id])  # first: what fails here leaves the version as it was
        with undoing(partial(_enter_again, core, rows.values())):
            bytes_freed += core.folder.remove(name, flushing=False)
    core.folder.flush(names)
    return bytes_freed


def _enter_again(core: StoreCore, rows: Iterable[IndexRow]) -> None:
    with contextlib.suppress(StoreError):  # else the next opening finds it
        core.index.add_all(rows)


def _drop_marks(core: StoreCore, uri: SessionUri) -> None:
    """The session's marks go too. Where that fails they name nothing, and the next repack lets them go. Raises
    DurabilityLost."""
    try:
        marks = Marks.load(core.folder)
        if marks.session(uri):
            marks.without(uri).save(core.folder)
    except DurabilityLost:
        raise
    except StoreError:
        return
