"""Writing one bundle into a temporary file, and reading it back before anyone is told.

Owns the order blocks → manifest → trailer → header → flush → read back. Does not publish, and knows no index or lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from blake3 import blake3

from .blocks import BLOCK_KINDS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, block_id
from .bundle import BundleFile
from .codecs import RAW_CODE, ZSTD_CODE, Codec, compress
from .durable import TempFile
from .errors import CorruptBundle, Corruption, InvalidDraft, LimitExceeded, ReadBackFailed
from .layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    StoredSlot,
    Trailer,
    aligned,
    bundle_id_of,
    encode_frame_head,
    encode_header,
    frame_bytes_for,
)
from .limits import MAX_BLOCK_HEADER_BYTES, MAX_BUNDLE_BYTES, MAX_SLOTS
from .manifest import Manifest
from .paths import io_error


class BundleWriter:
    """Writes one bundle. The caller owns the temporary file and publishes or closes it."""

    def __init__(self, temp: TempFile, identity_digest: bytes, codec: Codec) -> None:
        self._temp = temp
        self._identity_digest = identity_digest
        self._codec = codec
        temp.append([bytes(HEADER_BYTES)])  # zeros until the end: a torn file is no bundle

    def add_block(self, draft: BlockDraft, parent: bytes | None) -> BlockEntry:
        """Append one block's frame. `parent` is the id of the span that ends where this block starts.

        Raises:
            InvalidDraft, LimitExceeded, NoSpace, StoreIoError
        """
        slots = [(slot, _byte_views(slot)) for slot in draft.slots]
        header = BlockHeader(
            kind=draft.kind,
            identity_digest=self._identity_digest,
            start=draft.start,
            tokens=bytes(draft.tokens),
            parent=parent,
            slots=tuple((slot.spec, _digest(views)) for slot, views in slots),
        )
        encoded = _encode_checked(header)
        payloads = [
            self._store(slot, views, digest) for (slot, views), (_, digest) in zip(slots, header.slots, strict=True)
        ]
        stored = [slot for slot, _ in payloads]
        head = encode_frame_head(encoded, stored)
        entry = BlockEntry(
            id=block_id(encoded),
            bundle_id=None,
            offset=self._temp.size_bytes,
            head_bytes=len(head),
            frame_bytes=frame_bytes_for(len(head), stored),
            raw_bytes=header.raw_bytes,
            kind=draft.kind,
            start=draft.start,
            token_count=draft.token_count,
        )
        if entry.offset + entry.frame_bytes > MAX_BUNDLE_BYTES:
            raise LimitExceeded(f"the bundle would have more than {MAX_BUNDLE_BYTES} bytes.", limit=MAX_BUNDLE_BYTES)
        buffers: list[memoryview | bytes] = [head]
        for slot, views in payloads:
            buffers += [*views, bytes(aligned(slot.stored_bytes) - slot.stored_bytes)]
        self._temp.append(buffers)
        return entry

    def _store(self, slot: SlotDraft, views: list[memoryview], digest: bytes) -> tuple[StoredSlot, list[memoryview]]:
        size_bytes = slot.spec.size_bytes
        if self._codec.code == ZSTD_CODE and size_bytes:
            data = compress(views, size_bytes, self._codec.level)
            if len(data) < size_bytes:
                return StoredSlot(ZSTD_CODE, len(data), blake3(data).digest()), [memoryview(data)]
        return StoredSlot(RAW_CODE, size_bytes, digest), views

    def finish(self, manifest: Manifest) -> bytes:
        """Write manifest, trailer and header, flush, and read everything back. Returns the bundle id.

        Raises:
            ReadBackFailed: the file does not hold what was meant.
            DurabilityLost, NoSpace, StoreIoError
        """
        encoded = manifest.encode()
        manifest_offset = self._temp.size_bytes
        file_bytes = manifest_offset + len(encoded) + TRAILER_BYTES
        header = encode_header(file_bytes)
        bundle_id = bundle_id_of(header, encoded)
        trailer = Trailer(manifest_offset, len(encoded), file_bytes, bundle_id)
        self._temp.append([encoded, trailer.encode()])
        self._temp.rewrite_start(header)
        self._temp.sync()
        self._read_back(bundle_id, manifest)
        return bundle_id

    def _read_back(self, bundle_id: bytes, manifest: Manifest) -> None:
        """Decode what was encoded, with the code that a wake will use, before anyone relies on it."""
        try:
            fd = os.dup(self._temp.fd)
        except OSError as error:
            raise io_error(error, "read back", self._temp.path) from error
        try:
            file = BundleFile(fd, self._temp.path, bundle_id)
            try:
                for entry in manifest.own_blocks:
                    file.check_block(entry)
            finally:
                file.close()
        except Corruption as error:
            raise ReadBackFailed(
                f"What was written did not read back: {error.message} The session was not put to sleep; it is still "
                "awake. Check memory and disk.",
                path=self._temp.path,
                cause=error.code,
            ) from error


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


def _digest(views: Sequence[memoryview]) -> bytes:
    hasher = blake3()
    for view in views:
        hasher.update(view)
    return hasher.digest()


def _encode_checked(header: BlockHeader) -> bytes:
    """Encode a header that a reader will accept; refuse it with the caller's words otherwise."""
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
