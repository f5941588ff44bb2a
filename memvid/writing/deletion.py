"""Deletes versions: their tags and pins, their rows, their manifests, the packs that only these needed, and their
strips. Needs no disk space.

Rules:
- A tag or a pin goes before its version: one without a version tells of a version that is missing. Where there is no
  room to write the others anew, it goes last. A strip always goes last: without it its version would count as damaged.
- The index's file lets go of a version before its manifest goes: else an opening would call it missing.
- Manifests go oldest first. The session's part of the journal goes before the newest manifest: so what a cut-off delete
  leaves is a session without its oldest versions, or without its last turns, or none.
- Turns of others that stand behind a version become versions of their own before it goes. Turns that it covers are void
  in the file by then: they would come back with the next opening.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

from ..answers import DeleteReport, Finding, VersionInfo
from ..disk.paths import undoing
from ..errors import CorruptMarks, DurabilityLost, MarksLost, StoreError
from ..folder.folder import manifest_name
from ..folder.journals_beside import require_beside
from ..folder.marks import MARKS_FILE, Marks, marks_in
from ..uri import SessionUri
from .core import StoreCore
from .removal import packs_with, remove_unneeded


def delete_versions(core: StoreCore, uri: SessionUri, rows: Sequence[VersionInfo], *, whole: bool) -> DeleteReport:
    """Delete versions of a session (`rows`, oldest first). whole: these are all, and its turns and its marks go too.
    Call it while `committing`.

    Raises:
        UnsafePath: a journal beside the open one is refused; nothing is gone.
        StoreIoError, DurabilityLost: a part of it may be gone.
    """
    bundle_ids = [row.bundle_id for row in rows]
    if whole:
        require_beside(core.journal)  # before anything goes
    marks = marks_in(core.folder) if whole else None
    marked = marks.session(uri).bundle_ids if marks is not None else frozenset()
    candidates = packs_with(core, bundle_ids)
    with _unmarking(core, marked.union(bundle_ids)) as problems:
        bytes_freed = _drop(core, bundle_ids[:-1])
        if whole:
            core.journal.drop(uri)
        bytes_freed += _drop(core, bundle_ids[-1:])
        removed = remove_unneeded(core, candidates)
    return DeleteReport(
        str(uri),
        versions_deleted=len(rows),
        bytes_freed=bytes_freed + removed.size_bytes,
        problems=(*removed.problems, *problems, *core.seen_heads.left_elsewhere(uri)),
    )


def drop_versions(core: StoreCore, bundle_ids: Sequence[str]) -> None:
    """Let versions go, durably; their packs stay. Call it while `committing`. Raises StoreIoError, DurabilityLost: the
    first ones may be gone."""
    with _unmarking(core, bundle_ids):
        _drop(core, bundle_ids)


def _drop(core: StoreCore, bundle_ids: Sequence[str]) -> int:
    """In this order: journal, index, then manifests, durably. The bytes freed."""
    if not bundle_ids:
        return 0
    core.journal.settle(removing=False)
    core.index.forget_in_file(core.folder, bundle_ids)
    bytes_freed = 0
    names = [manifest_name(bundle_id) for bundle_id in bundle_ids]
    for bundle_id, name in zip(bundle_ids, names, strict=True):
        rows = core.index.rows_of([bundle_id])
        core.index.drop([bundle_id])  # first: what fails here leaves the version as it was
        with undoing(partial(_enter_again, core, rows.values())):
            bytes_freed += core.folder.remove(name)
    core.folder.flush(names)
    return bytes_freed


def _enter_again(core: StoreCore, rows: Iterable[VersionInfo]) -> None:
    with contextlib.suppress(StoreError):  # else the next opening finds it
        core.index.add_all(rows)


@contextlib.contextmanager
def _unmarking(core: StoreCore, bundle_ids: Collection[str]) -> Iterator[list[Finding]]:
    """Take the marks of versions that go within this. Gives a list: afterwards it tells of marks that stayed, since
    they found no room. Raises DurabilityLost."""
    problems: list[Finding] = []
    _unmark(core, bundle_ids, strips=False)
    yield problems
    core.marked_still.difference_update(core.index.rows_of(core.marked_still))  # they came back, and have their marks
    path = f"{core.path}/{MARKS_FILE}"
    if (error := _unmark(core, core.marked_still.union(bundle_ids), strips=True)) is not None:
        message = (
            f"{path} still has marks of what is deleted: {error.message} At the next start each tag and pin among them "
            "tells of a version that is missing, and no pack is removed until it is taken away (`torpor untag`, "
            "`torpor unpin`)."
        )
        problems.append(Finding(path, error.code, message))


def _unmark(core: StoreCore, bundle_ids: Collection[str], *, strips: bool) -> StoreError | None:
    """Where marks stay as they are, for there is no room or they cannot be read: the reason; None for the latter, which
    others tell."""
    core.marked_still.update(bundle_ids)
    try:
        marks = Marks.load(core.folder)
        rest = marks.without_bundles(bundle_ids, strips=strips)
        if rest.sessions != marks.sessions:
            rest.save(core.folder)
        core.marked_still.difference_update(bundle_ids)
    except DurabilityLost:
        raise
    except (CorruptMarks, MarksLost):
        pass
    except StoreError as error:
        return error
    return None
