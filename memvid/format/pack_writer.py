"""Writing one pack into a temporary file, and reading it back before anything relies on it. Its blocks are hashed here,
and laid out as they will lie in a frame.

Owns the order frames → manifest → directory → trailer → header → flush → read back. Does not publish, and knows no
index or lock.

Frames of a long pack are flushed and read back while the next ones are written, in this order, too. What was not, is at
the end: `finish` relies on nothing that was not read back behind its own flush.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from ..disk.durable import TempFile
from ..errors import CorruptBundle, Corruption, InvalidDraft, LimitExceeded, ReadBackFailed, StoreError
from ..limits import MAX_BLOCK_HEADER_BYTES, MAX_BUNDLE_BYTES, MAX_FRAMES, MAX_SLOTS, PROVEN_BEHIND_BYTES
from .blocks import BLOCK_KINDS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec
from .blocks import block_id as block_id_of
from .codecs import PLANES_CODE, RAW_CODE, encode_slot
from .frames import FrameReader
from .layout import Frame, StoredSlot, aligned, encode_frame_head, frame_bytes_for
from .manifest import bundle_id_of
from .pack import PackFile, Trailer, encode_directory, pack_id_of
from .sealing import HEADER_BYTES, PACK_MAGIC, encode_header

T = TypeVar("T")
Buffers = list[memoryview | bytes]
Room = Callable[[int], None]
"""Told the number of bytes before each write; raises if there is no room for them."""


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A draft with its id: hashed, not yet encoded or written."""

    id: bytes
    encoded_header: bytes
    header: BlockHeader
    views: tuple[list[memoryview], ...]
    """Of each slot in the header: where its raw bytes are."""

    def entry(self) -> BlockEntry:
        header = self.header
        return BlockEntry(self.id, header.kind, header.start, header.token_count, header.raw_bytes)


def prepare_block(draft: BlockDraft, parent: bytes | None, identity_digest: bytes) -> PreparedBlock:
    """Hash a draft. `parent` is the id of the span that ends where this block starts.

    Raises:
        InvalidDraft, LimitExceeded
    """
    slots = tuple((slot.spec, _byte_views(slot)) for slot in draft.slots)
    header = BlockHeader(
        kind=draft.kind,
        identity_digest=identity_digest,
        start=draft.start,
        tokens=bytes(draft.tokens),
        parent=parent,
        slots=tuple((spec, _digest(views)) for spec, views in slots),
    )
    encoded = _encode_checked(header)
    return PreparedBlock(block_id_of(encoded), encoded, header, tuple(views for _, views in slots))


def joined_block(files: Sequence[FrameReader], block_id: bytes) -> PreparedBlock | None:
    """A block put together slot by slot from damaged frames in several files; None if a slot is sound in none."""
    block: tuple[bytes, BlockHeader] | None = None
    slots: dict[int, memoryview] = {}
    for file in files if len(files) > 1 else ():
        with contextlib.suppress(StoreError):
            header, head = file.read_head(block_id)
            block = head.block_header, header
            for index in set(range(min(len(head.stored), len(header.slots)))) - slots.keys():
                raw = memoryview(bytearray(header.slots[index][0].size_bytes))
                with contextlib.suppress(StoreError):
                    file.read_slots_into(block_id, header, head, [(index, [raw])])
                    slots[index] = raw
    if block is None or len(slots) < len(block[1].slots):
        return None
    return PreparedBlock(block_id, *block, tuple([slots[at]] for at in range(len(slots))))


class PackWriter:
    """Writes one pack. The caller owns the temporary file and publishes or closes it."""

    def __init__(self, temp: TempFile, room: Room | None = None) -> None:
        self._temp = temp
        self._room = room
        self.frames: dict[bytes, Frame] = {}
        self._proven, self._proven_end = 0, HEADER_BYTES  # frames read back, or on the way to it; where they end

    @property
    def end(self) -> int:
        """Where the next frame begins, in bytes."""
        last = next(reversed(self.frames.values()), None)
        return last.offset + last.frame_bytes if last else HEADER_BYTES

    def expect(self, rest: Iterable[T], frame_bytes: Callable[[T], int]) -> None:
        """What is still to be added: if the disk fills up, `frame_bytes` measures it, and the error tells the length of
        the whole file."""
        self._temp.whole_bytes = lambda: self.end + sum(map(frame_bytes, rest))

    def each(self, items: Iterable[T], frame_bytes: Callable[[T], int]) -> Iterator[T]:
        """Yields the items, as far as they were expected (`expect`); add each before you take the next."""
        rest = iter(items)
        self.expect(rest, frame_bytes)
        yield from rest

    def add(self, block: PreparedBlock, *, compressed: bool = False) -> None:
        """Append a block's frame, unless it is there already. compressed: its slots, as far as they shrink.

        Raises:
            LimitExceeded, NoSpace, StoreIoError, and the errors of `room`.
        """
        if block.id in self.frames:
            return
        payloads = [
            _stored_slot(spec, views, digest, compressed=compressed)
            for (spec, digest), views in zip(block.header.slots, block.views, strict=True)
        ]
        self._add_frame(block.id, block.encoded_header, payloads)

    def add_copy(self, source: FrameReader, block_id: bytes, *, compressing: bool = False) -> None:
        """Append a frame of another file: as it lies there, or with its slots compressed, as far as they shrink.

        Damage in the source is found here or when the file is read back.

        Raises:
            BlockMissing, CorruptBundle, CorruptBlock, LimitExceeded, NoSpace, StoreIoError, and the errors of `room`.
        """
        if block_id in self.frames:
            return
        if compressing:
            self._add_frame(block_id, *_compressed_slots(source, block_id))
            return
        frame = source.frame_of(block_id)
        self._enter(block_id, frame.frame_bytes, frame.head_bytes)
        for chunk in source.frame_chunks(block_id):
            self._append([chunk])

    def add_stripped(self, source: FrameReader, block_id: bytes) -> None:
        """Append a block's header alone; all of a block that has no slots. Raises as `add_copy`."""
        if block_id in self.frames:
            return
        header, head = source.read_head(block_id)
        if not header.slots and block_id in source.frames:
            self.add_copy(source, block_id)
            return
        self._add_frame(block_id, head.block_header, (), is_stripped=True)

    def _add_frame(
        self,
        block_id: bytes,
        encoded_header: bytes,
        payloads: Sequence[tuple[StoredSlot, Buffers]],
        *,
        is_stripped: bool = False,
    ) -> None:
        stored = [slot for slot, _ in payloads]
        head = encode_frame_head(encoded_header, stored)
        self._enter(block_id, frame_bytes_for(len(head), stored), len(head), is_stripped=is_stripped)
        buffers: Buffers = [head]
        for slot, views in payloads:
            buffers += [*views, bytes(aligned(slot.stored_bytes) - slot.stored_bytes)]
        self._append(buffers)

    def _enter(self, block_id: bytes, frame_bytes: int, head_bytes: int, *, is_stripped: bool = False) -> None:
        offset = self.end
        if offset - self._proven_end >= PROVEN_BEHIND_BYTES:
            self._prove_behind(offset)
        if offset + frame_bytes > MAX_BUNDLE_BYTES:
            raise LimitExceeded(f"the pack would have more than {MAX_BUNDLE_BYTES} bytes.", limit=MAX_BUNDLE_BYTES)
        if len(self.frames) >= MAX_FRAMES:
            raise LimitExceeded(f"a pack holds at most {MAX_FRAMES} frames.", limit=MAX_FRAMES)
        self.frames[block_id] = Frame(block_id, offset, frame_bytes, head_bytes, is_stripped)

    @property
    def _unproven(self) -> list[Frame]:
        return list(self.frames.values())[self._proven :]

    def _prove_behind(self, end: int) -> None:
        """Flush the frames up to `end` and read them back, unless those before them are under way still."""
        frames = self._unproven

        def check() -> None:
            with self._reading_back(), _Written(self._temp.duplicate(), self._temp.path, frames) as file:
                _check_all(file, frames)

        if self._temp.sync_behind(check):
            self._proven, self._proven_end = len(self.frames), end

    def _append(self, buffers: Sequence[memoryview | bytes]) -> None:
        if not self._temp.size_bytes:
            buffers = [bytes(HEADER_BYTES), *buffers]  # zeros until the end: a torn file is no pack
        if self._room is not None:
            self._room(sum(memoryview(buffer).nbytes for buffer in buffers))
        self._temp.append(buffers)

    def finish(self, manifest: bytes = b"") -> bytes:
        """Write manifest, directory, trailer and header, flush, and read everything back. Returns the pack id.

        `manifest` is encoded; only an exported file has one.

        Raises:
            ReadBackFailed: the file differs from what was written.
            DurabilityLost, NoSpace, StoreIoError, LimitExceeded, and the errors of `room`.
        """
        encoded = encode_directory(self.frames.values())
        pack_id = pack_id_of(encoded)
        section = bytes.fromhex(bundle_id_of(manifest)) + manifest if manifest else b""
        trailer = Trailer(self.end, len(section), len(encoded), pack_id)
        self._append([section, encoded, trailer.encode()])
        self._temp.write_at(0, [encode_header(PACK_MAGIC, trailer.file_bytes)])
        self._temp.sync()
        self._read_back(pack_id)
        return pack_id

    def _read_back(self, pack_id: bytes) -> None:
        """Decode what was encoded, with the same code as a wake, before anything relies on it."""
        with self._reading_back(), PackFile(self._temp.duplicate(), self._temp.path, pack_id) as file:
            file.encoded_manifest()
            _check_all(file, self._unproven)

    @contextlib.contextmanager
    def _reading_back(self) -> Iterator[None]:
        try:
            yield
        except Corruption as error:
            raise ReadBackFailed(
                f"What was written did not read back: {error.message} The store is as it was. Check memory and disk.",
                path=self._temp.path,
                cause=error.code,
            ) from error


class _Written(FrameReader):
    """Frames of a pack that is still being written."""

    def __init__(self, fd: int, path: str, frames: Iterable[Frame]) -> None:
        self._written = frames
        super().__init__(fd, path, None)

    def _load(self, expected_id: bytes | None) -> None:
        self.frames = {frame.id: frame for frame in self._written if not frame.is_stripped}
        self.heads = {frame.id: frame for frame in self._written if frame.is_stripped}


def _check_all(file: FrameReader, frames: Iterable[Frame]) -> None:
    for frame in frames:
        (file.read_head if frame.is_stripped else file.check_block)(frame.id)


def _stored_slot(
    spec: SlotSpec, views: Sequence[memoryview], digest: bytes, *, compressed: bool
) -> tuple[StoredSlot, Buffers]:
    """A slot as it will lie in the file: raw, or compressed if it may be and that makes it smaller."""
    encoded = encode_slot(views, spec) if compressed else None
    if encoded is None:
        return StoredSlot(RAW_CODE, spec.size_bytes, digest), list(views)
    buffers, stored_bytes = encoded
    return StoredSlot(PLANES_CODE, stored_bytes, _digest(buffers)), buffers


def _compressed_slots(source: FrameReader, block_id: bytes) -> tuple[bytes, list[tuple[StoredSlot, Buffers]]]:
    """A frame of another file, its slots verified and compressed."""
    header, head = source.read_head(block_id)
    payloads = []
    for index, (spec, digest) in enumerate(header.slots):
        raw = memoryview(bytearray(spec.size_bytes))
        source.read_slots_into(block_id, header, head, [(index, [raw])])
        payloads.append(_stored_slot(spec, [raw], digest, compressed=True))
    return head.block_header, payloads


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
