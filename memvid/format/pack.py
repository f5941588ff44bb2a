"""A pack: one immutable file of block frames. Its id is the digest of its directory, which names each block in it.

    header (64) | frame, frame, … | manifest | directory | trailer (104)

The manifest is there in an exported file alone, which is a version with all its frames; before it stands its digest,
the bundle id. Frames are those of `format/layout.py`. A stripped block has a frame with its header and no slots: its
tokens, not its keys and values.

Rules: integers are little-endian. Frames, and payloads within them, start at multiples of 64 bytes from the start of
the file, and frames fill it without a gap.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from ..errors import PUT_BACK, BundleMismatch, LimitExceeded, StoreError
from ..limits import MAX_DIRECTORY_BYTES, MAX_FRAME_BYTES, MAX_FRAMES, MAX_MANIFEST_BYTES
from .frames import FrameReader
from .layout import ALIGNMENT, PREFIX_BYTES, Frame
from .manifest import bundle_id_of
from .packing import pack, unpack
from .sealing import DIGEST_BYTES, HEADER_BYTES, PACK_MAGIC, corrupt, require_header

_DOMAIN: Final = "torpor.pack/2"
_FRAME: Final = struct.Struct("<32sQQII")  # block id, offset, frame bytes, head bytes, 1 if stripped


def encode_directory(frames: Collection[Frame]) -> bytes:
    """The canonical bytes of the directory of a pack with these frames, in file order. Raises LimitExceeded."""
    if len(frames) > MAX_FRAMES:
        raise LimitExceeded(f"a pack holds at most {MAX_FRAMES} frames.", limit=MAX_FRAMES, size=len(frames))
    return pack([_DOMAIN, encode_lines(frames)], "directory")


def encode_lines(frames: Iterable[Frame]) -> bytes:
    """A line of 56 bytes for each frame: its block, and where it lies."""
    return b"".join(
        _FRAME.pack(each.id, each.offset, each.frame_bytes, each.head_bytes, each.is_stripped) for each in frames
    )


def pack_id_of(encoded: bytes) -> bytes:
    """BLAKE3-256 of an encoded directory: it names every frame, and a block's id covers its bytes."""
    return blake3(encoded).digest()


def decode_directory(data: bytes, frames_end: int, path: str) -> tuple[Frame, ...]:
    """Decode a directory whose digest has been compared; refuse all bytes that `encode_directory` does not write.

    `frames_end` is where the frames must end. Raises CorruptBundle.
    """
    return decode_frames(unpack_directory(data, _DOMAIN, path), frames_end, path)


def unpack_directory(data: bytes, domain: str, path: str) -> Any:
    """What stands in a directory of this domain, unchecked. Raises CorruptBundle."""
    try:
        document = unpack(data, max_bytes=MAX_DIRECTORY_BYTES, what="directory")
    except StoreError as error:
        corrupt(path, "directory", error.message.rstrip("."))
    if not isinstance(document, list) or len(document) != 2 or document[0] != domain:
        corrupt(path, "directory", "it is not a directory of this format version")
    return document[1]


def decode_frames(lines: Any, frames_end: int, path: str) -> tuple[Frame, ...]:
    """The frames that the lines of a directory tell; they fill the file from its header to `frames_end`. Raises
    CorruptBundle."""
    frames, offset = decode_lines(lines, "directory", path), HEADER_BYTES
    for frame in frames:
        if frame.offset != offset:
            corrupt(path, "directory", f"a frame is said to be at {frame.offset} instead of {offset}")
        offset += frame.frame_bytes
    if offset != frames_end:
        corrupt(path, "directory", f"the frames end at {offset} instead of {frames_end}")
    return frames


def decode_lines(lines: Any, part: str, path: str) -> tuple[Frame, ...]:
    """The frames that `encode_lines` has written, each within its limits; no block twice. Raises CorruptBundle."""
    if not isinstance(lines, bytes) or len(lines) % _FRAME.size or len(lines) > MAX_FRAMES * _FRAME.size:
        corrupt(path, part, "its list has a wrong length")
    frames = []
    for block_id, start, frame_bytes, head_bytes, is_stripped in _FRAME.iter_unpack(lines):
        if is_stripped > 1 or frame_bytes > MAX_FRAME_BYTES or not PREFIX_BYTES <= head_bytes <= frame_bytes:
            corrupt(path, part, "a line of it is outside its limits")
        if frame_bytes % ALIGNMENT or head_bytes % ALIGNMENT or (is_stripped and head_bytes != frame_bytes):
            corrupt(path, part, "a line of it is not aligned, or a stripped block in it has slots")
        frames.append(Frame(block_id, start, frame_bytes, head_bytes, bool(is_stripped)))
    if len({frame.id for frame in frames}) != len(frames):
        corrupt(path, part, "it has two frames of one block")
    return tuple(frames)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where manifest and directory are, back to back before it. A pack of a store has 0 bytes of a manifest; else the
    digest before it counts. `bundle_id` is the manifest's digest in a bundle of format 1, which has it here."""

    manifest_offset: int
    manifest_bytes: int
    directory_bytes: int
    pack_id: bytes
    bundle_id: bytes = b""

    @property
    def directory_offset(self) -> int:
        return self.manifest_offset + self.manifest_bytes

    @property
    def file_bytes(self) -> int:
        """The length of a pack that ends with this trailer."""
        return self.directory_offset + self.directory_bytes + TRAILER.size_bytes

    def encode(self) -> bytes:
        """The trailer of a pack."""
        fixed = TRAILER.fields.pack(
            TRAILER.magic,
            self.manifest_offset,
            self.manifest_bytes,
            self.directory_bytes,
            self.file_bytes,
            self.pack_id,
        )
        return fixed + blake3(fixed).digest()


@dataclass(frozen=True, slots=True)
class TrailerForm:
    """How a trailer lies at the end of a file: its `fields`, which end with the digest of the directory, and a digest
    of them."""

    magic: bytes
    fields: struct.Struct

    @property
    def size_bytes(self) -> int:
        return self.fields.size + DIGEST_BYTES

    def decode(self, data: bytes, file_bytes: int, path: str) -> Trailer:
        """Read the last `size_bytes` of a file of `file_bytes`. Raises CorruptBundle."""
        magic, manifest_offset, manifest_bytes, directory_bytes, claimed_bytes, *ids = self.fields.unpack_from(data)
        fixed = data[: self.fields.size]
        if magic != self.magic or blake3(fixed).digest() != data[self.fields.size :]:
            corrupt(path, "trailer", "its magic or its digest differs")
        trailer = Trailer(manifest_offset, manifest_bytes, directory_bytes, *reversed(ids))
        if not claimed_bytes == file_bytes == trailer.directory_offset + directory_bytes + self.size_bytes:
            corrupt(path, "trailer", "its lengths do not add up to the file's")
        if (
            manifest_bytes > DIGEST_BYTES + MAX_MANIFEST_BYTES
            or manifest_offset < HEADER_BYTES
            or manifest_offset % ALIGNMENT
        ):
            corrupt(path, "trailer", "the manifest's place is outside its limits")
        if not 1 <= directory_bytes <= MAX_DIRECTORY_BYTES:
            corrupt(path, "trailer", "the directory's length is outside its limits")
        return trailer


TRAILER: Final = TrailerForm(b"MVPTAIL\n", struct.Struct("<8sQQQQ32s"))
# magic, manifest offset, manifest bytes, directory bytes, file bytes, pack id


class PackFile(FrameReader):
    """An open pack: header, trailer and directory have been checked. `pack_id` is what its content says."""

    magic = PACK_MAGIC
    form = TRAILER
    trailer: Trailer
    pack_id: bytes

    def _load(self, expected_id: bytes | None) -> None:
        require_header(self._read(0, min(HEADER_BYTES, self.file_bytes)), self.magic, self.file_bytes, self.path)
        trailer_bytes = self.form.size_bytes
        if self.file_bytes < HEADER_BYTES + trailer_bytes:
            corrupt(self.path, "header", "the file is too short")
        data = self._read(self.file_bytes - trailer_bytes, trailer_bytes)
        trailer = self.trailer = self.form.decode(data, self.file_bytes, self.path)
        self.pack_id = trailer.pack_id
        if expected_id is not None and self.pack_id != expected_id:
            raise BundleMismatch(
                f"{self.path} holds the pack {self.pack_id.hex()}: its content is not what its name promises. "
                f"{PUT_BACK}",
                path=self.path,
                expected=expected_id.hex(),
                found=self.pack_id.hex(),
            )
        encoded = self._read(trailer.directory_offset, trailer.directory_bytes)
        if pack_id_of(encoded) != self.pack_id:
            corrupt(self.path, "directory", "its digest is not the one in the trailer")
        frames = self._decode_directory(encoded)
        self.frames = {frame.id: frame for frame in frames if not frame.is_stripped}
        self.heads = {frame.id: frame for frame in frames if frame.is_stripped}

    def _decode_directory(self, encoded: bytes) -> tuple[Frame, ...]:
        return decode_directory(encoded, self.trailer.manifest_offset, self.path)

    def encoded_manifest(self) -> bytes:
        """The manifest in an exported file; empty in a pack of a store. Raises CorruptBundle, StoreIoError."""
        section = self._read(self.trailer.manifest_offset, self.trailer.manifest_bytes)
        encoded = section[DIGEST_BYTES:]
        if section and section[:DIGEST_BYTES].hex() != bundle_id_of(encoded):
            corrupt(self.path, "manifest", "its digest differs")
        return encoded


def pack_file_bytes(frames: Collection[Frame]) -> int:
    """The size of a pack's file with these frames, in bytes, before it is written; their offsets do not matter. Raises
    LimitExceeded."""
    return HEADER_BYTES + frames_bytes(frames) + len(encode_directory(frames)) + TRAILER.size_bytes


def frames_bytes(frames: Iterable[Frame]) -> int:
    return sum(frame.frame_bytes for frame in frames)
