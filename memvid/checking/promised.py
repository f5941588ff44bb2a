"""Whether a manifest is the one that was promised, and whether a version was deleted meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ..answers import VersionInfo
from ..errors import Corruption, IndexMismatch, OwnerMismatch, ParentMismatch, VersionMismatch
from ..format.manifest import Manifest
from ..index.index import row_of
from ..uri import SessionUri
from ..writing.core import StoreCore


def require_same_as_row(row: VersionInfo, uri: SessionUri, manifest: Manifest, path: str) -> None:
    """Raise unless a manifest says what the index says of its version: neither is believed alone.

    Raises:
        OwnerMismatch, VersionMismatch, ParentMismatch, IndexMismatch
    """

    _require(OwnerMismatch, path, "owner", str(uri), str(manifest.uri))
    _require(VersionMismatch, path, "version", row.version, manifest.version)
    _require(ParentMismatch, path, "parent", row.parent, manifest.parent)
    _require(IndexMismatch, path, "identity", row.identity, manifest.identity.digest.hex())
    _require(IndexMismatch, path, "token_count", row.token_count, manifest.token_count)
    expected = row_of(manifest, row.bundle_id, 0)
    facts = dataclasses.replace(expected, bundle_bytes=row.bundle_bytes, used_ns=row.used_ns)  # no manifest tells these
    _require(IndexMismatch, path, "facts", row, facts)


def _require(kind: type[Corruption], path: str, field: str, promised: object, found: object) -> None:
    if promised != found:
        raise kind(
            f"{path} is not the version that was promised: its {field} differs from what the index says. Stop the "
            "daemon and remove index.sqlite: it is made anew from the manifests.",
            path=path,
            field=field,
            promised=str(promised),
            found=str(found),
        )


def still_missing(core: StoreCore, bundle_ids: Collection[str]) -> set[str]:
    """Those of the versions that are missing, after their manifests were not found: others were deleted meanwhile, by
    another thread or by a daemon beside us, or put back. Raises StoreIoError, UnsafePath."""
    if not bundle_ids:
        return set()
    core.look_again()  # waits for a delete that is under way
    return {one for one in core.still_known(bundle_ids) if not core.folder.has_manifest(one)}
