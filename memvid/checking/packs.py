"""Checks one pack: which of its blocks are sound, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator
from dataclasses import dataclass, field

from ..errors import BundleMissing, StoreClosed, StoreError
from ..folder.folder import StoreFolder
from ..format.blocks import BlockHeader
from ..format.frames import FrameReader
from ..writing.frame_files import open_frames


@dataclass(slots=True)
class PackCheck:
    """What a look at a pack found. `full`: the blocks with all that a wake reads, each with the hash of what its header
    says of it (`said`), whose seed nobody knows beforehand. `heads`: the blocks with a sound header and no sound keys
    and values. `faults`: what is damaged, or why it cannot be read. `is_missing`: it is not there."""

    name: str
    full: dict[bytes, int] = field(default_factory=dict)
    heads: dict[bytes, int] = field(default_factory=dict)
    faults: list[StoreError] = field(default_factory=list)
    is_missing: bool = False
    blocks_checked: int = 0
    bytes_checked: int = 0


def check_pack(
    folder: StoreFolder, name: str, *, deep: bool, wanted: Container[bytes] | None = None
) -> Generator[int, None, PackCheck]:
    """Check the pack's directory and the heads of its frames, or (deep) each byte of them; of the `wanted` blocks, if
    any are named. Yields the bytes of each block behind its check. Raises StoreClosed."""
    check = PackCheck(name)
    try:
        file = open_frames(folder, name)
    except StoreClosed:
        raise
    except BundleMissing:
        check.is_missing = True
        return check
    except StoreError as error:
        check.faults.append(error)
        return check
    with file:
        if deep:
            _check_manifest(check, file)
        for block_id, frame in (*file.frames.items(), *file.heads.items()):
            if wanted is None or block_id in wanted:
                _check_block(check, file, block_id, deep=deep)
                size_bytes = frame.frame_bytes if deep else frame.head_bytes
                check.blocks_checked += 1
                check.bytes_checked += size_bytes
                yield size_bytes
    return check


def _check_block(check: PackCheck, file: FrameReader, block_id: bytes, *, deep: bool) -> None:
    if block_id in file.heads:
        header = _try(check, lambda: file.read_head(block_id)[0])
        if header is not None:
            check.heads[block_id] = hash(header.said)
        return
    header = _try(check, lambda: file.check_block(block_id) if deep else file.read_head(block_id)[0])
    if header is not None:
        check.full[block_id] = hash(header.said)
        return
    ignored = PackCheck(check.name)  # told already
    header = _try(ignored, lambda: file.check_payloads(block_id)[0])  # padding may be damaged alone
    if header is not None:
        check.full[block_id] = hash(header.said)
        return
    header = _try(ignored, lambda: file.read_head(block_id)[0])
    if header is not None:
        check.heads[block_id] = hash(header.said)


def _try(pack: PackCheck, check: Callable[[], BlockHeader]) -> BlockHeader | None:
    try:
        return check()
    except StoreClosed:
        raise
    except StoreError as error:
        pack.faults.append(error)
        return None


def _check_manifest(check: PackCheck, file: FrameReader) -> None:
    """A bundle of format 1, and an exported file that was put here, have a copy of a manifest, which nothing reads."""
    try:
        file.encoded_manifest()
    except StoreClosed:
        raise
    except StoreError as error:
        check.faults.append(error)
