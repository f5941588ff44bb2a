"""Blocks on their way into a pack: hashed, with the id that follows, and their slots as they will lie in a frame."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from ..errors import CorruptBundle, InvalidDraft, LimitExceeded, StoreError
from ..limits import MAX_BLOCK_HEADER_BYTES, MAX_SLOTS
from .blocks import BLOCK_KINDS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec, block_id
from .codecs import PLANES_CODE, RAW_CODE, encode_slot
from .frames import FrameReader
from .layout import StoredSlot

T = TypeVar("T")
Buffers = list[memoryview | bytes]


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A draft with its id: hashed, not yet encoded or written."""

    id: bytes
    encoded_header: bytes
    header: BlockHeader
    slots: tuple[tuple[SlotDraft, list[memoryview]], ...]

    def entry(self) -> BlockEntry:
        header = self.header
        return BlockEntry(self.id, header.kind, header.start, header.token_count, header.raw_bytes)


def prepare_block(draft: BlockDraft, parent: bytes | None, identity_digest: bytes) -> PreparedBlock:
    """Hash a draft. `parent` is the id of the span that ends where this block starts.

    Raises:
        InvalidDraft, LimitExceeded
    """
    slots = tuple((slot, _byte_views(slot)) for slot in draft.slots)
    header = BlockHeader(
        kind=draft.kind,
        identity_digest=identity_digest,
        start=draft.start,
        tokens=bytes(draft.tokens),
        parent=parent,
        slots=tuple((slot.spec, _digest(views)) for slot, views in slots),
    )
    encoded = _encode_checked(header)
    return PreparedBlock(block_id(encoded), encoded, header, slots)


def stored_slot(
    spec: SlotSpec, views: Sequence[memoryview], digest: bytes, *, compressed: bool
) -> tuple[StoredSlot, Buffers]:
    """A slot as it will lie in the file: raw, or compressed if it may be and that makes it smaller."""
    encoded = encode_slot(views, spec) if compressed else None
    if encoded is None:
        return StoredSlot(RAW_CODE, spec.size_bytes, digest), list(views)
    buffers, stored_bytes = encoded
    return StoredSlot(PLANES_CODE, stored_bytes, _digest(buffers)), buffers


def compressed_slots(source: FrameReader, block_id: bytes) -> tuple[bytes, list[tuple[StoredSlot, Buffers]]]:
    """A frame of another file, its slots verified and compressed."""
    header, head = source.read_head(block_id)
    payloads = []
    for index, (spec, digest) in enumerate(header.slots):
        raw = memoryview(bytearray(spec.size_bytes))
        source.read_slots_into(block_id, header, head, [(index, [raw])])
        payloads.append(stored_slot(spec, [raw], digest, compressed=True))
    return head.block_header, payloads


def joined_block(files: Sequence[FrameReader], block_id: bytes) -> PreparedBlock | None:
    """A block put together slot by slot from damaged frames in several files; None if a slot is sound in none."""
    block: tuple[bytes, BlockHeader] | None = None
    found: dict[int, memoryview] = {}
    for file in files if len(files) > 1 else ():
        with contextlib.suppress(StoreError):
            header, head = file.read_head(block_id)
            block = head.block_header, header
            for index in set(range(min(len(head.stored), len(header.slots)))) - found.keys():
                raw = memoryview(bytearray(header.slots[index][0].size_bytes))
                with contextlib.suppress(StoreError):
                    file.read_slots_into(block_id, header, head, [(index, [raw])])
                    found[index] = raw
    if block is None or len(found) < len(block[1].slots):
        return None
    slots = tuple((SlotDraft(spec, [found[at]]), [found[at]]) for at, (spec, _) in enumerate(block[1].slots))
    return PreparedBlock(block_id, *block, slots)


def _byte_views(slot: SlotDraft) -> list[memoryview]:
    try:
        views = [memoryview(buffer).cast("B") for buffer in slot.buffers if memoryview(buffer).nbytes]
    except TypeError as error:
        raise InvalidDraft(f"slot {slot.spec.name}: a buffer is not contiguous.", slot=slot.spec.name) from error
    size_bytes = sum(view.nbytes for view in views)
    if size_bytes != slot.spec.size_bytes:
        raise InvalidDraft(
            f"slot {slot.spec.name}: its buffers have {size_bytes} bytes, its shape {slot.spec.size_bytes}.",
            slot=slot.spec.name,
        )
    return views


def _digest(views: Sequence[memoryview | bytes]) -> bytes:
    hasher = blake3()
    for view in views:
        hasher.update(view)
    return hasher.digest()


def _encode_checked(header: BlockHeader) -> bytes:
    """Encode a header; refuse one that a reader would not accept, in words for the caller."""
    if header.kind not in BLOCK_KINDS or len(header.slots) > MAX_SLOTS:
        raise InvalidDraft(f"a block of kind {header.kind!r} with {len(header.slots)} slots is not part of the format.")
    try:
        header.require_valid()
        encoded = header.encode()
    except (CorruptBundle, OverflowError, TypeError) as error:
        raise InvalidDraft(f"the block at token {header.start} contradicts itself: {error}") from error
    if len(encoded) > MAX_BLOCK_HEADER_BYTES:
        raise LimitExceeded(
            f"the block's header would have {len(encoded)} bytes, the limit is {MAX_BLOCK_HEADER_BYTES}.",
            size_bytes=len(encoded),
            limit=MAX_BLOCK_HEADER_BYTES,
        )
    return encoded
