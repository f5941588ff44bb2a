"""What is told of a manifest that is missing or damaged: one sentence with one advice, whoever meets it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..answers import Finding, VersionInfo
from ..errors import BundleMissing, StoreError
from ..folder.folder import StoreFolder

_ADVICE: Final = (
    "Put it back, or let `torpor repair --from FOLDER` take it from a backup; without one, {}. Until then no pack is "
    "removed."
)


def findings_without_manifest(folder: StoreFolder, rows: Iterable[VersionInfo]) -> list[Finding]:
    """The findings that these versions have no manifests."""
    return [finding_of_missing(folder, row) for row in sorted(rows, key=lambda row: (row.uri, row.version))]


def finding_of_missing(folder: StoreFolder, row: VersionInfo) -> Finding:
    """The finding that a version has no manifest."""
    path = folder.manifest_path(row.bundle_id)
    return Finding(path, BundleMissing.code, _told_of_missing(path, row), row.session, row.version)


def sentence_of(error: StoreError, path: str, row: VersionInfo | None) -> str:
    """What is told of a manifest that is missing or damaged by this error. row: the version that it is, if anything
    tells."""
    if isinstance(error, BundleMissing):
        return error.message if row is None else _told_of_missing(path, row)
    what = error.message
    if row is not None:
        return f"{what} It is version {row.version} of {row.uri}. {_advice_for(row)}"
    unknown = "Nothing else tells which version it is; it may be the newest of a session."
    return f"{what} {unknown} {_ADVICE.format('move it away to do without that version')}"


def _told_of_missing(path: str, row: VersionInfo) -> str:
    return f"The manifest of version {row.version} of {row.uri} ({path}) is missing. {_advice_for(row)}"


def _advice_for(row: VersionInfo) -> str:
    return _ADVICE.format(f"delete the version (`torpor rm {row.uri}@{row.version}`)")
