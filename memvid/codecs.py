"""How a slot's raw bytes become stored bytes and back: raw, or one zstd frame.

Owns what each codec number means and every check on compressed input. Knows nothing of blocks or files.

A zstd slot is exactly one frame with its content size and checksum, without a dictionary, within the window limit,
filling its stored bytes to the last one. All that is checked before a byte is decompressed, because the library
trusts a declared size over a caller's cap and accepts what follows a frame.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import zstandard

from .errors import CorruptBlock, InvalidDraft
from .limits import CHUNK_BYTES, MAX_ZSTD_LEVEL, MAX_ZSTD_WINDOW_BYTES

RAW_CODE: Final = 0
ZSTD_CODE: Final = 1
CODEC_NAMES: Final = {RAW_CODE: "raw", ZSTD_CODE: "zstd"}

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER_BYTES: Final = 3
_CHECKSUM_BYTES: Final = 4
_RLE_BLOCK: Final = 1
_RESERVED_BLOCK: Final = 3


@dataclass(frozen=True, slots=True)
class Codec:
    """A choice for writing. Readers need none: each slot says how it is stored."""

    code: int
    level: int = 0

    def __post_init__(self) -> None:
        if self.code not in CODEC_NAMES:
            raise InvalidDraft(f"there is no codec {self.code}.", codec=self.code)
        if self.code == ZSTD_CODE and not 1 <= self.level <= MAX_ZSTD_LEVEL:
            raise InvalidDraft(f"a zstd level is 1 to {MAX_ZSTD_LEVEL}, not {self.level}.", level=self.level)


RAW: Final = Codec(RAW_CODE)


def zstd(level: int = 1) -> Codec:
    """Compress each slot on its own; a slot that does not shrink is stored raw."""
    return Codec(ZSTD_CODE, level)


def compress(buffers: Sequence[memoryview], size_bytes: int, level: int) -> bytes:
    """One zstd frame of the concatenated buffers, `size_bytes` long in all."""
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
    return decompressor.stream_reader(io.BytesIO(stored), read_across_frames=False)


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


def require_one_frame(stored: bytes | bytearray, raw_bytes: int, where: str) -> None:
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


def _refuse(where: str, why: str) -> NoReturn:
    raise CorruptBlock(f"{where}: the compressed bytes are damaged: {why}.")
