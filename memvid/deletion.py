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
from .folder import RETIRED_SUFFIX, StoreFolder
from .index import UNREADABLE, Index
from .pins import Pins
from .records import DeleteReport
from .uri import SessionUri


def delete_session(folder: StoreFolder, index: Index, pins: Pins, uri: SessionUri) -> DeleteReport:
    """Retire all bundles of a session, whatever their status, drop their rows, and remove what nothing needs."""
    versions = len(index.versions(uri))
    bundle_ids = index.bundles_of(uri)
    freed = retire(folder, index, pins, bundle_ids) + remove_unneeded(folder, index, pins)
    kept = sum(folder.has_bundle(bundle_id) for bundle_id in bundle_ids)
    unreadable = tuple(
        folder.bundle_path(bundle_id) for bundle_id in index.with_status(UNREADABLE) if folder.has_bundle(bundle_id)
    )
    return DeleteReport(uri, versions, len(bundle_ids) - kept, kept, freed, unreadable)


def retire(folder: StoreFolder, index: Index, pins: Pins, bundle_ids: Sequence[bytes]) -> int:
    """Make versions mere holders of blocks: their files are renamed in this order, then their rows go, all at once.

    Returns the bytes that this had to free: a full disk has no room to drop rows, and must not stop a delete.
    """
    for bundle_id in bundle_ids:
        folder.retire(bundle_id)
    try:
        index.drop(bundle_ids)
    except NoSpace:
        freed = _make_room(folder, index, pins, bundle_ids)
        index.drop(bundle_ids)
        return freed
    return 0


def remove_unneeded(folder: StoreFolder, index: Index, pins: Pins, files: Mapping[bytes, str] | None = None) -> int:
    """Remove all retired files that no other bundle needs; those that are open wait for their last reader.

    Returns the bytes that this frees. `files` is the folder's listing, if there is one already.
    """
    if index.with_status(UNREADABLE):
        return 0
    listed = folder.list_bundles() if files is None else files
    retired = [bundle_id for bundle_id, suffix in listed.items() if suffix == RETIRED_SUFFIX]
    free = pins.wait_or_free(_unneeded(index, retired))
    return _remove(folder, _unneeded(index, free))


def remove_waiting(folder: StoreFolder, index: Index, pins: Pins) -> int:
    """Remove the retired files whose last reader has closed; one that is needed after all goes with a later delete.

    Nothing waits in a store with a bundle that cannot be read: there no delete asks for a removal.
    """
    return _remove(folder, _unneeded(index, pins.wait_or_free(())))


def _unneeded(index: Index, bundle_ids: Iterable[bytes], but_for: Iterable[bytes] = ()) -> list[bytes]:
    """Those of the bundles that no other one needs, the needs of `but_for` not counted."""
    others = frozenset(but_for)
    return [bundle_id for bundle_id in bundle_ids if others.issuperset(index.users_of(bundle_id))]


def _remove(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> int:
    return sum(folder.remove(bundle_id, RETIRED_SUFFIX) for bundle_id in bundle_ids)


def _make_room(folder: StoreFolder, index: Index, pins: Pins, bundle_ids: Sequence[bytes]) -> int:
    """Free a session's bytes while its rows still stand. The newest file is only emptied: as long as its name is there
    the rows beside it mean a delete that was cut off, not a loss."""
    if not bundle_ids or index.with_status(UNREADABLE):
        return 0
    free = pins.wait_or_free(_unneeded(index, bundle_ids, but_for=bundle_ids))
    freed = _remove(folder, (bundle_id for bundle_id in free if bundle_id in bundle_ids[:-1]))
    return freed + (folder.empty_retired(bundle_ids[-1]) if bundle_ids[-1] in free else 0)
