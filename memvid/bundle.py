"""Reading bundles: one checked file (`BundleFile`), and a session's state across its ancestors (`BundleReader`).

Owns every check between a file descriptor and a slot's raw bytes. Knows nothing of the index or of who owns a session.

Rules: a length is compared with its limit before memory is taken for it. A bundle id is recomputed before a field of
the manifest is used, a block id before a field of its header, a slot's digest after its bytes were filled in: the
caller gets an error or the right bytes, but its buffers may hold the wrong ones when an error is raised.
Reads are positioned, so all methods may be called from several threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Self

from blake3 import blake3

from .blocks import BlockEntry, BlockHeader, SlotSpec, block_id, span_parents
from .codecs import CODEC_NAMES, RAW_CODE, decompress_chunks, decompress_into
from .errors import BlockMissing, BundleMismatch, CorruptBlock, CorruptBundle, LimitExceeded, StoreClosed, Truncated
from .layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    FrameHead,
    StoredSlot,
    aligned,
    bundle_id_of,
    decode_frame_head,
    decode_trailer,
    head_bytes_for,
    require_header,
)
from .limits import CHUNK_BYTES, MAX_BLOCK_HEADER_BYTES, MAX_IOVECS, MAX_OPEN_ANCESTORS, MAX_SLOTS
from .manifest import Manifest, decode_manifest, require_gapless
from .paths import io_error, stat_open

_MAX_HEAD_BYTES: Final = head_bytes_for(MAX_BLOCK_HEADER_BYTES, MAX_SLOTS)


class BundleFile:
    """One bundle file whose header, trailer, manifest and bundle id have been checked. Owns its descriptor."""

    def __init__(self, fd: int, path: str, expected_id: bytes | None) -> None:
        """Take over `fd` and check the file's frame of reference; on an error the descriptor is closed.

        Raises:
            UnsupportedFormat, Truncated, TrailingData, CorruptBundle, BundleMismatch, LimitExceeded
        """
        self._fd = fd
        self.path = path
        try:
            self.file_bytes = stat_open(fd, path).st_size
            self.bundle_id, self.manifest = self._load(expected_id)
        except BaseException:
            self.close()
            raise
        self._own = {entry.id: entry for entry in self.manifest.own_blocks}
        self._parents = span_parents(self.manifest.blocks)

    def _load(self, expected_id: bytes | None) -> tuple[bytes, Manifest]:
        header = self._read(0, min(HEADER_BYTES, self.file_bytes))
        require_header(header, self.file_bytes, self.path)
        trailer = decode_trailer(self._read(self.file_bytes - TRAILER_BYTES, TRAILER_BYTES), self.file_bytes, self.path)
        encoded = self._read(trailer.manifest_offset, trailer.manifest_bytes)
        bundle_id = bundle_id_of(header, encoded)
        if bundle_id != trailer.bundle_id:
            raise CorruptBundle(
                f"{self.path}: the manifest is damaged: its bundle id is not the one in the trailer.",
                path=self.path,
                part="manifest",
            )
        if expected_id is not None and bundle_id != expected_id:
            raise BundleMismatch(
                f"{self.path} holds the bundle {bundle_id.hex()}: its content is not what its name promises. "
                "Put the right file back from a backup, or delete the session.",
                path=self.path,
                expected=expected_id.hex(),
                found=bundle_id.hex(),
            )
        manifest = decode_manifest(encoded, self.path)
        require_gapless(manifest.blocks, trailer.manifest_offset, self.path)
        return bundle_id, manifest

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def require_block(self, entry: BlockEntry) -> None:
        """Raise BlockMissing unless this file itself holds the block, as the entry describes it."""
        own = self._own.get(entry.id)
        if own is None or _place(own) != _place(entry):
            raise BlockMissing(
                f"{self.path} does not hold the block {entry.id.hex()} that a later bundle refers to.",
                block_id=entry.id.hex(),
                path=self.path,
            )

    def parent_of(self, entry: BlockEntry) -> bytes | None:
        """The id of the span that the block list puts before a block of this file."""
        return self._parents.get(entry.id)

    def read_head(self, entry: BlockEntry) -> tuple[BlockHeader, FrameHead]:
        """Read a block's head and recompute its id. Raises CorruptBundle, LimitExceeded, Truncated."""
        if entry.head_bytes > _MAX_HEAD_BYTES:
            raise LimitExceeded(
                f"{self.path}: a block's head has {entry.head_bytes} bytes, the limit is {_MAX_HEAD_BYTES}.",
                path=self.path,
                size_bytes=entry.head_bytes,
                limit=_MAX_HEAD_BYTES,
            )
        head = decode_frame_head(self._read(entry.offset, entry.head_bytes), self.path)
        if block_id(head.block_header) != entry.id:
            self._bad_head(entry, "its header has another block id")
        header = BlockHeader.decode(head.block_header)
        if (header.kind, header.start, header.token_count, header.raw_bytes, head.frame_bytes) != (
            entry.kind,
            entry.start,
            entry.token_count,
            entry.raw_bytes,
            entry.frame_bytes,
        ):
            self._bad_head(entry, "its header and the block list differ")
        if header.identity_digest != self.manifest.identity.digest:
            self._bad_head(entry, "it was made under another identity than its bundle")
        if header.parent != self.parent_of(entry):
            self._bad_head(entry, "it follows another block than the block list says")
        if len(head.stored) != len(header.slots):
            self._bad_head(entry, "its storage table has another number of slots")
        for (spec, digest), stored in zip(header.slots, head.stored, strict=True):
            if stored.codec not in CODEC_NAMES:
                self._bad_head(entry, f"slot {spec.name} is stored with an unknown codec {stored.codec}")
            if stored.codec == RAW_CODE and (stored.stored_bytes, stored.digest) != (spec.size_bytes, digest):
                self._bad_head(entry, f"the storage table differs from slot {spec.name}")
            if stored.codec != RAW_CODE and stored.stored_bytes >= spec.size_bytes:
                self._bad_head(entry, f"slot {spec.name} is stored in more bytes than it has")
        return header, head

    def read_slot_into(
        self, entry: BlockEntry, header: BlockHeader, head: FrameHead, slot_index: int, buffers: Sequence[memoryview]
    ) -> None:
        """Fill the buffers with a slot's raw bytes and compare their digest. Raises CorruptBlock."""
        spec, digest = header.slots[slot_index]
        stored = head.stored[slot_index]
        offset = entry.offset + head.payload_offsets()[slot_index]
        where = self._slot_name(entry, spec)
        if stored.codec == RAW_CODE:
            self._read_into(offset, buffers)
        else:
            decompress_into(self._read_stored(offset, stored, entry, spec), buffers, where)
        hasher = blake3()
        for buffer in buffers:
            hasher.update(buffer)
        if hasher.digest() != digest:
            self._bad_slot(entry, spec)

    def check_block(self, entry: BlockEntry, on_bytes: Callable[[int], None] | None = None) -> BlockHeader:
        """Read every byte of a block's frame and check it, in memory of CHUNK_BYTES and one compressed slot."""
        header, head = self.read_head(entry)
        for (spec, digest), stored, offset in zip(header.slots, head.stored, head.payload_offsets(), strict=True):
            start = entry.offset + offset
            hasher = blake3()
            for chunk in self._raw_chunks(entry, spec, stored, start):
                hasher.update(chunk)
            if hasher.digest() != digest:
                self._bad_slot(entry, spec)
            padding = aligned(stored.stored_bytes) - stored.stored_bytes
            if any(self._read(start + stored.stored_bytes, padding)):
                self._bad_slot(entry, spec, "the bytes after it are not zero")
            if on_bytes is not None:
                on_bytes(stored.stored_bytes)
        return header

    def _raw_chunks(self, entry: BlockEntry, spec: SlotSpec, stored: StoredSlot, start: int) -> Iterator[memoryview]:
        if stored.codec != RAW_CODE:
            data = self._read_stored(start, stored, entry, spec)
            yield from decompress_chunks(data, spec.size_bytes, self._slot_name(entry, spec))
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, stored.stored_bytes)))
        for done in range(0, stored.stored_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, stored.stored_bytes - done)]
            self._read_into(start + done, [chunk])
            yield chunk

    def _read_stored(self, offset: int, stored: StoredSlot, entry: BlockEntry, spec: SlotSpec) -> bytearray:
        data = bytearray(stored.stored_bytes)
        self._read_into(offset, [memoryview(data)])
        if blake3(data).digest() != stored.digest:
            self._bad_slot(entry, spec)
        return data

    def _read(self, offset: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._read_into(offset, [memoryview(data)])
        return bytes(data)

    def _read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._fd < 0:
            raise StoreClosed(f"{self.path} was closed.", path=self.path)
        waiting = [buffer for buffer in buffers if buffer.nbytes]
        done = 0
        while done < len(waiting):
            try:
                count = os.preadv(self._fd, waiting[done : done + MAX_IOVECS], offset)
            except OSError as error:
                raise io_error(error, "read", self.path) from error
            if not count:
                raise Truncated(f"{self.path} ends at {offset}, earlier than it should.", path=self.path)
            offset += count
            while done < len(waiting) and count >= waiting[done].nbytes:
                count -= waiting[done].nbytes
                done += 1
            if count:
                waiting[done] = waiting[done][count:]

    def _slot_name(self, entry: BlockEntry, spec: SlotSpec) -> str:
        return f"{self.path}: block {entry.id.hex()[:16]} at token {entry.start}, slot {spec.name}"

    def _bad_head(self, entry: BlockEntry, why: str) -> NoReturn:
        raise CorruptBundle(
            f"{self.path}: the head of block {entry.id.hex()[:16]} at token {entry.start} is damaged: {why}.",
            path=self.path,
            part="frame",
            block_id=entry.id.hex(),
        )

    def _bad_slot(
        self, entry: BlockEntry, spec: SlotSpec, why: str = "its bytes are not those that were written"
    ) -> NoReturn:
        raise CorruptBlock(
            f"{self._slot_name(entry, spec)} is damaged: {why}.",
            path=self.path,
            block_id=entry.id.hex(),
            slot=spec.name,
        )


def _place(entry: BlockEntry) -> tuple[Any, ...]:
    return (
        entry.offset,
        entry.head_bytes,
        entry.frame_bytes,
        entry.raw_bytes,
        entry.kind,
        entry.start,
        entry.token_count,
    )


class BundleReader:
    """A session's state as one bundle describes it, its blocks read from wherever they are. Close it when done.

    While it is open, its bundle and those it refers to are pinned: a delete leaves their files until it closes.
    """

    def __init__(
        self, file: BundleFile, open_file: Callable[[bytes], BundleFile], on_close: Callable[[], None]
    ) -> None:
        self._file = file
        self._ancestors = _FilePool(open_file)
        self._on_close = on_close
        self._heads: dict[bytes, tuple[BlockHeader, FrameHead]] = {}
        self._closed = False
        self.bundle_id = file.bundle_id
        self.manifest = file.manifest
        self.path = file.path
        self.file_bytes = file.file_bytes
        self.entries = tuple(entry.in_bundle(file.bundle_id) for entry in file.manifest.blocks)
        self._parents = span_parents(self.entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let go of the pins. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ancestors.close()
        self._file.close()
        self._on_close()

    def read_header(self, entry: BlockEntry) -> BlockHeader:
        """The block's header, its id recomputed; read once, then remembered.

        Raises:
            CorruptBundle, BlockMissing, BundleMissing, and what opening an ancestor raises.
        """
        with self._holding(entry) as file:
            return self._head(file, entry)[0]

    def read_slot_into(self, entry: BlockEntry, slot_index: int, buffers: Sequence[memoryview]) -> None:
        """Fill writable byte buffers, in order, with a slot's raw bytes. Their sizes must add up to the slot's.

        Raises:
            CorruptBlock: the bytes are not those that were written; the buffers' content is then undefined.
        """
        with self._holding(entry) as file:
            header, head = self._head(file, entry)
            views = [_byte_view(buffer) for buffer in buffers if buffer.nbytes]
            expected_bytes = header.slots[slot_index][0].size_bytes
            if sum(view.nbytes for view in views) != expected_bytes:
                raise LimitExceeded(
                    f"the buffers for slot {header.slots[slot_index][0].name} do not add up to {expected_bytes} bytes.",
                    expected=expected_bytes,
                )
            file.read_slot_into(entry, header, head, slot_index, views)

    def read_slot(self, entry: BlockEntry, slot_index: int) -> bytearray:
        """A slot's raw bytes in memory of their own."""
        data = bytearray(self.read_header(entry).slots[slot_index][0].size_bytes)
        self.read_slot_into(entry, slot_index, [memoryview(data)])
        return data

    def tokens(self) -> bytes:
        """The token ledger: uint32 little-endian ids of all spans in order, from the block headers."""
        ledger = b"".join(self.read_header(entry).tokens for entry in self.entries if entry.kind == "span")
        if len(ledger) != 4 * self.manifest.token_count:
            raise CorruptBundle(
                f"{self.path}: the blocks hold {len(ledger) // 4} tokens, not {self.manifest.token_count}.",
                path=self.path,
                part="manifest",
            )
        return ledger

    def _head(self, file: BundleFile, entry: BlockEntry) -> tuple[BlockHeader, FrameHead]:
        known = self._heads.get(entry.id)
        if known is None:
            file.require_block(entry)
            known = file.read_head(entry)
            self._require_place_in_chain(entry, known[0])
            self._heads[entry.id] = known
        return known

    def _require_place_in_chain(self, entry: BlockEntry, header: BlockHeader) -> None:
        """The block must be of this session's identity, and follow the very block that it names as its parent."""
        promised = (self._parents.get(entry.id), self.manifest.identity.digest)
        if (header.parent, header.identity_digest) != promised:
            raise CorruptBundle(
                f"{self.path}: the block at token {entry.start} belongs to another chain or identity.",
                path=self.path,
                part="manifest",
                block_id=entry.id.hex(),
            )

    @contextlib.contextmanager
    def _holding(self, entry: BlockEntry) -> Iterator[BundleFile]:
        if self._closed:
            raise StoreClosed("This bundle reader was closed.", path=self.path)
        if entry.bundle_id is None or entry.bundle_id == self.bundle_id:
            yield self._file
        else:
            with self._ancestors.holding(entry.bundle_id) as file:
                yield file


class _FilePool:
    """Open ancestor files: few at a time, the longest unused one closed first, none while it is being read."""

    def __init__(self, open_file: Callable[[bytes], BundleFile]) -> None:
        self._open_file = open_file
        self._files: OrderedDict[bytes, BundleFile] = OrderedDict()
        self._users: dict[bytes, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def holding(self, bundle_id: bytes) -> Iterator[BundleFile]:
        with self._lock:
            file = self._files.get(bundle_id)
            if file is None:
                file = self._files[bundle_id] = self._open_file(bundle_id)
            self._files.move_to_end(bundle_id)
            self._users[bundle_id] = self._users.get(bundle_id, 0) + 1
            self._close_surplus()
        try:
            yield file
        finally:
            with self._lock:
                self._users[bundle_id] -= 1

    def _close_surplus(self) -> None:
        for bundle_id in list(self._files)[: max(0, len(self._files) - MAX_OPEN_ANCESTORS)]:
            if not self._users.get(bundle_id):
                self._files.pop(bundle_id).close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()


def _byte_view(buffer: memoryview) -> memoryview:
    """The buffer as plain writable bytes; a TypeError for one that is not contiguous is the caller's bug."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("a buffer to be filled must be writable")
    return view
