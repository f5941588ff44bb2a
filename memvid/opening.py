"""Brings index and bundle files into agreement when a store is opened. Bundles are the truth.

Owns the decision whether an index can be used, mended or must be made anew, and the removal of leftovers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .bundle import BundleFile
from .errors import BundleMissing, NoSpace, StoreError, StoreIoError
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX, StoreFolder
from .index import LIVE, SHADOWED, UNREADABLE, Index, IndexedBundle, IndexUnusable, row_of
from .records import Finding, OpenReport
from .uri import SessionUri


@dataclass(slots=True)
class _Scan:
    """Bundles read for the index, and what could not be read."""

    bundles: list[IndexedBundle] = field(default_factory=list)
    unreadable: list[Finding] = field(default_factory=list)


def load_index(folder: StoreFolder, *, writable: bool) -> tuple[Index, OpenReport]:
    """Open the store's index, in agreement with its bundle files; a read-only one lives in memory.

    Raises:
        UnsafePath, NoSpace, StoreIoError, DurabilityLost
    """
    leftovers = folder.remove_temps() if writable else 0
    files = folder.list_bundles()
    live = {bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX}
    try:
        index, report = _open_and_reconcile(folder, live, writable)
    except IndexUnusable as reason:
        index, report = _make_anew(folder, live, writable, str(reason))
    if writable:
        leftovers += _remove_unneeded(folder, index, files)
    return index, OpenReport(
        index_rebuilt=report.index_rebuilt,
        rows_added=report.rows_added,
        rows_dropped=report.rows_dropped,
        leftovers_removed=leftovers,
        unreadable=report.unreadable,
    )


def _open_and_reconcile(folder: StoreFolder, live: set[bytes], writable: bool) -> tuple[Index, OpenReport]:
    opener = Index.open if writable else Index.copy_to_memory
    index = opener(folder.path, folder.root_fd, folder.uuid)
    try:
        known = index.bundle_ids()
        scan = _read_bundles(folder, live - known)
        if known != live:
            index.reconcile(scan.bundles, known - live)
        index.all_rows()  # each row must make sense
    except StoreError as error:
        index.close()
        raise IndexUnusable(error.message) from error
    except IndexUnusable:
        index.close()
        raise
    return index, OpenReport(None, len(live - known), len(known - live), 0, tuple(scan.unreadable))


def _make_anew(folder: StoreFolder, live: set[bytes], writable: bool, reason: str) -> tuple[Index, OpenReport]:
    scan = _read_bundles(folder, live)
    bundles = _without_rivals(scan.bundles)
    if not writable:
        index = Index.create_in_memory(folder.path, folder.uuid, bundles)
    else:
        try:
            index = Index.create(folder.path, folder.root_fd, folder.uuid, bundles)
        except (NoSpace, StoreIoError) as error:
            # on a full disk the store must still open, for a delete is the way out; the next open makes the file
            index = Index.create_in_memory(folder.path, folder.uuid, bundles)
            reason = f"{reason}; it is kept in memory because {error.message}"
    return index, OpenReport(reason, len(live), 0, 0, tuple(scan.unreadable))


def _read_bundles(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> _Scan:
    scan = _Scan()
    for bundle_id in sorted(bundle_ids):
        try:
            fd, path = folder.open_bundle(bundle_id)
            with contextlib.closing(BundleFile(fd, path, bundle_id)) as file:
                row = row_of(file.manifest, bundle_id, file.file_bytes)
                scan.bundles.append(IndexedBundle(bundle_id, LIVE, row, file.manifest.refs))
        except BundleMissing:
            continue  # deleted by the daemon beside us since the folder was listed
        except StoreError as error:
            scan.unreadable.append(Finding(folder.bundle_path(bundle_id), error.code, error.message))
            scan.bundles.append(IndexedBundle(bundle_id, UNREADABLE, None, ()))
    return scan


def _without_rivals(bundles: Iterable[IndexedBundle]) -> list[IndexedBundle]:
    """Where two bundles claim one version of one session (a backup put back), the younger one is it."""
    result: list[IndexedBundle] = []
    best: dict[tuple[SessionUri, int], IndexedBundle] = {}
    for bundle in sorted(bundles, key=_age):
        if bundle.row is None:
            result.append(bundle)
            continue
        key = (bundle.row.uri, bundle.row.version)
        rival = best.get(key)
        if rival is not None:
            result.append(IndexedBundle(rival.bundle_id, SHADOWED, rival.row, rival.refs))
        best[key] = bundle
    return [*result, *best.values()]


def _age(bundle: IndexedBundle) -> tuple[int, bytes]:
    return (bundle.row.created_ns if bundle.row else 0, bundle.bundle_id)


def _remove_unneeded(folder: StoreFolder, index: Index, files: Mapping[bytes, str]) -> int:
    """Finish interrupted deletes: retired bundles that no manifest names any more. Only under the store's lock.

    While any bundle cannot be read, what it refers to is unknown, so nothing is removed.
    """
    if index.with_status(UNREADABLE):
        return 0
    needed = index.referenced()
    retired = [bundle_id for bundle_id, suffix in files.items() if suffix == RETIRED_SUFFIX and bundle_id not in needed]
    return sum(1 for bundle_id in retired if folder.remove(bundle_id, RETIRED_SUFFIX))
