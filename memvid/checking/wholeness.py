"""How far a version is whole: by its manifest, and by the blocks that packs were found to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..answers import Finding
from ..errors import BlockMissing, CorruptBundle
from ..format.blocks import BlockEntry, span_parents
from ..format.manifest import Manifest, end_record_of, whole_before
from ..format.records import DamagedVersion
from .packs import PackCheck

AGAIN: Final = "computes its tokens up to there again, if not an earlier token has to do"
"""What a wake at a token does with a stripped version that is not whole. It computes whole calls: one that went past
that token can be computed no more."""


@dataclass(slots=True)
class FoundBlocks:
    """The blocks that sound copies were found of, with what their headers say (`PackCheck`)."""

    full: dict[bytes, int] = field(default_factory=dict)
    heads: dict[bytes, int] = field(default_factory=dict)

    def take(self, check: PackCheck) -> None:
        self.full.update(check.full)
        self.heads.update(check.heads)

    def head_of(self, block_id: bytes) -> int | None:
        return self.full.get(block_id, self.heads.get(block_id))


@dataclass(frozen=True, slots=True)
class Lack:
    """The blocks that a version lacks, in its order. `is_other`: there is a block for one of them, but not the one that
    the manifest describes."""

    blocks: tuple[BlockEntry, ...]
    is_other: bool


def lack_of(manifest: Manifest, blocks_there: FoundBlocks, *, is_stripped: bool | None) -> Lack | None:
    """What a version lacks; None if it is whole. A stripped one needs the headers of its blocks, which have its tokens,
    and the record at its end. is_stripped: None where that is unknown; a header is enough then."""
    blocks, is_other = [], False
    parents, end = span_parents(manifest.blocks), end_record_of(manifest)
    for entry in manifest.blocks:
        heads_are_enough = is_stripped is None or (is_stripped and entry is not end)
        claim = blocks_there.head_of(entry.id) if heads_are_enough else blocks_there.full.get(entry.id)
        if claim != hash(entry.said_with(parents[entry.id], manifest.identity.digest)):
            blocks.append(entry)
            is_other = is_other or claim is not None
    return Lack(tuple(blocks), is_other) if blocks else None


def damaged_version(manifest: Manifest, bundle_id: str, lack: Lack, *, is_stripped: bool) -> DamagedVersion:
    ids = tuple(entry.id for entry in lack.blocks)
    whole = whole_before(manifest, lack.blocks[0])
    return DamagedVersion(manifest.uri, manifest.version, bundle_id, whole, ids, is_stripped)


def finding_of(version: DamagedVersion, path: str, lack: Lack) -> Finding:
    """The finding that a version is not whole. path: where packs are, for of a missing one nothing else is known."""
    uri, whole = version.uri, version.whole_up_to
    way = f" `torpor wake {uri}@{version.version} --at {whole}` goes on from there." if whole else ""
    if version.is_stripped:
        way = way.replace("goes on from there", AGAIN)
        what = f"Version {version.version} of {uri} is stripped, and has its tokens up to token {whole} alone"
    else:
        what = f"Version {version.version} of {uri} is whole up to token {whole}"
    if lack.is_other:
        code, why = CorruptBundle.code, "a block behind it is not the one that the manifest describes"
    else:
        code, why = BlockMissing.code, "no pack has a sound copy of what stands behind it"
    message = (
        f"{what}: {why} ({_told(lack.blocks)}). Put the missing pack back, or let `torpor repair --from FOLDER` take "
        f"it from a backup.{way}"
    )
    return Finding(path, code, message, str(uri), version.version)


def _told(blocks: Sequence[BlockEntry]) -> str:
    first = f"block {blocks[0].id.hex()[:16]}"
    return first if len(blocks) == 1 else f"{first} and {len(blocks) - 1} more"
