"""Reads bundle files and quarantine for the index.

Owns how a file becomes a row: by its manifest; by its name if that is damaged; by its content if it lies under
another's name. Changes nothing, and does not decide which rows the index keeps.

Rules:
- The number of an unreadable bundle goes to no other. It is learnt from its manifest, anywhere in the file; from
  another file with all its content; from quarantine; or from its marks.
- A failure of the system (too many open files, an input/output error) says nothing about a bundle: it is tried again,
  then raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import BundleMismatch, BundleMissing, StoreError, StoreIoError, UnsafePath
from ..folder import quarantine
from ..folder.folder import StoreFolder
from ..folder.marks import Marks
from ..format.bundle import BundleFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Finding, IndexRow
from ..format.salvage import NamedFile
from ..index.index import Index
from ..index.rows import ASIDE, MISSED, SHADOWED, UNREADABLE, IndexedBundle, indexed, row_of
from ..uri import SessionUri
from .set_aside_versions import list_waiting, look_into

Readings = dict[bytes, IndexedBundle]
"""Bundles as they were read: their stamps tell whether the files are still the same."""


@dataclass(slots=True)
class Scan:
    """Bundles read for the index, and the unreadable ones with the reason. `misnamed`: whole bundles under the names of
    those, by their own ids."""

    bundles: list[IndexedBundle] = field(default_factory=list)
    misnamed: dict[bytes, IndexedBundle] = field(default_factory=dict)
    unread: list[bytes] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def refuse(self, path: str, bundle_id: bytes, error: StoreError) -> None:
        self.unread.append(bundle_id)
        self.findings.append(Finding(path, error.code, error.message))


def live_of(files: Mapping[bytes, str]) -> set[bytes]:
    return {bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX}


def ids_of(bundles: Iterable[IndexedBundle]) -> set[bytes]:
    return {bundle.bundle_id for bundle in bundles}


def read_ahead(folder: StoreFolder) -> Readings:
    """Read every live bundle, before the store's lock is taken: `rebuild` need not read a file again while its stamp is
    the same. Says nothing of unreadable ones; `rebuild` does."""
    readings: Readings = {}
    for bundle_id in sorted(live_of(folder.list_bundles())):
        with contextlib.suppress(StoreError):
            readings[bundle_id] = _read_bundle(folder, bundle_id)
    return readings


def read_bundles(folder: StoreFolder, bundle_ids: Iterable[bytes], ahead: Readings | None = None) -> Scan:
    """Read these bundles' files. Raises StoreIoError, UnsafePath."""
    scan = Scan()
    for bundle_id in sorted(bundle_ids):
        try:
            known = ahead.get(bundle_id) if ahead else None
            if known is None or folder.stamp_of(bundle_id, LIVE_SUFFIX) != known.stamp:
                known = _read_bundle(folder, bundle_id)
            scan.bundles.append(known)
        except BundleMissing:
            continue  # deleted by the daemon beside us since the folder was listed
        except StoreIoError:
            raise
        except StoreError as error:
            scan.refuse(folder.bundle_path(bundle_id), bundle_id, error)
            if isinstance(error, BundleMismatch):
                other = by_content(functools.partial(folder.open_as, bundle_id, LIVE_SUFFIX))
                scan.misnamed |= {other.bundle_id: other} if other is not None else {}
    return scan


def read_again(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> Scan:
    """As `read_bundles`, for versions that have rows. If the system refuses to read one, nothing is lost: it stays
    listed, and only its needs are unknown."""
    scan = Scan()
    for bundle_id in sorted(bundle_ids):
        try:
            scan.bundles.append(_read_bundle(folder, bundle_id))
        except BundleMissing:
            continue
        except StoreError as error:
            scan.refuse(folder.bundle_path(bundle_id), bundle_id, error)
    return scan


def _read_bundle(folder: StoreFolder, bundle_id: bytes) -> IndexedBundle:
    for last in (False, True):
        try:
            with BundleFile(*folder.open_bundle(bundle_id), bundle_id) as file:
                bundle, path = indexed(file), file.path
            if path.endswith(RETIRED_SUFFIX):  # it was live when the folder was listed
                raise BundleMissing(f"The session of {path} was deleted.", bundle_id=bundle_id.hex(), path=path)
            return bundle
        except StoreIoError as error:
            if last:
                raise StoreIoError(
                    f"{error.message} The index lacks what it says, and without it an older version would be woken. "
                    "Try again; if it stays so, move the file out of the store.",
                    **error.details,
                ) from error
    raise AssertionError("the loop returns or raises")


def by_content(open_file: Callable[[], tuple[int, str]]) -> IndexedBundle | None:
    """The version that is whole in a file, whatever its name says, as a version set aside; None for any other file."""
    return look_into(open_file, lambda file: dataclasses.replace(indexed(file), status=ASIDE))


def readable_marks(folder: StoreFolder) -> Marks | None:
    """The store's marks; None if they cannot be read, which verify and repair report."""
    try:
        return Marks.load(folder)
    except StoreError:
        return None


def row_in_marks(marks: Marks | None, bundle_id: bytes) -> IndexRow | None:
    owner = marks.owner_of(bundle_id) if marks is not None else None
    return None if owner is None else IndexRow(*owner, bundle_id, None, bytes(32), 0, 0, 0, 0, "", ())


def stored_in(index: Index, bundle_id: bytes) -> tuple[IndexedBundle | None, str]:
    """The row of a bundle in an index that may be damaged, asked twice, or else the reason why there is none."""
    why = ""
    for _ in range(2):
        try:
            return index.stored(bundle_id), ""
        except StoreError as error:
            why = str(error.details.get("reason", error.message))
    return None, f"the index cannot say what it knows of it: {why}"


def read_set_aside(folder: StoreFolder, but_for: Container[bytes]) -> list[IndexedBundle]:
    """The versions in quarantine, as far as their files or marks identify them: their numbers are taken, and their
    files' needs count."""
    found: dict[bytes, IndexedBundle] = {}
    damaged: dict[bytes, IndexRow] = {}
    marks = readable_marks(folder)
    for bundle_id, suffix, name in list_waiting(folder):
        if suffix != LIVE_SUFFIX or bundle_id in but_for or bundle_id in found:
            continue
        with contextlib.suppress(StoreError):
            fd, path = quarantine.open_name(folder, name)
            with BundleFile(fd, path, bundle_id) as file:
                found[bundle_id] = dataclasses.replace(indexed(file), status=ASIDE)
                continue
        row = _row_in_file(bundle_id, functools.partial(quarantine.open_name, folder, name))
        row = row or row_in_marks(marks, bundle_id)
        if row is not None:
            damaged.setdefault(bundle_id, row)
    only_told = [IndexedBundle(one, ASIDE, row, (), ()) for one, row in damaged.items() if one not in found]
    return [*found.values(), *only_told]


def enter_unreadable(folder: StoreFolder, scan: Scan, index: Index | None = None) -> list[IndexedBundle]:
    """The unreadable bundles, with all that tells of them: their files, whole copies under other names or in
    quarantine, their marks, or the old index. If nothing of one can be read now, its needs are unknown: its file may
    have been written anew since the old index."""
    rows = {one: _row_in_file(one, functools.partial(folder.open_as, one, LIVE_SUFFIX)) for one in scan.unread}
    rows |= {one: scan.misnamed[one].row for one, row in rows.items() if row is None and one in scan.misnamed}
    rows |= _rows_in_quarantine(folder, [one for one, row in rows.items() if row is None])
    marks = readable_marks(folder) if rows else None
    found = []
    for bundle_id, told in rows.items():
        row = told or row_in_marks(marks, bundle_id)
        if row is None and index is not None:
            stored, _ = stored_in(index, bundle_id)
            row = stored.row if stored is not None else None
        found.append(IndexedBundle(bundle_id, UNREADABLE, row, (), ()))
    return found


def _rows_in_quarantine(folder: StoreFolder, bundle_ids: Collection[bytes]) -> dict[bytes, IndexRow]:
    """The bundles in quarantine, as far as their owners are known; none if it cannot be opened."""
    found: dict[bytes, IndexRow] = {}
    with contextlib.suppress(UnsafePath):
        for bundle_id, suffix, name in list_waiting(folder) if bundle_ids else ():
            if suffix == LIVE_SUFFIX and bundle_id in bundle_ids and bundle_id not in found:
                row = _row_in_file(bundle_id, functools.partial(quarantine.open_name, folder, name))
                found |= {bundle_id: row} if row is not None else {}
    return found


def _row_in_file(bundle_id: bytes, open_file: Callable[[], tuple[int, str]]) -> IndexRow | None:
    """The facts in a damaged file's own manifest, anywhere in it; None if nothing of it can be read."""
    with contextlib.suppress(StoreError), NamedFile(*open_file(), bundle_id) as file:
        if file.manifest is not None:
            return row_of(file.manifest, bundle_id, file.file_bytes)
    return None


def as_entered(
    folder: StoreFolder, scan: Scan, kept: Collection[IndexedBundle], index: Index | None = None
) -> list[IndexedBundle]:
    """The content of a new index: the bundles that were read, and those that only the old index knew."""
    waiting = [bundle for bundle in kept if bundle.status in (ASIDE, MISSED)]
    return [
        *without_rivals([*scan.bundles, *(bundle for bundle in kept if bundle.status not in (ASIDE, MISSED))]),
        *waiting,
        *enter_unreadable(folder, scan, index),
    ]


def without_rivals(bundles: Iterable[IndexedBundle]) -> list[IndexedBundle]:
    """If two bundles claim one version of one session (a backup put back), the younger one is the version."""
    shadowed: list[IndexedBundle] = []
    best: dict[tuple[SessionUri, int], IndexedBundle] = {}
    for bundle in sorted(bundles, key=_age):
        assert bundle.row is not None
        key = (bundle.row.uri, bundle.row.version)
        if key in best:
            shadowed.append(dataclasses.replace(best[key], status=SHADOWED))
        best[key] = bundle
    return [*shadowed, *best.values()]


def _age(bundle: IndexedBundle) -> tuple[int, bytes]:
    return (bundle.row.created_ns if bundle.row else 0, bundle.bundle_id)
