"""What an inspector shows of a stored version: a document of figures, made from its blocks alone.

Needs no model: what the caches are is told by the version's own slots and identity. The document is plain data for
JSON; `encode` gives the same bytes for the same bundle, with the same version of Torpor and of numpy's linear algebra:
there is no clock in it, keys are sorted, and figures have 6 digits. The formulas are in `figures.py` and `drift.py`.

Memory: one array at a time, and of it one slot of one block, the sums of its heads (`figures.HeadSums`), and numbers
for 256 tokens: some 10 MiB for 8 heads of 128. Nothing grows with the session but what an open bundle holds, its block
list and headers. Each array is read twice, for an outlier is told by the deviation of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .. import __version__
from ..memvid.format.reader import BundleReader
from .drift import drift_from, no_drift
from .figures import ElementFigures, HeadOutliers, HeadSums, figures_of
from .stored_version import CacheArray, StoredCache, StoredVersion

FORMAT: Final = "torpor.analysis/1"
DEFAULT_KIND: Final = "kv-analysis"

OnProgress = Callable[[int, int], None]


def analyse(
    reader: BundleReader,
    parent: BundleReader | None,
    *,
    kind: str = DEFAULT_KIND,
    labels: Sequence[str] | None = None,
    why_no_parent: str = "it has no parent",
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """The document of one version.

    parent: that of its parent version; None if there is none, or none that can be opened, and then `why_no_parent`.
    labels: those that the document gets; by default the session's, the model's name, and the version (`v3`).
    on_progress: told how many bytes of how many have been read, on this thread; what it raises ends the analysis.

    Raises:
        StoreError: a byte is not what was written.
        MalformedSnapshot: it has slots that are of no cache.
    """
    manifest = reader.manifest
    progress = _Progress(2 * manifest.logical_bytes, on_progress) if on_progress else None
    version = StoredVersion(reader, progress.on_bytes if progress else None)
    with np.errstate(over="ignore", invalid="ignore"):
        layers = [_layer(version, cache) for cache in version.caches]
        drift = no_drift(why_no_parent)
        if parent is not None:
            drift = drift_from(version, StoredVersion(parent))
    return {
        "format": FORMAT,
        "kind": kind,
        "labels": list(manifest.artifact_labels if labels is None else dict.fromkeys(labels)),
        "made_by": f"torpor {__version__}",
        "session": str(manifest.uri),
        "version": manifest.version,
        "bundle_id": reader.bundle_id.hex(),
        "parent": manifest.parent.hex() if manifest.parent else None,
        "slept_ns": manifest.created_ns,
        "model": manifest.model,
        "identity": dict(manifest.identity.parts),
        "token_count": manifest.token_count,
        "layers": layers,
        "drift": drift,
    }


def encode(document: dict[str, Any]) -> bytes:
    """The document as JSON, one line, in ASCII."""
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class _Progress:
    """Tells how far it is, a hundred times at most."""

    def __init__(self, total: int, told: OnProgress) -> None:
        self._total, self._told, self._done, self._percent = total, told, 0, -1

    def on_bytes(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        percent = 100 * self._done // max(1, self._total)
        if percent != self._percent:
            self._percent = percent
            self._told(self._done, self._total)


def _layer(version: StoredVersion, cache: StoredCache) -> dict[str, Any]:
    return {
        "path": cache.path,
        "kind": cache.kind,
        "arrays": [_array(version, array) for array in cache.arrays],
        "why": None if cache.arrays else "the model keeps nothing in this cache",
    }


def _array(version: StoredVersion, array: CacheArray) -> dict[str, Any]:
    told: dict[str, Any] = {"name": array.name, "dtype": array.dtype, "why": array.why_not}
    if array.why_not is not None:
        return told | {"shape": list(array.shape)}
    if not array.has_tokens:
        return told | {"shape": list(array.shape)} | _element_figures(version, array)
    sums = HeadSums(array.heads, array.dim)
    for piece in version.pieces(array):
        sums.add(piece.values, piece.positions)
    outliers = HeadOutliers(sums)
    for piece in version.pieces(array):
        outliers.add(piece.values, piece.positions)
    sizes = {"heads": array.heads, "dim": array.dim, "tokens": sums.count, "first_token": sums.first_token}
    lossy = {"lossy_tokens": version.lossy_tokens(array)}
    return told | sizes | lossy | figures_of(sums, outliers)


def _element_figures(version: StoredVersion, array: CacheArray) -> dict[str, Any]:
    figures = ElementFigures()
    for values in version.elements(array):
        figures.add(values)
    for values in version.elements(array):
        figures.count_outliers(values)
    return figures.to_map()
