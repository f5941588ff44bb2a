"""How a slot's raw bytes become stored bytes and back: raw, one zstd frame, or zstd on byte planes.

Owns the codec numbers, the choice by dtype, and every check on compressed input. Knows nothing of blocks or files. The
reader compares the digest of the stored bytes first.

A zstd slot is exactly one frame with its content size and checksum, without a dictionary, within the window limit,
filling its stored bytes to the last one. All that is checked before a byte is decompressed, because the library trusts
a declared size over a caller's cap and accepts bytes after a frame.

A slot on byte planes is cut into chunks, and each chunk into as many planes as an element has bytes: all first bytes,
all second bytes, and so on. The planes with sign and exponent shrink, those with the low bits of the mantissa mostly do
not; each is one zstd frame, or stays raw if it would not shrink. The planes are made with extended slices of
bytearrays: a strided slice of a memoryview is ten times slower, and numpy has no other use here.

blosc2 (its shuffle filter and zstd) is not used; `bench/compression.py` measures it. Its sizes are the same within one
part in a hundred; it compresses a quarter faster and decompresses up to twice as fast. But its parser, in C, would
stand between the store and hostile input, and it needs numpy, numexpr and others. And a wake does not wait for
decompression: hot blocks are stored raw.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import zstandard

from ..errors import CorruptBlock, InvalidDraft
from ..limits import CHUNK_BYTES, MAX_EXPANSION, MAX_ZSTD_LEVEL, MAX_ZSTD_WINDOW_BYTES, MIN_PLANE_CHUNK_BYTES
from .blocks import DTYPE_BYTES, SlotSpec

RAW_CODE: Final = 0
ZSTD_CODE: Final = 1
PLANES_CODE: Final = 2
CODEC_NAMES: Final = {RAW_CODE: "raw", ZSTD_CODE: "zstd", PLANES_CODE: "planes"}

PLANE_CHUNK_BYTES: Final = 256 * 1024
"""Raw bytes that are split into planes at once when writing. Smaller chunks follow the data more closely but cost a
frame each; larger ones fall out of the processor's cache. Ratio and speed are best near here."""

_PLANE_DTYPES: Final = frozenset({"float16", "bfloat16", "float32", "float64", "complex64"})
"""Numbers with an exponent: their high bytes are alike. Integers have no known pattern, and are not split."""

_PLANES_HEADER: Final = struct.Struct("<II")  # planes, raw bytes of a chunk
_PLANE_LENGTH: Final = struct.Struct("<I")

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER_BYTES: Final = 3
_CHECKSUM_BYTES: Final = 4
_RLE_BLOCK: Final = 1
_RESERVED_BLOCK: Final = 3

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Codec:
    """A choice for writing. A reader needs none: each slot names its codec."""

    code: int
    level: int = 0

    def __post_init__(self) -> None:
        if self.code not in CODEC_NAMES:
            raise InvalidDraft(f"there is no codec {self.code}.", codec=self.code)
        if self.code != RAW_CODE and not 1 <= self.level <= MAX_ZSTD_LEVEL:
            raise InvalidDraft(f"a zstd level is 1 to {MAX_ZSTD_LEVEL}, not {self.level}.", level=self.level)

    def for_slot(self, spec: SlotSpec) -> Codec:
        """The codec for one slot: byte planes for floating-point numbers, one frame for anything else."""
        if self.code == PLANES_CODE and spec.dtype not in _PLANE_DTYPES:
            return zstd(self.level)
        return self


RAW: Final = Codec(RAW_CODE)


def zstd(level: int = 1) -> Codec:
    """Compress each slot on its own; a slot that does not shrink is stored raw."""
    return Codec(ZSTD_CODE, level)


def planes(level: int = 1) -> Codec:
    """Compress the byte planes of floating-point slots, other slots as `zstd`.

    A plane of KV has few matches, so level 1 is best: higher levels take several times as long and save a few parts in
    a thousand, or nothing.
    """
    return Codec(PLANES_CODE, level)


def encode_slot(
    views: Sequence[memoryview], spec: SlotSpec, codec: Codec
) -> tuple[int, list[memoryview | bytes], int] | None:
    """The codec number, the payload in parts, and the stored bytes; None for a slot to be stored raw.

    `views` are contiguous bytes ("B") that add up to `spec.size_bytes`. A payload is smaller than the raw bytes, but by
    no more than `MAX_EXPANSION`: a reader takes a file beyond that for an attack.
    """
    chosen = codec.for_slot(spec)
    payload: list[memoryview | bytes]
    if chosen.code == RAW_CODE:
        return None
    if chosen.code == ZSTD_CODE:
        payload = [compress(views, spec.size_bytes, chosen.level)]
    else:
        payload = _encode_planes(views, spec.size_bytes, DTYPE_BYTES[spec.dtype], chosen.level)
    stored_bytes = sum(map(len, payload))
    worth_it = stored_bytes < spec.size_bytes <= MAX_EXPANSION * stored_bytes
    return (chosen.code, payload, stored_bytes) if worth_it else None


def decode_chunks(
    code: int, stored: bytes | bytearray, raw_bytes: int, element_bytes: int, where: str
) -> Iterator[memoryview]:
    """Yield a compressed slot's raw bytes in chunks of at most CHUNK_BYTES; each is valid until the next.

    Takes the memory of one or two chunks beside `stored`. A raw slot needs no decoding.

    Raises:
        CorruptBlock: `encode_slot` cannot have made this of that many bytes. `where` names the slot.
    """
    _require_smaller(stored, raw_bytes, where)
    if code == ZSTD_CODE:
        yield from decompress_chunks(stored, raw_bytes, where)
    elif code == PLANES_CODE:
        yield from _decode_planes(stored, raw_bytes, element_bytes, where)
    else:
        _refuse(where, f"there is no codec {code} to undo")


def decode_into(
    code: int, stored: bytes | bytearray, buffers: Sequence[memoryview], element_bytes: int, where: str
) -> None:
    """Decode a whole compressed slot into writable buffers, which must add up to its raw size. See `decode_chunks`."""
    if code == ZSTD_CODE:
        _require_smaller(stored, sum(map(len, buffers)), where)
        decompress_into(stored, buffers, where)
        return
    number, at = 0, 0
    for chunk in decode_chunks(code, stored, sum(map(len, buffers)), element_bytes, where):
        position = 0
        while position < len(chunk):
            count = min(len(chunk) - position, len(buffers[number]) - at)
            buffers[number][at : at + count] = chunk[position : position + count]
            position, at = position + count, at + count
            if at == len(buffers[number]):
                number, at = number + 1, 0


def _require_smaller(stored: bytes | bytearray, raw_bytes: int, where: str) -> None:
    if len(stored) >= raw_bytes:
        _refuse(where, f"it has {len(stored)} bytes for {raw_bytes}")


def compress(buffers: Sequence[memoryview], size_bytes: int, level: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    stream = compressor.compressobj(size=size_bytes)
    chunks = [stream.compress(buffer) for buffer in buffers]
    chunks.append(stream.flush())
    return b"".join(chunks)


def decompress_chunks(stored: bytes | bytearray, raw_bytes: int, where: str) -> Iterator[memoryview]:
    """Yield the raw bytes in chunks of at most CHUNK_BYTES; each is valid until the next. See `decompress_into`."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, raw_bytes)))
    left = raw_bytes
    with _open_frame(stored, raw_bytes, where) as reader:
        while left:
            chunk = buffer[: min(left, len(buffer))]
            _fill(reader, chunk, where)
            left -= len(chunk)
            yield chunk
        _require_end(reader, where)


def decompress_into(stored: bytes | bytearray, buffers: Sequence[memoryview], where: str) -> None:
    """Decompress a whole slot into writable buffers, which must add up to its raw size.

    Raises:
        CorruptBlock: anything but one well-formed frame of exactly that size. `where` names the slot.
    """
    with _open_frame(stored, sum(map(len, buffers)), where) as reader:
        for buffer in buffers:
            _fill(reader, buffer, where)
        _require_end(reader, where)


def _open_frame(stored: bytes | bytearray, raw_bytes: int, where: str) -> zstandard.ZstdDecompressionReader:
    require_one_frame(stored, raw_bytes, where)
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    return decompressor.stream_reader(stored, read_across_frames=False)


def _fill(reader: zstandard.ZstdDecompressionReader, buffer: memoryview, where: str) -> None:
    while len(buffer):
        try:
            count = reader.readinto(buffer)  # never more than the buffer holds
        except zstandard.ZstdError as error:
            _refuse(where, f"zstd says {error}")
        if not count:
            _refuse(where, "it decompresses to less than it declares")
        buffer = buffer[count:]


def _require_end(reader: zstandard.ZstdDecompressionReader, where: str) -> None:
    try:
        more = reader.read(1)  # also makes zstd compare the checksum
    except zstandard.ZstdError as error:
        _refuse(where, f"zstd says {error}")
    if more:
        _refuse(where, "it decompresses to more than it declares")


def require_one_frame(stored: Buffer, raw_bytes: int, where: str) -> None:
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


def _encode_planes(
    views: Sequence[memoryview], size_bytes: int, element_bytes: int, level: int
) -> list[memoryview | bytes]:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
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


def _decode_planes(stored: bytes | bytearray, raw_bytes: int, element_bytes: int, where: str) -> Iterator[memoryview]:
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
    if element_bytes < 2 or raw_bytes % element_bytes:
        _refuse(where, f"{raw_bytes} bytes are not elements of {element_bytes} bytes that have planes")
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
