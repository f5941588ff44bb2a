"""How far a version has gone from its parent: which blocks are the same ones, and what differs in the others.

Only tokens that both have are compared: the longest common beginning of the two ledgers. A block that has the same id
in both is the same to the last bit and is not read. Where blocks differ (one of the parent that was not full and has
been filled since, a state that was computed anew), `max_abs` and `relative_l2` are those of `figures.Difference` over
the common tokens of the differing blocks, array by array; 0.0 where no block differs. Arrays of the state records at
the two ends are compared as they lie, whatever tokens they hold.
"""

from __future__ import annotations

from typing import Any

from ..memvid.format.blocks import TOKEN_BYTES, BlockEntry
from ..memvid.format.reader import BundleReader
from .figures import Difference, rounded
from .stored_version import CacheArray, StoredVersion

_NOT_THERE = "the parent has no such array"
_OTHER_SHAPE = "the parent's has another shape"


def drift_from(version: StoredVersion, parent: StoredVersion) -> dict[str, Any]:
    """The drift as plain data."""
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
            "bundle_id": parent.reader.bundle_id.hex(),
            "token_count": manifest.token_count,
        },
        "common_tokens": common,
        "blocks": {
            "common": len(shared),
            "same": same,
            "same_share": rounded(same / len(shared)) if shared else None,
        },
        "arrays": [_drift_of(version, parent, array, pairs, common) for array in version.arrays.values()],
        "logits": _logits(version, parent),
    }


def no_drift(why: str) -> dict[str, Any]:
    """What stands in the place of a drift that cannot be told."""
    return {"why": why, "parent": None, "common_tokens": None, "blocks": None, "arrays": [], "logits": None}


def common_tokens(one: BundleReader, other: BundleReader) -> int:
    """How many tokens two ledgers begin with alike; read block by block, as far as they are."""
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
