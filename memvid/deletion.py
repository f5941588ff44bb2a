"""Deleting: the order in which a session's versions leave, and which bundle files may go.

Owns the steps of a delete and the question who still needs a retired file. Takes no lock: the store holds it.

Rules:
- A file is retired (renamed) before its row goes, and removed after: no crash leaves a row that looks like a loss.
- Whatever a bundle that cannot be read might need stays: while there is one, no file is removed.
- Every delete considers all retired files, for one that was needed before may have lost its last user now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .errors import NoSpace
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX, StoreFolder
from .index import UNREADABLE, Index
from .pins import Pins
from .records import DeleteReport
from .uri import SessionUri


def delete_session(folder: StoreFolder, index: Index, pins: Pins, uri: SessionUri) -> DeleteReport:
    """Retire all bundles of a session, whatever their status, drop their rows, and remove what nothing needs."""
    versions = len(index.versions(uri))
    bundle_ids = index.bundles_of(uri)
    for bundle_id in bundle_ids:
        folder.retire(bundle_id)
    freed = 0
    try:
        index.drop(bundle_ids)
    except NoSpace:  # a full disk must not stop a delete
        freed = _make_room(folder, index, pins, bundle_ids)
        index.drop(bundle_ids)
    freed += remove_unneeded(folder, index, pins)
    files = folder.list_bundles()
    kept = sum(1 for bundle_id in bundle_ids if bundle_id in files)
    unreadable = tuple(
        folder.bundle_path(bundle_id)
        for bundle_id in index.with_status(UNREADABLE)
        if files.get(bundle_id) == LIVE_SUFFIX
    )
    return DeleteReport(uri, versions, len(bundle_ids) - kept, kept, freed, unreadable)


def remove_unneeded(folder: StoreFolder, index: Index, pins: Pins, files: Mapping[bytes, str] | None = None) -> int:
    """Remove all retired files that no manifest names; those that are open wait for their last reader.

    Returns the bytes that this frees. `files` is the folder's listing, if there is one already.
    """
    if index.with_status(UNREADABLE):
        return 0
    listed = folder.list_bundles() if files is None else files
    needed = index.referenced()
    retired = (bundle_id for bundle_id, suffix in listed.items() if suffix == RETIRED_SUFFIX)
    free = pins.wait_or_free(bundle_id for bundle_id in retired if bundle_id not in needed)
    return _remove(folder, (bundle_id for bundle_id in free if bundle_id not in needed))


def remove_waiting(folder: StoreFolder, index: Index, pins: Pins) -> int:
    """Remove the retired files whose last reader has closed; one that is needed after all goes with a later delete.

    Nothing waits in a store with a bundle that cannot be read: there no delete asks for a removal.
    """
    needed = index.referenced()
    return _remove(folder, (bundle_id for bundle_id in pins.wait_or_free(()) if bundle_id not in needed))


def _remove(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> int:
    return sum(folder.remove(bundle_id, RETIRED_SUFFIX) for bundle_id in bundle_ids)


def _make_room(folder: StoreFolder, index: Index, pins: Pins, bundle_ids: Sequence[bytes]) -> int:
    """Free a session's bytes while its rows still stand. The newest file is only emptied: as long as its name is there
    the rows beside it mean a delete that was cut off, not a loss."""
    if index.with_status(UNREADABLE):
        return 0
    needed = index.referenced(but_for=bundle_ids)
    free = pins.wait_or_free(bundle_id for bundle_id in bundle_ids if bundle_id not in needed)
    freed = _remove(folder, (bundle_id for bundle_id in free if bundle_id in bundle_ids[:-1]))
    return freed + (folder.empty_retired(bundle_ids[-1]) if bundle_ids[-1] in free else 0)
