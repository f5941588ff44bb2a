"""Brings index and bundle files into agreement when a store is opened. Bundles are the truth.

Owns the decision whether an index can be used, mended or must be made anew, and the removal of leftovers.

Rules:
- A row whose file is missing stays: a wake then says so, instead of quietly giving the version before, and its version
  number is not given again. Only a row whose file is retired goes: its session was deleted.
- A bundle that cannot be read is read again at each opening, and reported at each.
- A failure of the system (too many open files, an input/output error) says nothing about a bundle: it is tried again,
  then raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .bundle import BundleFile
from .deletion import remove_unneeded
from .errors import BundleMissing, NoSpace, StoreError, StoreIoError
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX, StoreFolder
from .index import LIVE, SHADOWED, UNREADABLE, Index, IndexedBundle, IndexUnusable, row_of
from .pins import Pins
from .records import Finding, IndexRow, OpenReport
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
    try:
        index, report = _open_and_reconcile(folder, files, writable)
    except IndexUnusable as reason:
        index, report = _make_anew(folder, files, writable, str(reason))
    if writable:
        try:
            remove_unneeded(folder, index, Pins(), files)
        except BaseException:
            index.close()
            raise
        retired = {bundle_id for bundle_id, suffix in files.items() if suffix == RETIRED_SUFFIX}
        leftovers += len(retired - folder.list_bundles().keys()) if retired else 0
    return index, dataclasses.replace(report, leftovers_removed=leftovers)


def _open_and_reconcile(folder: StoreFolder, files: Mapping[bytes, str], writable: bool) -> tuple[Index, OpenReport]:
    opener = Index.open if writable else Index.copy_to_memory
    index = opener(folder.path, folder.root_fd, folder.uuid)
    try:
        return index, _reconcile(folder, index, files)
    except BaseException:
        index.close()
        raise


def _reconcile(folder: StoreFolder, index: Index, files: Mapping[bytes, str]) -> OpenReport:
    live = {bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX}
    try:
        rows = {row.bundle_id: row for row in index.all_rows()}  # each row must make sense
        known, unread = index.bundle_ids(), set(index.with_status(UNREADABLE))
    except StoreError as error:
        raise IndexUnusable(error.message) from error
    scan = _read_bundles(folder, (live - known) | (live & unread))
    retired = _deleted(rows, files) | {bundle_id for bundle_id in known if files.get(bundle_id) == RETIRED_SUFFIX}
    gone = known - files.keys() - rows.keys()
    rivals = [_rival(index, bundle) for bundle in scan.bundles]
    present = [rival for rival in rivals if rival is not None and rival.bundle_id not in retired]
    added = _without_rivals({bundle.bundle_id: bundle for bundle in (*present, *scan.bundles)}.values())
    dropped = retired | gone | unread | {bundle.bundle_id for bundle in present}
    if added or dropped:
        index.reconcile(added, dropped)
    missing = [row for bundle_id, row in rows.items() if bundle_id not in files and bundle_id not in retired]
    findings = [*scan.unreadable, *_missing(folder, missing)]
    return OpenReport(None, len(live - known), len(gone), 0, tuple(findings))


def _deleted(rows: Mapping[bytes, IndexRow], files: Mapping[bytes, str]) -> set[bytes]:
    """Rows without files that a delete was cut off behind: a retired file has the same session and no older version."""
    retired: dict[SessionUri, int] = {}
    for bundle_id, row in rows.items():
        if files.get(bundle_id) == RETIRED_SUFFIX:
            retired[row.uri] = max(row.version, retired.get(row.uri, 0))
    missing = (row for bundle_id, row in rows.items() if bundle_id not in files)
    return {row.bundle_id for row in missing if row.version <= retired.get(row.uri, 0)}


def _missing(folder: StoreFolder, rows: Iterable[IndexRow]) -> list[Finding]:
    """Versions whose file is not there, by a second look: one may have been published since the folder was listed."""
    found = []
    for row in rows:
        path = folder.bundle_path(row.bundle_id)
        if not folder.has_bundle(row.bundle_id):
            message = (
                f"{path} is missing: version {row.version} of {row.uri} cannot be woken. Put the file back from a "
                "backup, or delete the session."
            )
            found.append(Finding(path, BundleMissing.code, message))
    return found


def _rival(index: Index, bundle: IndexedBundle) -> IndexedBundle | None:
    """The bundle that the index has for the version that another bundle claims."""
    row = index.find(bundle.row.uri, bundle.row.version) if bundle.row else None
    return IndexedBundle(row.bundle_id, LIVE, row, index.refs_of(row.bundle_id)) if row else None


def _make_anew(
    folder: StoreFolder, files: Mapping[bytes, str], writable: bool, reason: str
) -> tuple[Index, OpenReport]:
    live = [bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX]
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
            scan.bundles.append(_read_bundle(folder, bundle_id))
        except BundleMissing:
            continue  # deleted by the daemon beside us since the folder was listed
        except StoreIoError:
            raise
        except StoreError as error:
            scan.unreadable.append(Finding(folder.bundle_path(bundle_id), error.code, error.message))
            scan.bundles.append(IndexedBundle(bundle_id, UNREADABLE, None, ()))
    return scan


def _read_bundle(folder: StoreFolder, bundle_id: bytes) -> IndexedBundle:
    for last in (False, True):
        try:
            fd, path = folder.open_bundle(bundle_id)
            with contextlib.closing(BundleFile(fd, path, bundle_id)) as file:
                row = row_of(file.manifest, bundle_id, file.file_bytes)
                return IndexedBundle(bundle_id, LIVE, row, file.manifest.refs)
        except StoreIoError as error:
            if last:
                raise StoreIoError(
                    f"{error.message} The index lacks this bundle, and without it an older version would be woken. "
                    "Try again; if it stays so, move the file out of the store.",
                    **error.details,
                ) from error
    raise AssertionError("the loop returns or raises")


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
