"""The fixed-size part of a frame, byte by byte: its head. Pure: bytes in, values out.

Knows nothing of files, manifests or block contents. docs/reference/format.md has the same tables for people.

    frame = prefix (64) | block header | storage table (48 a slot) | zeros | payload, zeros | payload, zeros | …

Rules: integers are little-endian. Payloads start at multiples of 64 bytes from the start of their
frame. Every payload's place follows from the lengths before it, so no offset can point elsewhere.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from blake3 import blake3

from ..limits import (
    MAX_BLOCK_HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_SLOT_BYTES,
    MAX_SLOTS,
)
from .sealing import DIGEST_BYTES, corrupt

ALIGNMENT: Final = 64
"""Bytes. A cache line, and enough for any element type of a mapped array."""

FRAME_MAGIC: Final = b"MVBLOCK\x00"

_PREFIX: Final = struct.Struct("<8sIIQ8x")  # magic, block header bytes, slots, frame bytes, zeros
_STORED: Final = struct.Struct("<IIQ32s")  # codec, zero, stored bytes, digest of the stored bytes
PREFIX_BYTES: Final = _PREFIX.size + DIGEST_BYTES
STORED_BYTES: Final = _STORED.size


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Frame:
    """One block's frame in a file. `offset`, `frame_bytes` and `head_bytes` are in bytes. is_stripped: it has the head
    alone, of a block with slots."""

    id: bytes
    offset: int
    frame_bytes: int
    head_bytes: int
    is_stripped: bool = False


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
        corrupt(path, "frame", "it is too short")
    magic, header_bytes, slot_count, frame_bytes = _PREFIX.unpack_from(data)
    fixed, rest = data[: _PREFIX.size], data[PREFIX_BYTES:]
    digest = blake3(fixed)
    digest.update(rest)
    if magic != FRAME_MAGIC or digest.digest() != data[_PREFIX.size : PREFIX_BYTES]:
        corrupt(path, "frame", "its head's magic or digest differs")
    if header_bytes > MAX_BLOCK_HEADER_BYTES or slot_count > MAX_SLOTS or frame_bytes > MAX_FRAME_BYTES:
        corrupt(path, "frame", "a length is outside its limit")
    if head_bytes_for(header_bytes, slot_count) != len(data):
        corrupt(path, "frame", "its lengths do not add up")
    block_header, table_and_zeros = rest[:header_bytes], rest[header_bytes:]
    table_bytes = slot_count * STORED_BYTES
    lines = list(_STORED.iter_unpack(table_and_zeros[:table_bytes]))
    if any(zero or stored_bytes > MAX_SLOT_BYTES for _, zero, stored_bytes, _ in lines):
        corrupt(path, "frame", "a line of its storage table is outside its limits")
    stored = tuple(StoredSlot(codec, stored_bytes, digest) for codec, _, stored_bytes, digest in lines)
    offsets = tuple(itertools.accumulate((aligned(slot.stored_bytes) for slot in stored), initial=len(data)))
    if any(table_and_zeros[table_bytes:]) or any(data[_PREFIX.size - 8 : _PREFIX.size]):
        corrupt(path, "frame", "its unused bytes are not zero")
    if offsets[-1] != frame_bytes:
        corrupt(path, "frame", "its payloads do not fill it")
    return FrameHead(block_header, stored, frame_bytes, offsets[:-1])
