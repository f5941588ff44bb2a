"""The fixed-size parts of a bundle file, byte by byte: header, frame head, trailer. Pure: bytes in, values out.

Knows nothing of files, manifests or block contents. docs/reference/format.md has the same tables for people.

    header (64) | frame, frame, … | manifest | directory | trailer (136)
    frame = prefix (64) | block header | storage table (48 a slot) | zeros | payload, zeros | payload, zeros | …

Rules: integers are little-endian. Frames, and payloads within them, start at multiples of 64 bytes from the start of
the file. Every payload's place follows from the lengths before it, so no offset can point elsewhere.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle, TrailingData, Truncated, UnsupportedFormat
from ..limits import (
    MAX_BLOCK_HEADER_BYTES,
    MAX_BUNDLE_BYTES,
    MAX_DIRECTORY_BYTES,
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SLOT_BYTES,
    MAX_SLOTS,
)

FORMAT_VERSION: Final = 1
LIVE_SUFFIX: Final = ".mvb"
RETIRED_SUFFIX: Final = ".mvr"
ALIGNMENT: Final = 64
"""Bytes. A cache line, and enough for any element type of a mapped array."""

HEADER_MAGIC: Final = b"\x89MVB\r\n\x1a\n"  # like PNG's: a transfer in text mode breaks it
FRAME_MAGIC: Final = b"MVBLOCK\x00"
TRAILER_MAGIC: Final = b"MVTAIL\r\n"

_HEADER: Final = struct.Struct("<8sIIQ8x")  # magic, version, header bytes, file bytes, zeros
_PREFIX: Final = struct.Struct("<8sIIQ8x")  # magic, block header bytes, slots, frame bytes, zeros
_STORED: Final = struct.Struct("<IIQ32s")  # codec, zero, stored bytes, digest of the stored bytes
_TRAILER: Final = struct.Struct("<8sQQQQ32s32s")
# magic, manifest offset, manifest bytes, directory bytes, file bytes, bundle id, digest of the directory
_DIGEST_BYTES: Final = 32

BEGINNING: Final = HEADER_MAGIC + struct.pack("<I", FORMAT_VERSION)
"""The first bytes of every bundle file of this version."""
HEADER_BYTES: Final = _HEADER.size + _DIGEST_BYTES
PREFIX_BYTES: Final = _PREFIX.size + _DIGEST_BYTES
STORED_BYTES: Final = _STORED.size
TRAILER_BYTES: Final = _TRAILER.size + _DIGEST_BYTES
MIN_FILE_BYTES: Final = HEADER_BYTES + 1 + TRAILER_BYTES


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


# --- header


def encode_header(file_bytes: int) -> bytes:
    fixed = _HEADER.pack(HEADER_MAGIC, FORMAT_VERSION, HEADER_BYTES, file_bytes)
    return fixed + blake3(fixed).digest()


def require_header(data: bytes, actual_bytes: int, path: str) -> None:
    """Refuse a file that is not a bundle, or of a later version, or not as long as it was written.

    The digest is checked first, then the version, then the fields that a later version may lay out differently: every
    later version seals its first bytes in the same way.
    """
    if len(data) < HEADER_BYTES:
        raise Truncated(f"{path} ends after {len(data)} bytes, within its header.", path=path, size_bytes=actual_bytes)
    magic, version, _, file_bytes = _HEADER.unpack_from(data)
    if magic != HEADER_MAGIC:
        _corrupt(path, "header", "it does not begin like a bundle")
    fixed = data[: _HEADER.size]
    if blake3(fixed).digest() != data[_HEADER.size : HEADER_BYTES]:
        _corrupt(path, "header", "its digest differs")
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{path} has bundle format version {version}; this program reads version {FORMAT_VERSION}. "
            "Use the Torpor that wrote it. The file was not touched.",
            path=path,
            found=version,
            supported=FORMAT_VERSION,
        )
    if fixed != _HEADER.pack(magic, version, HEADER_BYTES, file_bytes) or file_bytes > MAX_BUNDLE_BYTES:
        _corrupt(path, "header", "its length is another, its unused bytes are not zero, or the file is too large")
    if actual_bytes < file_bytes:
        raise Truncated(
            f"{path} is cut off: it has {actual_bytes:,} of its {file_bytes:,} bytes.",
            path=path,
            size_bytes=actual_bytes,
            expected=file_bytes,
        )
    if actual_bytes > file_bytes:
        raise TrailingData(
            f"{path} has {actual_bytes - file_bytes} bytes after its end.",
            path=path,
            size_bytes=actual_bytes,
            expected=file_bytes,
        )
    if file_bytes < MIN_FILE_BYTES:
        _corrupt(path, "header", "it is too short for a bundle")


# --- trailer


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where manifest and directory are, back to back before it. A file without a manifest has 0 bytes of it."""

    manifest_offset: int
    manifest_bytes: int
    directory_bytes: int
    bundle_id: bytes
    directory_digest: bytes

    @property
    def directory_offset(self) -> int:
        return self.manifest_offset + self.manifest_bytes

    @property
    def file_bytes(self) -> int:
        return self.directory_offset + self.directory_bytes + TRAILER_BYTES

    def encode(self) -> bytes:
        fixed = _TRAILER.pack(
            TRAILER_MAGIC,
            self.manifest_offset,
            self.manifest_bytes,
            self.directory_bytes,
            self.file_bytes,
            self.bundle_id,
            self.directory_digest,
        )
        return fixed + blake3(fixed).digest()


def decode_trailer(data: bytes, file_bytes: int, path: str) -> Trailer:
    """Read the last TRAILER_BYTES of a file whose length the header has confirmed."""
    magic, manifest_offset, manifest_bytes, directory_bytes, claimed_bytes, bundle_id, digest = _TRAILER.unpack_from(
        data
    )
    fixed = data[: _TRAILER.size]
    if magic != TRAILER_MAGIC or blake3(fixed).digest() != data[_TRAILER.size :]:
        _corrupt(path, "trailer", "its magic or its digest differs")
    trailer = Trailer(manifest_offset, manifest_bytes, directory_bytes, bundle_id, digest)
    if claimed_bytes != file_bytes or trailer.file_bytes != file_bytes:
        _corrupt(path, "trailer", "its lengths do not add up to the file's")
    if manifest_bytes > MAX_MANIFEST_BYTES or manifest_offset < HEADER_BYTES or manifest_offset % ALIGNMENT:
        _corrupt(path, "trailer", "the manifest's place is outside its limits")
    if not 1 <= directory_bytes <= MAX_DIRECTORY_BYTES:
        _corrupt(path, "trailer", "the directory's length is outside its limits")
    return trailer


# --- frames


class StoredSlot(NamedTuple):
    """How one slot's bytes lie in the file: codec number, length, and the digest of the bytes as stored."""

    codec: int
    stored_bytes: int
    digest: bytes


def head_bytes_for(block_header_bytes: int, slot_count: int) -> int:
    return aligned(PREFIX_BYTES + block_header_bytes + slot_count * STORED_BYTES)


def frame_bytes_for(head_bytes: int, stored: Sequence[StoredSlot]) -> int:
    return head_bytes + sum(aligned(slot.stored_bytes) for slot in stored)


def encode_frame_head(block_header: bytes, stored: Sequence[StoredSlot]) -> bytes:
    """Prefix, block header, storage table and zeros up to the first payload. The digest covers all of it."""
    head_bytes = head_bytes_for(len(block_header), len(stored))
    fixed = _PREFIX.pack(FRAME_MAGIC, len(block_header), len(stored), frame_bytes_for(head_bytes, stored))
    table = b"".join(_STORED.pack(slot.codec, 0, slot.stored_bytes, slot.digest) for slot in stored)
    rest = block_header + table
    rest += bytes(head_bytes - PREFIX_BYTES - len(rest))
    digest = blake3(fixed)
    digest.update(rest)
    return fixed + digest.digest() + rest


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A frame's head taken apart; the block header is still encoded, for its id is over these bytes."""

    block_header: bytes
    stored: tuple[StoredSlot, ...]
    frame_bytes: int
    payload_offsets: tuple[int, ...]
    """Where each slot's stored bytes begin, from the start of the frame."""


def head_bytes_told(prefix: bytes) -> int | None:
    """The length of a frame head in bytes, as its prefix declares; None where that is invalid or beyond the limits."""
    if len(prefix) < PREFIX_BYTES:
        return None
    magic, header_bytes, slot_count, _ = _PREFIX.unpack_from(prefix)
    if magic != FRAME_MAGIC or header_bytes > MAX_BLOCK_HEADER_BYTES or slot_count > MAX_SLOTS:
        return None
    return head_bytes_for(header_bytes, slot_count)


def decode_frame_head(data: bytes, path: str) -> FrameHead:
    """Take apart exactly one frame head, as long as the block list said it is."""
    if len(data) < PREFIX_BYTES:
        _corrupt(path, "frame", "it is too short")
    magic, header_bytes, slot_count, frame_bytes = _PREFIX.unpack_from(data)
    fixed, rest = data[: _PREFIX.size], data[PREFIX_BYTES:]
    digest = blake3(fixed)
    digest.update(rest)
    if magic != FRAME_MAGIC or digest.digest() != data[_PREFIX.size : PREFIX_BYTES]:
        _corrupt(path, "frame", "its head's magic or digest differs")
    if header_bytes > MAX_BLOCK_HEADER_BYTES or slot_count > MAX_SLOTS or frame_bytes > MAX_FRAME_BYTES:
        _corrupt(path, "frame", "a length is outside its limit")
    if head_bytes_for(header_bytes, slot_count) != len(data):
        _corrupt(path, "frame", "its lengths do not add up")
    block_header, table_and_zeros = rest[:header_bytes], rest[header_bytes:]
    table_bytes = slot_count * STORED_BYTES
    lines = list(_STORED.iter_unpack(table_and_zeros[:table_bytes]))
    if any(zero or stored_bytes > MAX_SLOT_BYTES for _, zero, stored_bytes, _ in lines):
        _corrupt(path, "frame", "a line of its storage table is outside its limits")
    stored = tuple(StoredSlot(codec, stored_bytes, digest) for codec, _, stored_bytes, digest in lines)
    offsets = tuple(itertools.accumulate((aligned(slot.stored_bytes) for slot in stored), initial=len(data)))
    if any(table_and_zeros[table_bytes:]) or any(data[_PREFIX.size - 8 : _PREFIX.size]):
        _corrupt(path, "frame", "its unused bytes are not zero")
    if offsets[-1] != frame_bytes:
        _corrupt(path, "frame", "its payloads do not fill it")
    return FrameHead(block_header, stored, frame_bytes, offsets[:-1])


def _corrupt(path: str, part: str, why: str) -> NoReturn:
    raise CorruptBundle(f"{path}: the {part} is damaged: {why}.", path=path, part=part)
