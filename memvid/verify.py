"""Checking what is on disk without changing it: one session's promise, or a whole store.

Owns the comparison of an index row with its bundle, and the report. Repairs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .blocks import BlockEntry, span_parents
from .bundle import BundleFile
from .errors import (
    CorruptBundle,
    IndexMismatch,
    OwnerMismatch,
    ParentMismatch,
    StoreError,
    VersionMismatch,
)
from .folder import StoreFolder
from .index import SHADOWED, Index, row_of
from .manifest import Manifest
from .records import Finding, IndexRow, OpenReport, VerifyReport
from .uri import SessionUri

_REMEDY = (
    "Stop the daemon and remove index.sqlite: it is made anew from the bundles. If the refusal stays, the bundle "
    "file was replaced: put it back from a backup."
)


def require_same_as_row(row: IndexRow, uri: SessionUri, manifest: Manifest, file_bytes: int, path: str) -> None:
    """Raise unless the bundle says of itself what the index says of it: a bundle repointed to another session, of
    the same model and length even, stops here (GM2, GM3; threat 7).

    Raises:
        OwnerMismatch, VersionMismatch, ParentMismatch, IndexMismatch
    """
    _require_equal(OwnerMismatch, path, "owner", str(uri), str(manifest.uri))
    _require_equal(VersionMismatch, path, "version", row.version, manifest.version)
    _require_equal(ParentMismatch, path, "parent", _hex(row.parent), _hex(manifest.parent))
    _require_equal(IndexMismatch, path, "identity", _hex(row.identity_digest), _hex(manifest.identity.digest))
    _require_equal(IndexMismatch, path, "token_count", row.token_count, manifest.token_count)
    if row != row_of(manifest, row.bundle_id, file_bytes):
        raise IndexMismatch(
            f"{path}: the index tells other facts of it than it does itself. {_REMEDY}", path=path, field="facts"
        )


def _require_equal(kind: type[StoreError], path: str, field_name: str, promised: Any, found: Any) -> None:
    if promised != found:
        raise kind(
            f"{path}: the index promises {field_name} {promised}, the bundle says {found}. {_REMEDY}",
            path=path,
            field=field_name,
            expected=promised,
            found=found,
        )


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


@dataclass(slots=True)
class _Tally:
    findings: list[Finding] = field(default_factory=list)
    bundles: int = 0
    blocks: int = 0
    bytes_checked: int = 0

    def find(self, path: str, error: StoreError) -> None:
        self.findings.append(Finding(path, error.code, error.message))


def verify_store(
    folder: StoreFolder,
    index: Index,
    opening: OpenReport,
    uri: SessionUri | None,
    *,
    deep: bool,
    on_progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check every bundle file, or only those that one session's versions need. Reports damage, never raises it."""
    tally = _Tally()
    rows = {row.bundle_id: row for row in (index.all_rows() if uri is None else index.versions(uri))}
    if uri is None:
        _report_store(folder, index, opening, tally)
        wanted = set(folder.list_bundles()) | set(rows)
    else:
        wanted = set(rows)
    total = sum(row.bundle_bytes for row in rows.values())
    done = 0
    refs: dict[bytes, list[tuple[str, Manifest]]] = {}
    for bundle_id in _in_order(wanted, rows):
        row = rows.get(bundle_id)
        manifest = _verify_bundle(folder, bundle_id, row, tally, deep)
        if manifest is not None:
            for other in manifest.refs:
                refs.setdefault(other, []).append((folder.bundle_path(bundle_id), manifest))
        if row is not None and on_progress is not None:
            done += row.bundle_bytes
            on_progress(done, total)
    for other, users in refs.items():
        _verify_refs(folder, other, users, tally, deep=deep and other not in wanted)
    return VerifyReport(deep, tuple(tally.findings), tally.bundles, tally.blocks, tally.bytes_checked)


def _report_store(folder: StoreFolder, index: Index, opening: OpenReport, tally: _Tally) -> None:
    for bundle_id in index.with_status(SHADOWED):
        message = "Another, younger bundle is the same version of the same session; this one is not used."
        tally.findings.append(Finding(folder.bundle_path(bundle_id), "rival_version", message))
    try:
        for path in folder.list_strangers():
            tally.findings.append(Finding(path, "unknown_file", "This does not belong in a store; move it away."))
    except StoreError as error:
        tally.find(folder.path, error)


def _in_order(bundle_ids: Iterable[bytes], rows: Mapping[bytes, IndexRow]) -> list[bytes]:
    """By session and version, then the bundles that belong to none."""
    listed = sorted((row.uri, row.version, bundle_id) for bundle_id, row in rows.items())
    return [bundle_id for *_, bundle_id in listed] + sorted(set(bundle_ids) - rows.keys())


def _verify_bundle(
    folder: StoreFolder, bundle_id: bytes, row: IndexRow | None, tally: _Tally, deep: bool
) -> Manifest | None:
    """Check one bundle's own bytes, and its row; None if its manifest cannot be read."""
    path = folder.bundle_path(bundle_id)
    tally.bundles += 1
    try:
        fd, path = folder.open_bundle(bundle_id)
        file = BundleFile(fd, path, bundle_id)
    except StoreError as error:
        tally.find(path, error)
        return None
    with contextlib.closing(file):
        if row is not None:
            try:
                require_same_as_row(row, row.uri, file.manifest, file.file_bytes, path)
            except StoreError as error:
                tally.find(path, error)
        for entry in file.manifest.own_blocks:
            tally.blocks += 1
            try:
                tally.bytes_checked += _check(file, entry, deep)
            except StoreError as error:
                tally.find(path, error)
        return file.manifest


def _check(file: BundleFile, entry: BlockEntry, deep: bool) -> int:
    """Check one block; how many bytes that took."""
    if deep:
        file.check_block(entry)
        return entry.frame_bytes
    file.read_head(entry)
    return entry.head_bytes


def _verify_refs(
    folder: StoreFolder, bundle_id: bytes, users: Sequence[tuple[str, Manifest]], tally: _Tally, *, deep: bool
) -> None:
    """Check that a bundle holds every block that others say it holds; their bytes too, if nobody else does."""
    try:
        fd, path = folder.open_bundle(bundle_id)
        file = BundleFile(fd, path, bundle_id)
    except StoreError as error:
        for user_path, _ in users:
            tally.find(user_path, error)
        return
    with contextlib.closing(file):
        checked: set[bytes] = set()
        for user_path, manifest in users:
            for entry in manifest.blocks:
                if entry.bundle_id != bundle_id:
                    continue
                try:
                    file.require_block(entry)
                    _require_same_chain(file, entry, manifest, user_path)
                    if deep and entry.id not in checked:
                        checked.add(entry.id)
                        tally.blocks += 1
                        tally.bytes_checked += _check(file, entry, deep)
                except StoreError as error:
                    tally.find(user_path, error)


def _require_same_chain(file: BundleFile, entry: BlockEntry, manifest: Manifest, path: str) -> None:
    promised = (span_parents(manifest.blocks)[entry.id], manifest.identity.digest)
    if (file.parent_of(entry), file.manifest.identity.digest) != promised:
        raise CorruptBundle(
            f"{path}: the block at token {entry.start} in {file.path} belongs to another chain or identity.",
            path=path,
            part="manifest",
            block_id=entry.id.hex(),
        )
