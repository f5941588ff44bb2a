"""What an opening does: makes or claims a store, removes leftovers, and brings the index in line with the folder.

The names in `versions` and `packs` are the truth. A file that the index does not know is read; a pack without a file
leaves it. A version without a manifest stays, as one that is missing: it may be put back, also in a bundle of format 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ..answers import Finding
from ..disk.lock import StoreLock
from ..disk.paths import stamp_of, stat_name, undoing
from ..errors import NoSpace
from ..folder.folder import StoreFolder
from ..folder.marks import MARKS_FILE, create_store, findings_of_missing, stripped_in
from ..folder.store_file import has_store_file, load_store_uuid, require_creatable, uuid_of_format_1
from ..format.manifest import encode_manifest_file
from ..format.records import OpenReport
from ..index.index import INDEX_FILE, Index
from ..writing.core import StoreCore, drop_superseded
from ..writing.stripped import count_stripped
from ..writing.unreadable import findings_without_manifest

_TRIES = 10


def claim(root_fd: int, path: str) -> tuple[StoreLock, str, tuple[Finding, ...]]:
    """Take a store's lock; make the store if the folder is empty, and carry over one of format 1. A store of a later
    version, or a folder of other things, is left as it is. The lock, the store's uuid, and what could not be carried
    over."""
    from .carrying_over import carry_over, finish

    if uuid_of_format_1(root_fd, path) is not None:
        pass
    elif has_store_file(root_fd, path):
        load_store_uuid(root_fd, path)
    else:
        require_creatable(root_fd, path, (MARKS_FILE,))
    lock = StoreLock(root_fd, path)
    findings: tuple[Finding, ...] = ()
    with undoing(lock.close):
        if uuid_of_format_1(root_fd, path) is not None:
            findings = carry_over(root_fd, path)
        elif not has_store_file(root_fd, path):
            create_store(root_fd, path)
        store_uuid = load_store_uuid(root_fd, path)
        finish(root_fd, path, store_uuid)
        return lock, store_uuid, findings


def load_index(folder: StoreFolder, *, writable: bool) -> tuple[Index, str | None]:
    """The index as its file tells it, and why there is none, if so. To read beside a daemon: of a moment at which no
    version is about to be deleted. Raises UnsafePath, StoreIoError."""
    for last in range(_TRIES - 1, -1, -1):
        before = _stamp_of_file(folder)
        index, why = Index.load(folder)
        is_whole = writable or not index.bundle_ids() - folder.list_versions()
        if not last or is_whole or _stamp_of_file(folder) == before:
            break  # else a version is being deleted: it leaves the file before its manifest goes
        index.close()
    return index, why


def _stamp_of_file(folder: StoreFolder) -> tuple[int, ...] | None:
    try:
        return stamp_of(stat_name(folder.root_fd, INDEX_FILE, f"{folder.path}/{INDEX_FILE}"))
    except FileNotFoundError:
        return None


def bring_in_line(core: StoreCore, why: str | None, findings: Sequence[Finding] = ()) -> OpenReport:
    """Let the index tell of what is in the folder. why: there was no index to begin with, for this reason. findings:
    what the opening has found so far.

    Raises:
        StoreIoError, UnsafePath: the folder cannot be listed.
    """
    folder, index = core.folder, core.index
    leftovers = len(folder.remove_leftovers()) if core.has_lock else 0
    known = index.bundle_ids()
    if core.has_lock:
        for bundle_id in sorted(known - folder.list_versions()):
            _came_back(core, bundle_id)
    unreadable = [*findings, *core.look_again()]
    if core.has_lock:
        for bundle_id in sorted(core.unreadable_versions):
            _came_back(core, bundle_id)
    unreadable += core.read_again()
    if added := index.bundle_ids() - known:
        count_stripped(core, added & (stripped_in(folder) or frozenset()))
    there = folder.list_versions()
    missing = core.still_known(index.bundle_ids() - there)  # a daemon beside us may have deleted some since
    missing -= drop_superseded(core, missing)
    unreadable += findings_without_manifest(folder, index.rows_of(missing).values())
    unreadable += findings_of_missing(folder, index.knows)
    if why is not None and core.has_lock:
        index.save(folder, always=True)  # a file that cannot be used does not stay, and this work is not done twice
    return OpenReport(
        index_rebuilt=why if there else None,
        rows_added=len(index.bundle_ids() - known),
        leftovers_removed=leftovers,
        unreadable=tuple(unreadable),
    )


def _came_back(core: StoreCore, bundle_id: str) -> None:
    """Give a version without a sound manifest that of its bundle of format 1, if this was put back."""
    from .carrying_over import manifest_in_bundle

    encoded = manifest_in_bundle(core.folder, bundle_id)
    with contextlib.suppress(NoSpace):
        if encoded is not None:
            core.folder.write_manifest(bundle_id, encode_manifest_file(encoded))
