"""Stored slots: sound ones, ones that lie about themselves, bombs, and what they decompress to.

Written from docs/reference/format.md and not from memvid's code, as a second opinion on what a payload means.
"""

from __future__ import annotations

import functools
import struct
from random import Random
from typing import Final

import zstandard
from torpor.tests.memvid.fuzz.mutation import change_bytes, change_int

MAGIC: Final = b"\x28\xb5\x2f\xfd"
SKIPPABLE: Final = b"\x50\x2a\x4d\x18"
CHUNKS: Final = (1 << 16, 1 << 18, 1 << 20)
MAX_CHANGED_BYTES: Final = 1 << 22


def raw_of(codec: int, payload: bytes, size: int, element: int) -> bytes | None:
    """The raw bytes of a stored slot that says it has `size` of them; None where it has none."""
    try:
        if codec == 0:
            return payload
        if codec == 2:
            return _joined(payload, size, element)
    except (zstandard.ZstdError, struct.error, ValueError, MemoryError):
        return None
    return None


def _inflated(payload: bytes, size: int) -> bytes | None:
    if zstandard.get_frame_parameters(payload).content_size != size:
        return None
    # in one piece, but as a stream: zstd's decoder for whole frames refuses some that its stream decoder takes
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 23).decompressobj()
    raw = stream.decompress(payload)
    return raw if len(raw) == size and not stream.unused_data else None


def _joined(payload: bytes, size: int, element: int) -> bytes | None:
    count, chunk = struct.unpack_from("<II", payload)
    if count != element or size % element:
        return None
    sizes = [min(chunk, size - at) for at in range(0, size, chunk)]
    lengths = struct.unpack_from(f"<{len(sizes) * element}I", payload, 8)
    raw, at = bytearray(size), 8 + 4 * len(lengths)
    for number, length in enumerate(lengths):
        plane = payload[at : at + length]
        at += length
        whole = sizes[number // element] // element
        data = plane if length == whole else _inflated(plane, whole)
        start = number // element * chunk
        raw[start + number % element : start + sizes[number // element] : element] = data or b""
    return bytes(raw) if at == len(payload) else None


def sound(raw: bytes) -> bytes:
    """A frame as the store writes it."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True).compress(raw)


def planes(raw: bytes, element: int, chunk: int = 1 << 18) -> bytes:
    """Byte planes as the store writes them, the elements cut off that are not whole."""
    raw = raw[: len(raw) // element * element]
    parts = []
    for at in range(0, len(raw), chunk):
        for number in range(element):
            plane = raw[at : at + chunk][number::element]
            frame = sound(plane)
            parts.append(frame if len(frame) < len(plane) else plane)
    table = b"".join(len(part).to_bytes(4, "little") for part in parts)
    return struct.pack("<II", element, chunk) + table + b"".join(parts)


def one_plane(frame: bytes) -> bytes:
    """A slot of single bytes, all of it in this frame."""
    return struct.pack("<III", 1, 1 << 20, len(frame)) + frame


@functools.cache
def zeros(size: int, level: int = 1) -> bytes:
    """A sound frame of so many zeros: what a bomb looks like."""
    chunk = bytes(1 << 20)
    stream = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compressobj(size=size)
    parts = [stream.compress(chunk[: min(len(chunk), size - at)]) for at in range(0, size, len(chunk))]
    return b"".join([*parts, stream.flush()])


def made_by_hand(size: int, blocks: list[tuple[int, bytes, int]], rng: Random) -> bytes:
    """A frame with its header written out: any content size, any window, with or without dictionary and checksum."""
    single, checksum = rng.random() < 0.5, rng.random() < 0.9
    dict_flag = rng.choice((0, 0, 0, 0, 1, 2, 3))
    size_flag = 3 if size >= 1 << 32 else 2 if size >= 65792 else rng.choice((2, 3))
    header = bytes([size_flag << 6 | single << 5 | checksum << 2 | dict_flag | rng.choice((0, 0, 0, 0, 8, 16))])
    if not single:
        header += bytes([rng.choice((0, 0x50, 0x68, 0x70, 0x6F, 0x71, 0x88, 0xF8, 0xFF))])
    header += rng.randbytes((0, 1, 2, 4)[dict_flag]) + size.to_bytes(4 if size_flag == 2 else 8, "little")
    body = b""
    for number, (kind, data, length) in enumerate(blocks):
        last = number == len(blocks) - 1
        body += (length << 3 | kind << 1 | last).to_bytes(4, "little")[:3] + data
    return MAGIC + header + body + (rng.randbytes(4) if checksum else b"")


def change_slot(codec: int, payload: bytes, size: int, element: int, rng: Random) -> tuple[int, bytes, int, int]:
    """(codec, payload, raw bytes that it gives or claims, bytes of an element): the slot stored another way."""
    raw = raw_of(codec, payload, size, element) if size <= MAX_CHANGED_BYTES else None
    choice = rng.randrange(12)
    if choice == 0:
        return rng.choice((0, 1, 2, 3, 99, 1 << 31)), payload, size, element
    if choice in (1, 2):
        return codec, change_bytes(payload, rng), size, element
    if choice == 3:
        size = rng.choice((64, 4096, 70_000, 1 << 20, (1 << 20) + 1, 3 << 20, 1 << 23))
        return 2, one_plane(zeros(size)), size, 1
    if choice == 4:
        rle = [(1, b"\x00", 1 << 17)] * rng.choice((1, 2, 8, 64))
        declared = rng.choice((change_int(len(payload), 64, rng), len(rle) << 17, 1 << 32))
        return 2, one_plane(made_by_hand(declared, rle, rng)), rng.choice((declared, len(rle) << 17)), 1
    if choice == 5 and raw is not None:
        return 2, one_plane(made_by_hand(len(raw), [(rng.randrange(4), raw, len(raw))], rng)), len(raw), 1
    if choice == 6:
        return (
            codec,
            payload + rng.choice((payload, b"\x00", zeros(64), SKIPPABLE + b"\x04\x00\x00\x00abcd")),
            size,
            element,
        )
    if choice == 7:
        return 2, one_plane(SKIPPABLE + b"\x04\x00\x00\x00abcd" + zeros(64)), 64, 1
    if choice == 8 and codec == 2:
        return 2, _planes_changed(payload, rng), size, element
    if raw is None:
        return 0, payload, len(payload), 1
    data = raw if rng.random() < 0.5 else (raw[:16] or b"\x00") * rng.choice((4, 20, 100, 9000))
    if choice > 8:
        element = rng.choice((1, 2, 2, 4, 4, 8))
        data = data[: len(data) // element * element]
        return 2, planes(data, element, rng.choice(CHUNKS)), len(data), element
    compressor = zstandard.ZstdCompressor(
        level=rng.choice((1, 3, 9)), write_checksum=rng.random() < 0.95, write_content_size=rng.random() < 0.95
    )
    return 2, one_plane(compressor.compress(data)), len(data), 1


def _planes_changed(payload: bytes, rng: Random) -> bytes:
    """Header or table of planes changed, the planes left; or one plane stored another way, the table right."""
    words = list(struct.unpack_from(f"<{len(payload) // 4}I", payload))
    if len(words) < 2:
        return payload
    if rng.random() < 0.4:
        at = rng.randrange(min(len(words), 18))
        words[at] = change_int(words[at], 32, rng)
        return struct.pack(f"<{len(words)}I", *words) + payload[4 * len(words) :]
    count = _planes_in(words, len(payload))
    if not count:
        return change_bytes(payload, rng)
    lengths = words[2 : 2 + count]
    which, start = rng.randrange(count), 8 + 4 * count
    at = start + sum(lengths[:which])
    plane = payload[at : at + lengths[which]]
    bombs = [zeros(size) for size in (64, 1 << 16, 1 << 20)]
    other = rng.choice(
        (sound(plane), change_bytes(plane, rng), *bombs, made_by_hand(len(plane), [(0, plane, len(plane))], rng))
    )
    lengths[which] = len(other)
    table = struct.pack(f"<{count}I", *lengths)
    return payload[:8] + table + payload[start:at] + other + payload[at + len(plane) :]


def _planes_in(words: list[int], size: int) -> int:
    """How many planes a payload has, by its own table: as many lengths as fill it; 0 where none do."""
    total = 8
    for count, length in enumerate(words[2:], start=1):
        total += 4 + length
        if total == size:
            return count
        if total > size:
            break
    return 0
