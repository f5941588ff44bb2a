"""How a slot's raw bytes become stored bytes and back: zstd on byte planes, for what is cold.

Owns the codec numbers and every check on compressed input. Knows nothing of blocks or files. The reader compares the
digest of the stored bytes first.

A compressed slot is cut into chunks, and each chunk into as many planes as an element has bytes: all first bytes, all
second bytes, and so on. The planes with sign and exponent shrink, those with the low bits of the mantissa mostly do
not; each is one zstd frame, or stays raw if it would not shrink. The planes are made with extended slices of
bytearrays: a strided slice of a memoryview is ten times slower, and numpy has no other use here.

A frame has its content size and checksum, no dictionary and a window within the limit, and fills its stored bytes to
the last one. All that is checked before a byte is decompressed, because the library trusts a declared size over a
caller's cap and accepts bytes after a frame.

Level 1 is the one level: a plane of KV has few matches, so higher ones take several times as long and save a few parts
in a thousand, or nothing. One frame for a whole slot is a quarter faster and saves half as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import zstandard

from ..errors import CorruptBlock
from ..limits import CHUNK_BYTES, MAX_EXPANSION, MAX_ZSTD_WINDOW_BYTES, MIN_PLANE_CHUNK_BYTES
from .blocks import SlotSpec

RAW_CODE: Final = 0
PLANES_CODE: Final = 2
CODES: Final = (RAW_CODE, PLANES_CODE)
_LEVEL: Final = 1

PLANE_CHUNK_BYTES: Final = 256 * 1024
"""Raw bytes that are split into planes at once when writing. Smaller chunks follow the data more closely but cost a
frame each; larger ones fall out of the processor's cache. Ratio and speed are best near here."""

_PLANES_HEADER: Final = struct.Struct("<II")  # planes, raw bytes of a chunk
_PLANE_LENGTH: Final = struct.Struct("<I")

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER_BYTES: Final = 3
_CHECKSUM_BYTES: Final = 4
_RLE_BLOCK: Final = 1
_RESERVED_BLOCK: Final = 3


def encode_slot(views: Sequence[memoryview], spec: SlotSpec) -> tuple[list[memoryview | bytes], int] | None:
    """The payload of a compressed slot in parts, and its bytes; None for a slot to be stored raw.

    `views` are contiguous bytes ("B") that add up to `spec.size_bytes`. A payload is smaller than the raw bytes, but by
    no more than `MAX_EXPANSION`: a reader takes a file beyond that for an attack.
    """
    payload = _encode_planes(views, spec.size_bytes, spec.element_bytes)
    stored_bytes = sum(map(len, payload))
    worth_it = stored_bytes < spec.size_bytes <= MAX_EXPANSION * stored_bytes
    return (payload, stored_bytes) if worth_it else None


def decode_chunks(stored: bytes | bytearray, raw_bytes: int, element_bytes: int, where: str) -> Iterator[memoryview]:
    """Yield a compressed slot's raw bytes in chunks of at most CHUNK_BYTES; each is valid until the next.

    Takes the memory of one or two chunks beside `stored`.

    Raises:
        CorruptBlock: `encode_slot` cannot have made this of that many bytes. `where` names the slot.
    """
    slot = _require_planes(stored, raw_bytes, element_bytes, where)
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    chunk = bytearray(min(slot.chunk_bytes, raw_bytes))
    for number, (size_bytes, plane) in enumerate(slot.planes()):
        if size_bytes * element_bytes != len(chunk):  # the last chunk; a view of the one before may still be in use
            chunk = bytearray(size_bytes * element_bytes)
        chunk[number % element_bytes :: element_bytes] = (
            plane if len(plane) == size_bytes else _decompress_plane(decompressor, plane, where)
        )
        if number % element_bytes == element_bytes - 1:
            yield memoryview(chunk)


def decode_into(stored: bytes | bytearray, buffers: Sequence[memoryview], element_bytes: int, where: str) -> None:
    """Decode a whole compressed slot into writable buffers, which must add up to its raw size. See `decode_chunks`."""
    number, at = 0, 0
    for chunk in decode_chunks(stored, sum(map(len, buffers)), element_bytes, where):
        position = 0
        while position < len(chunk):
            count = min(len(chunk) - position, len(buffers[number]) - at)
            buffers[number][at : at + count] = chunk[position : position + count]
            position, at = position + count, at + count
            if at == len(buffers[number]):
                number, at = number + 1, 0


def require_one_frame(stored: bytes | memoryview, raw_bytes: int, where: str) -> None:
    """Raise CorruptBlock unless `stored` is exactly one frame that declares `raw_bytes`, with nothing after it."""
    if stored[:4] != _ZSTD_MAGIC:
        _refuse(where, "it is not a zstd frame")
    try:
        parameters = zstandard.get_frame_parameters(stored)
        position = zstandard.frame_header_size(stored)
    except zstandard.ZstdError as error:
        _refuse(where, f"zstd says {error}")
    if parameters.content_size != raw_bytes:
        _refuse(where, f"it declares {parameters.content_size} bytes instead of {raw_bytes}")
    if parameters.dict_id or not parameters.has_checksum or parameters.window_size > MAX_ZSTD_WINDOW_BYTES:
        _refuse(where, "it wants a dictionary, has no checksum, or wants too large a window")
    last = False
    while not last:
        block = int.from_bytes(stored[position : position + _BLOCK_HEADER_BYTES], "little")
        last, block_type, size = bool(block & 1), block >> 1 & 3, block >> 3
        position += _BLOCK_HEADER_BYTES + (1 if block_type == _RLE_BLOCK else size)
        if block_type == _RESERVED_BLOCK or position > len(stored):
            _refuse(where, "its blocks do not fit it")
    if position + _CHECKSUM_BYTES != len(stored):
        _refuse(where, "there are bytes after its frame")


def _encode_planes(views: Sequence[memoryview], size_bytes: int, element_bytes: int) -> list[memoryview | bytes]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
    parts: list[memoryview | bytes] = []
    for chunk in _joined_chunks(views, size_bytes):
        for number in range(element_bytes):
            plane = chunk[number::element_bytes]
            frame = compressor.compress(plane)
            parts.append(frame if len(frame) < len(plane) else memoryview(plane))
    table = b"".join(_PLANE_LENGTH.pack(len(part)) for part in parts)
    return [_PLANES_HEADER.pack(element_bytes, PLANE_CHUNK_BYTES) + table, *parts]


def _joined_chunks(views: Sequence[memoryview], size_bytes: int) -> Iterator[bytearray]:
    """The concatenated views in chunks of their own memory, all but the last PLANE_CHUNK_BYTES long."""
    chunk, filled, done = bytearray(min(PLANE_CHUNK_BYTES, size_bytes)), 0, 0
    for view in views:
        position = 0
        while position < len(view):
            count = min(len(view) - position, len(chunk) - filled)
            chunk[filled : filled + count] = view[position : position + count]
            position, filled = position + count, filled + count
            if filled == len(chunk):
                yield chunk
                done += filled
                chunk, filled = bytearray(min(PLANE_CHUNK_BYTES, size_bytes - done)), 0


def _decompress_plane(decompressor: zstandard.ZstdDecompressor, plane: memoryview, where: str) -> bytes:
    """Decompress a frame after its declared size was checked: the library allocates that size, and refuses any
    other."""
    try:
        return decompressor.decompress(plane)
    except zstandard.ZstdError as error:
        _refuse(where, f"zstd says {error}")


@dataclass(frozen=True, slots=True)
class _PlaneSlot:
    """A stored slot on byte planes: header, table of the planes' lengths, planes. Places follow from the lengths."""

    stored: bytes | bytearray
    raw_bytes: int
    element_bytes: int
    chunk_bytes: int

    @property
    def first_plane_at(self) -> int:
        chunks = -(-self.raw_bytes // self.chunk_bytes)
        return _PLANES_HEADER.size + chunks * self.element_bytes * _PLANE_LENGTH.size

    def sizes(self) -> Iterator[tuple[int, int]]:
        """For each plane its raw bytes, and its stored bytes as in the table."""
        table = memoryview(self.stored)[_PLANES_HEADER.size : self.first_plane_at]
        for number, (plane_bytes,) in enumerate(_PLANE_LENGTH.iter_unpack(table)):
            done = number // self.element_bytes * self.chunk_bytes
            yield min(self.chunk_bytes, self.raw_bytes - done) // self.element_bytes, plane_bytes

    def planes(self) -> Iterator[tuple[int, memoryview]]:
        """For each plane its bytes before compression, and its stored bytes."""
        position = self.first_plane_at
        for size_bytes, plane_bytes in self.sizes():
            yield size_bytes, memoryview(self.stored)[position : position + plane_bytes]
            position += plane_bytes


def _require_planes(stored: bytes | bytearray, raw_bytes: int, element_bytes: int, where: str) -> _PlaneSlot:
    """Raise CorruptBlock unless header, table and every frame fit each other and the slot, to the last byte."""
    if len(stored) >= raw_bytes:
        _refuse(where, f"it has {len(stored)} bytes for {raw_bytes}")
    if raw_bytes % element_bytes:
        _refuse(where, f"{raw_bytes} bytes are not elements of {element_bytes} bytes")
    if len(stored) < _PLANES_HEADER.size:
        _refuse(where, "it is too short")
    plane_count, chunk_bytes = _PLANES_HEADER.unpack_from(stored)
    if plane_count != element_bytes:
        _refuse(where, f"it has {plane_count} planes for elements of {element_bytes} bytes")
    if not MIN_PLANE_CHUNK_BYTES <= chunk_bytes <= CHUNK_BYTES or chunk_bytes & (chunk_bytes - 1):
        _refuse(where, f"its chunks have {chunk_bytes} bytes")
    slot = _PlaneSlot(stored, raw_bytes, element_bytes, chunk_bytes)
    end = slot.first_plane_at
    if end > len(stored):
        _refuse(where, "its table of planes does not fit it")
    for size_bytes, plane_bytes in slot.sizes():
        end += plane_bytes
        if plane_bytes > size_bytes or end > len(stored):
            _refuse(where, "its planes do not fit it")
    if end != len(stored):
        _refuse(where, "there are bytes after its planes")
    for size_bytes, plane in slot.planes():
        if len(plane) < size_bytes:
            require_one_frame(plane, size_bytes, where)
    return slot


def _refuse(where: str, why: str) -> NoReturn:
    raise CorruptBlock(f"{where}: the compressed bytes are damaged: {why}.")
