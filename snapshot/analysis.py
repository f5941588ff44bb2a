"""A document of figures about a stored version, for an inspector, made from its blocks alone.

Needs no model: the version's slots and identity tell its caches. The document is plain data for JSON; `encode` gives
the same bytes for the same bundle, with the same version of Torpor and of numpy's linear algebra: there is no clock in
it, keys are sorted, and figures have 6 digits. The formulas are in `figures.py`.

Drift compares a version with its parent, over the longest common beginning of the two ledgers. A block with the same id
in both is the same to the last bit and is not read. If blocks differ (a partial block of the parent was filled, or a
state was computed anew), `max_abs` and `relative_l2` are those of `figures.Difference` over the common tokens of the
differing blocks, array by array; else 0.0. Arrays of the state records at the two ends are compared as they lie, even
for different tokens.

Memory: one array at a time, and of it one slot of one block, the sums of its heads (`figures.HeadSums`), and numbers
for 256 tokens: some 10 MiB for 8 heads of 128. Beside that only an open bundle's block list and headers grow with the
session. Each array is read twice: an outlier depends on the deviation of all elements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .. import __version__
from ..memvid.format.blocks import TOKEN_BYTES, BlockEntry
from ..memvid.writing.reader import BundleReader
from .figures import Difference, ElementFigures, HeadOutliers, HeadSums, figures_of, rounded
from .stored_version import CacheArray, StoredCache, StoredVersion

_NOT_THERE = "the parent has no such array"
_OTHER_SHAPE = "the parent's has another shape"


def drift_from(version: StoredVersion, parent: StoredVersion) -> dict[str, Any]:
    common = common_tokens(version.reader, parent.reader)
    parents = {entry.start: entry for entry in parent.spans}
    shared = [entry for entry in version.spans if entry.start < common]
    differing = [entry for entry in shared if parents[entry.start].id != entry.id]
    same = len(shared) - len(differing)
    manifest = parent.reader.manifest
    pairs = [(entry, parents[entry.start]) for entry in differing]
    return {
        "why": None,
        "parent": {
            "session": str(manifest.uri),
            "version": manifest.version,
            "bundle_id": parent.reader.bundle_id,
            "token_count": manifest.block_tokens,
        },
        "common_tokens": common,
        "blocks": {"common": len(shared), "same": same, "same_share": rounded(same / len(shared)) if shared else None},
        "arrays": [_drift_of(version, parent, array, pairs, common) for array in version.arrays.values()],
        "logits": _logits(version, parent),
    }


def no_drift(why: str) -> dict[str, Any]:
    """In place of a drift, if there is none."""
    return {"why": why, "parent": None, "common_tokens": None, "blocks": None, "arrays": [], "logits": None}


def common_tokens(one: BundleReader, other: BundleReader) -> int:
    """How many first tokens two ledgers share, by reading common blocks."""
    common = 0
    spans = ([entry for entry in reader.entries if entry.kind == "span"] for reader in (one, other))
    for mine, others in zip(*spans, strict=False):
        if mine.id != others.id:
            tokens, theirs = one.read_header(mine).tokens, other.read_header(others).tokens
            alike = _common_bytes(tokens, theirs) // TOKEN_BYTES
            if alike < mine.token_count:
                return common + alike
        common = mine.end
    return common


def _common_bytes(one: bytes, other: bytes) -> int:
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


def _drift_of(
    version: StoredVersion,
    parent: StoredVersion,
    array: CacheArray,
    pairs: list[tuple[BlockEntry, BlockEntry]],
    common: int,
) -> dict[str, Any]:
    difference = Difference()
    other = parent.arrays.get((array.path, array.name))
    if other is None:
        difference.refuse(_NOT_THERE)
    elif array.why_not or other.why_not:
        difference.refuse(array.why_not or other.why_not or "")
    elif array.in_spans != other.in_spans or array.kind != other.kind:
        difference.refuse(f"the parent keeps it as {other.kind}")
    elif not array.in_spans:
        _compare_records(version, parent, array, other, difference)
    elif (array.heads, array.dim) != (other.heads, other.dim):
        difference.refuse(_OTHER_SHAPE)
    else:
        for mine, theirs in pairs:
            count = min(mine.end, theirs.end, common) - mine.start
            values, parents = version.piece(array, mine).values, parent.piece(other, theirs).values
            difference.add(values[:, :count], parents[:, :count])
    return {"path": array.path, "name": array.name, "in_spans": array.in_spans, **difference.to_map()}


def _compare_records(
    version: StoredVersion, parent: StoredVersion, array: CacheArray, other: CacheArray, difference: Difference
) -> None:
    if array.shape != other.shape or array.dtype != other.dtype:
        difference.refuse(_OTHER_SHAPE)
        return
    for values, parents in zip(version.elements(array), parent.elements(other), strict=True):
        difference.add(values, parents)


def _logits(version: StoredVersion, parent: StoredVersion) -> dict[str, Any]:
    difference = Difference()
    mine, theirs = version.state_array("logits"), parent.state_array("logits")
    if mine is None or theirs is None:
        difference.refuse("one of the two has no logits")
    else:
        _compare_records(version, parent, mine, theirs, difference)
    return difference.to_map()


FORMAT: Final = "torpor.analysis/2"
DEFAULT_KIND: Final = "kv-analysis"

OnProgress = Callable[[int, int], None]


def analyze(
    reader: BundleReader,
    parent: BundleReader | None,
    *,
    kind: str = DEFAULT_KIND,
    labels: Sequence[str] | None = None,
    why_no_parent: str = "it has no parent",
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """The document of one version.

    parent: its parent version; None if there is none, or it cannot be opened: then `why_no_parent`.
    labels: by default the session's labels, the model's name, and the version (`v3`).
    on_progress: told (bytes read, bytes in all), on this thread; its error ends the analysis.

    Raises:
        StoreError: a byte is not as it was written.
        MalformedSnapshot: it has slots of no cache.
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
        "bundle_id": reader.bundle_id,
        "parent": manifest.parent if manifest.parent else None,
        "slept_ns": manifest.created_ns,
        "model": manifest.model,
        "identity": dict(manifest.identity.parts),
        "token_count": manifest.block_tokens,
        "layers": layers,
        "drift": drift,
    }


def encode(document: dict[str, Any]) -> bytes:
    """The document as JSON, one line, in ASCII."""
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class _Progress:
    """Reports progress, a hundred times at most."""

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
        outliers.add(piece.values)
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
