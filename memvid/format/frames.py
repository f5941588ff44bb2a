"""Reads block frames of one open file: the file's kind says which frames there are (`_load`).

Owns every check between a file descriptor and a slot's raw bytes. Knows no index, and no owner of a session.

Rules:
- A length is compared with its limit before memory is taken for it.
- Each digest is compared before its content is used: a block id before a field of its header. A slot's digest is
  compared after its bytes were read into the caller's buffers: on an error they may hold wrong bytes.
- Reads are positioned, so all methods may be called from several threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NoReturn

from blake3 import blake3

from ..disk.paths import Closing, Stamp, io_error, stamp_of, stat_open, undoing
from ..errors import BlockMissing, CorruptBlock, CorruptBundle, LimitExceeded, StoreClosed, Truncated
from ..limits import CHUNK_BYTES, MAX_BLOCK_HEADER_BYTES, MAX_IOVECS, MAX_SLOTS
from .blocks import BlockEntry, BlockHeader, SlotSpec
from .blocks import block_id as block_id_of
from .codecs import CODES, RAW_CODE, decode_chunks, decode_into
from .layout import Frame, FrameHead, StoredSlot, aligned, decode_frame_head, head_bytes_for

_MAX_HEAD_BYTES: Final = head_bytes_for(MAX_BLOCK_HEADER_BYTES, MAX_SLOTS)

Head = tuple[BlockHeader, FrameHead]
"""An unpacked frame head, and its block header."""


class FrameReader(Closing):
    """An open file with frames. Owns its descriptor.

    The block id proves a frame to any manifest. The user of this object fills `checked_heads`: the heads that matched a
    manifest.
    """

    def __init__(self, fd: int, path: str, expected_id: bytes | None) -> None:
        """Take over `fd` and check the file's frame of reference; on an error the descriptor is closed.

        Raises:
            UnsupportedFormat, Truncated, TrailingData, CorruptBundle, BundleMismatch
        """
        self._fd = fd
        self.path = path
        self.checked_heads: dict[bytes, Head] = {}
        self.heads: dict[bytes, Frame] = {}  # of stripped blocks: a header, and no slot's bytes
        self.torn: dict[bytes, Frame] = {}  # a sound head, and damaged keys and values: `DamagedPack` alone looks
        with undoing(self.close):
            self.file_bytes = stat_open(fd, path).st_size
            self._load(expected_id)

    frames: dict[bytes, Frame]

    def _load(self, expected_id: bytes | None) -> None:
        """Find out which frames there are. expected_id: what the file's name promises, if anything."""
        raise NotImplementedError

    def encoded_manifest(self) -> bytes:
        """The manifest in this file; empty if there is none. Raises CorruptBundle, StoreIoError."""
        return b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def stamp(self) -> Stamp:
        return stamp_of(stat_open(self._fd, self.path))

    def frame_of(self, block_id: bytes) -> Frame:
        """A block's frame. Raises BlockMissing unless this file holds it."""
        frame = self.frames.get(block_id)
        if frame is None:
            raise BlockMissing(
                f"{self.path} does not hold the block {block_id.hex()} that a bundle looks for in it.",
                block_id=block_id.hex(),
                path=self.path,
            )
        return frame

    def read_head(self, block_id: bytes) -> Head:
        """Read a block's head and recompute its id. Raises BlockMissing, CorruptBundle, LimitExceeded, Truncated."""
        frame = self.heads.get(block_id) or self.frame_of(block_id)
        if frame.head_bytes > _MAX_HEAD_BYTES:
            raise LimitExceeded(
                f"{self.path}: a block's head has {frame.head_bytes} bytes, the limit is {_MAX_HEAD_BYTES}.",
                path=self.path,
                size_bytes=frame.head_bytes,
                limit=_MAX_HEAD_BYTES,
            )
        head = decode_frame_head(self._read(frame.offset, frame.head_bytes), self.path)
        if block_id_of(head.block_header) != block_id:
            self._bad_head(frame, "its header has another block id")
        if head.frame_bytes != frame.frame_bytes:
            self._bad_head(frame, "its length and the directory's differ")
        header = BlockHeader.decode(head.block_header)
        if block_id in self.heads:
            if head.stored:
                self._bad_head(frame, "it has slots, though the block is stripped")
            return header, head
        if len(head.stored) != len(header.slots):
            self._bad_head(frame, "its storage table has another number of slots")
        for (spec, digest), stored in zip(header.slots, head.stored, strict=True):
            if stored.codec not in CODES:
                self._bad_head(frame, f"slot {spec.name} is stored with an unknown codec {stored.codec}")
            if stored.codec == RAW_CODE and (stored.stored_bytes, stored.digest) != (spec.size_bytes, digest):
                self._bad_head(frame, f"the storage table differs from slot {spec.name}")
            if stored.codec != RAW_CODE and stored.stored_bytes >= spec.size_bytes:
                self._bad_head(frame, f"slot {spec.name} is stored in more bytes than it has")
        return header, head

    def read_slots_into(
        self,
        block_id: bytes,
        header: BlockHeader,
        head: FrameHead,
        targets: Iterable[tuple[int, Sequence[memoryview]]],
    ) -> None:
        """See `BundleReader.read_slots_into`. Raw slots that lie side by side are read in one call, as far as they are
        no more than CHUNK_BYTES: these are still in the processor's cache when they are hashed."""
        start = self.frame_of(block_id).offset
        batch: list[tuple[int, Sequence[memoryview]]] = []
        begin = end = 0
        for index, buffers in targets:
            _require_room(header, index, buffers)
            stored, offset = head.stored[index], head.payload_offsets[index]
            if stored.codec != RAW_CODE:
                self._decode_slot(start + offset, stored, header, index, buffers)
                self._require_digest(header, index, buffers)
                continue
            if batch and (offset != end or end - begin + stored.stored_bytes > CHUNK_BYTES):
                self._read_raw(start + begin, header, batch)
                batch = []
            if not batch:
                begin = offset
            batch.append((index, buffers))
            end = offset + stored.stored_bytes
        if batch:
            self._read_raw(start + begin, header, batch)

    def _read_raw(self, offset: int, header: BlockHeader, batch: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        self._read_into(offset, [buffer for _, buffers in batch for buffer in buffers])
        for index, buffers in batch:
            self._require_digest(header, index, buffers)

    def _decode_slot(
        self, offset: int, stored: StoredSlot, header: BlockHeader, index: int, buffers: Sequence[memoryview]
    ) -> None:
        spec, _ = header.slots[index]
        data = self._read_stored(offset, stored, header, spec)
        views = [memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes]
        decode_into(data, views, spec.element_bytes, self._slot_name(header, spec))

    def _require_digest(self, header: BlockHeader, index: int, buffers: Sequence[memoryview]) -> None:
        spec, digest = header.slots[index]
        hasher = blake3()
        for buffer in buffers:
            hasher.update(buffer)
        if hasher.digest() != digest:
            self._bad_slot(header, spec)

    def check_block(self, block_id: bytes, *, known: Head | None = None) -> BlockHeader:
        """Read and check every byte of a block's frame, in memory of CHUNK_BYTES and one compressed slot. known: its
        head, if it was just read."""
        header, head = self.check_payloads(block_id, known=known)
        start = self.frame_of(block_id).offset
        for (spec, _), stored, offset in zip(header.slots, head.stored, head.payload_offsets, strict=True):
            padding = aligned(stored.stored_bytes) - stored.stored_bytes
            if any(self._read(start + offset + stored.stored_bytes, padding)):
                self._bad_slot(header, spec, "the bytes after it are not zero")
        return header

    def check_payloads(self, block_id: bytes, *, known: Head | None = None) -> Head:
        """Check all of a block's frame that a wake reads: the padding behind payloads is left out."""
        header, head = known or self.read_head(block_id)
        frame = self.frame_of(block_id)
        for (spec, digest), stored, offset in zip(header.slots, head.stored, head.payload_offsets, strict=True):
            start = frame.offset + offset
            hasher = blake3()
            for chunk in self._raw_chunks(header, spec, stored, start):
                hasher.update(chunk)
            if hasher.digest() != digest:
                self._bad_slot(header, spec)
        return header, head

    def frame_chunks(self, block_id: bytes) -> Iterator[memoryview]:
        """A frame's head and payloads as they lie in the file, for a copy; each chunk is valid until the next, and
        may be one that nobody may write in.

        The head is checked before the first chunk. The payloads are not: the copier reads its copy back. Padding comes
        out as zeros: it means nothing, and a copy must not keep damage in it.
        """
        _, head = self.read_head(block_id)
        frame = self.frame_of(block_id)
        ends = [offset + stored.stored_bytes for offset, stored in zip(head.payload_offsets, head.stored, strict=True)]
        paddings = deque((end, aligned(end)) for end in ends)
        done = 0
        for chunk in self._chunks(frame.offset, frame.frame_bytes):
            first, done = done, done + len(chunk)
            while paddings and paddings[0][0] < done:
                start, end = (min(max(at, first), done) - first for at in paddings[0])
                if any(chunk[start:end]):
                    chunk = memoryview(bytearray(chunk))
                    chunk[start:end] = bytes(end - start)
                if paddings[0][1] > done:
                    break
                paddings.popleft()
            yield chunk

    def _raw_chunks(self, header: BlockHeader, spec: SlotSpec, stored: StoredSlot, start: int) -> Iterator[memoryview]:
        if stored.codec == RAW_CODE:
            yield from self._chunks(start, stored.stored_bytes)
            return
        data = self._read_stored(start, stored, header, spec)
        where = self._slot_name(header, spec)
        yield from decode_chunks(data, spec.size_bytes, spec.element_bytes, where)

    def _chunks(self, start: int, size_bytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
        for done in range(0, size_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size_bytes - done)]
            self._read_into(start + done, [chunk])
            yield chunk

    def _read_stored(self, offset: int, stored: StoredSlot, header: BlockHeader, spec: SlotSpec) -> bytearray:
        data = bytearray(stored.stored_bytes)
        self._read_into(offset, [memoryview(data)])
        if blake3(data).digest() != stored.digest:
            self._bad_slot(header, spec)
        return data

    def _read(self, offset: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._read_into(offset, [memoryview(data)])
        return bytes(data)

    def _read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._fd < 0:
            raise StoreClosed(f"{self.path} was closed.", path=self.path)
        rest_bytes = sum(buffer.nbytes for buffer in buffers)
        while rest_bytes:
            try:
                count = os.preadv(self._fd, buffers[:MAX_IOVECS], offset)
            except OSError as error:
                raise io_error(error, "read", self.path) from error
            if not count:
                raise Truncated(f"{self.path} ends at {offset}, earlier than it should.", path=self.path)
            rest_bytes -= count
            if rest_bytes:
                offset += count
                buffers = _behind(buffers, count)

    def _slot_name(self, header: BlockHeader, spec: SlotSpec) -> str:
        return f"{self.path}: {header.kind} block at token {header.start}, slot {spec.name}"

    def _bad_head(self, frame: Frame, why: str) -> NoReturn:
        raise CorruptBundle(
            f"{self.path}: the head of block {frame.id.hex()[:16]} at byte {frame.offset} is damaged: {why}.",
            path=self.path,
            part="frame",
            block_id=frame.id.hex(),
        )

    def _bad_slot(
        self, header: BlockHeader, spec: SlotSpec, why: str = "its bytes are not those that were written"
    ) -> NoReturn:
        raise CorruptBlock(
            f"{self._slot_name(header, spec)} is damaged: {why}.",
            path=self.path,
            block_id=block_id_of(header.encode()).hex(),
            slot=spec.name,
        )


def require_promised(
    header: BlockHeader, entry: BlockEntry, parent: bytes | None, identity_digest: bytes, path: str
) -> None:
    """Raise CorruptBundle unless a block matches its manifest: place, size, identity, parent (threats 5 and 6)."""
    if header.said != entry.said_with(parent, identity_digest):
        raise CorruptBundle(
            f"{path}: the block at token {entry.start} is not the one that the manifest describes: it has another "
            "place, size, chain or identity.",
            path=path,
            part="manifest",
            block_id=entry.id.hex(),
        )


def _require_room(header: BlockHeader, index: int, buffers: Sequence[memoryview]) -> None:
    spec, _ = header.slots[index]
    if sum(buffer.nbytes for buffer in buffers) != spec.size_bytes:
        raise LimitExceeded(
            f"the buffers for slot {spec.name} do not add up to {spec.size_bytes} bytes.", expected=spec.size_bytes
        )


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(memoryview(buffer).cast("B")[count:] if count else buffer)
        count -= min(count, buffer.nbytes)
    return rest
