"""Compressed slots: what was written comes back to the bit, and anything else is refused before memory is taken.

It is a header, a table and planes that fill it to the last byte, each raw or exactly one zstd frame (threat 16).
"""

from __future__ import annotations

import functools
import itertools
import random
import resource
import struct
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor.memvid.errors import CorruptBlock
from torpor.memvid.format import codecs as codecs_module
from torpor.memvid.format.blocks import DTYPE_BYTES, SlotSpec
from torpor.memvid.format.codecs import (
    PLANES_CODE,
    decode_chunks,
    decode_into,
    encode_slot,
    require_one_frame,
)
from torpor.memvid.limits import CHUNK_BYTES, KIB, MAX_EXPANSION, MIB, MIN_PLANE_CHUNK_BYTES
from torpor.tests.memvid.store_making import refusing, taking_at_most

RAW = b"torpor " * 1000
WRITTEN_CHUNK = 256 * KIB


def frame(data: bytes = RAW, **options: object) -> bytes:
    settings = {"level": 3, "write_checksum": True, "write_content_size": True} | options
    return zstandard.ZstdCompressor(**settings).compress(data)


def refused(stored: bytes, size_bytes: int = len(RAW)) -> None:
    """As the only plane of a slot of single bytes."""
    slot = payload([stored], plane_count=1, chunk_bytes=CHUNK_BYTES)
    for attempt in (
        lambda: decode_into(slot, [memoryview(bytearray(size_bytes))], 1, "slot 0.k"),
        lambda: list(decode_chunks(slot, size_bytes, 1, "slot 0.k")),
    ):
        with pytest.raises(CorruptBlock, match=r"slot 0\.k"):
            attempt()


def declaring(held: int, declared: int) -> bytes:
    """A frame of so many zeros that says it holds another number. Either fits the two bytes in which it stands."""
    forged = bytearray(frame(bytes(held)))
    at = forged.index((held - 256).to_bytes(2, "little"))
    forged[at : at + 2] = (declared - 256).to_bytes(2, "little")
    return bytes(forged)


def wanting_a_dictionary() -> bytes:
    samples = [b"torpor session %d state" % number * 4 for number in range(400)]
    return frame(dict_data=zstandard.train_dictionary(1024, samples))


def wanting_128_mib() -> bytes:
    """A frame of 9 MiB with a window of 128 MiB."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, compression_level=1, write_checksum=1, write_content_size=1, enable_ldm=1
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=9 << 20)
    stored = stream.compress(bytes(9 << 20)) + stream.flush()
    assert zstandard.get_frame_parameters(stored).window_size > 8 << 20
    return stored


def last_byte_changed(stored: bytes) -> bytes:
    return stored[:-1] + bytes([stored[-1] ^ 1])


@pytest.mark.parametrize(
    ("stored", "size_bytes"),
    [
        pytest.param(declaring(60_000, 7_000), 7_000, id="it declares less than it holds"),
        pytest.param(declaring(7_000, 8_000), 8_000, id="it declares more than it holds"),
        pytest.param(frame(write_content_size=False), len(RAW), id="no size"),
        pytest.param(frame(write_checksum=False), len(RAW), id="no checksum"),
        pytest.param(frame(write_checksum=False) + bytes(4), len(RAW), id="something else in the checksum's place"),
        pytest.param(last_byte_changed(frame()), len(RAW), id="a false checksum"),
        pytest.param(wanting_a_dictionary(), len(RAW), id="a dictionary"),
        pytest.param(frame() + b"\0", len(RAW), id="a byte behind it"),
        pytest.param(frame(RAW[:3500]) + frame(RAW[3500:]), len(RAW), id="a second frame"),
        pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame(), len(RAW), id="a skippable frame"),
        *(pytest.param(frame()[:cut], len(RAW), id=f"cut at {cut}") for cut in (0, 3, 4, 8, 12, 20, -1, -4, -5)),
    ],
)
def test_threat_16_a_frame_that_the_store_does_not_write_is_refused(stored: bytes, size_bytes: int) -> None:
    refused(stored, size_bytes)


def test_threat_16_a_frame_that_wants_a_window_of_128_mib_is_refused() -> None:
    with pytest.raises(CorruptBlock, match="too large a window"):
        require_one_frame(wanting_128_mib(), 9 << 20, "slot 0.k")


BOMB_BYTES = 1 << 28


@functools.cache
def bomb() -> bytes:
    return frame(bytes(BOMB_BYTES))


def test_threat_16_a_bomb_is_refused_before_it_unfolds() -> None:
    stored = bomb()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(stored)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_a_typed_way(data: bytes) -> None:
    refused(data)
    refused(b"\x28\xb5\x2f\xfd" + data)


# --- byte planes


def spec_of(dtype: str, elements: int) -> SlotSpec:
    return SlotSpec("0.k", "kv.k/1", dtype, (elements,))


def like_kv(dtype: str, elements: int, seed: int = 7) -> bytes:
    """Elements with random low bytes below two high bytes of few values; one-byte elements have few values."""
    source, width = random.Random(seed), DTYPE_BYTES[dtype]
    noise = bytearray(source.randbytes(elements * width))
    noise[width - 1 :: width] = bytes(source.choices(b"\x3e\x3f\xbe\xbf", k=elements))
    return bytes(noise)


def cut(data: bytes, places: Sequence[int]) -> list[memoryview]:
    """The data as views that end at these places and at its end."""
    bounds = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(bounds)]


def write(data: bytes, dtype: str, places: Sequence[int] = ()) -> bytes | None:
    spec = spec_of(dtype, len(data) // DTYPE_BYTES[dtype])
    encoded = encode_slot(cut(data, places), spec)
    if encoded is None:
        return None
    payload, stored_bytes = encoded
    stored = b"".join(payload)
    assert len(stored) == stored_bytes < len(data)
    return stored


def read(stored: bytes, raw_bytes: int, element_bytes: int, places: Sequence[int] = ()) -> bytes:
    """What both ways of decoding agree on."""
    target = bytearray(raw_bytes)
    bounds = [0, *sorted(min(place, raw_bytes) for place in places), raw_bytes]
    views = [memoryview(target)[start:end] for start, end in itertools.pairwise(bounds)]
    decode_into(stored, views, element_bytes, "slot 0.k")
    sizes, joined = [], bytearray()
    for chunk in decode_chunks(bytearray(stored), raw_bytes, element_bytes, "slot 0.k"):
        sizes.append(len(chunk))
        joined += chunk
    assert joined == target
    assert max(sizes) <= CHUNK_BYTES
    return bytes(target)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("extra_bytes", [-8, 0, 8])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_slot_of_every_dtype_survives_at_and_beside_the_bounds_of_chunks(
    dtype: str, extra_bytes: int, chunks: int
) -> None:
    data = like_kv(dtype, (chunks * WRITTEN_CHUNK + extra_bytes) // DTYPE_BYTES[dtype])
    written = write(data, dtype, [1, 12345, 300_001])
    assert written is not None
    assert read(written, len(data), DTYPE_BYTES[dtype], [3, 3, 99_999, 262_143]) == data


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_slot_that_does_not_shrink_is_left_raw(dtype: str) -> None:
    for elements in (0, 1, 3):
        assert write(like_kv(dtype, elements), dtype) is None
    assert write(random.Random(3).randbytes(DTYPE_BYTES[dtype] * 40_000), dtype) is None


def test_a_slot_is_compressed_exactly_where_that_saves_a_byte() -> None:
    outcomes = set()
    for zeros in range(120):  # `write` holds each payload to be smaller than its slot
        data = random.Random(5).randbytes(800) + bytes(8 * zeros)
        outcomes |= {write(data, "float64") is None, write(data, "uint8") is None}
    assert outcomes == {True, False}


@pytest.mark.parametrize("value", [0, 0x3F80])
def test_a_slot_of_one_value_is_stored_raw_and_one_with_something_in_it_is_not(value: int) -> None:
    """What shrinks to less than a part in MAX_EXPANSION would look like a bomb to whoever imports it."""
    constant = struct.pack("<H", value) * 500_000
    assert write(constant, "bfloat16") is None
    for kept in (8_000, 100_000):
        written = write(constant + random.Random(7).randbytes(kept), "bfloat16")
        assert len(constant) + kept <= MAX_EXPANSION * len(written)
        assert read(written, len(constant) + kept, 2) == constant + random.Random(7).randbytes(kept)


EVERY_16_BITS = b"".join(struct.pack("<H", pattern) for pattern in range(1 << 16)) * 2


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        pytest.param("bfloat16", EVERY_16_BITS, id="bfloat16: every pattern"),
        pytest.param("float16", EVERY_16_BITS, id="float16: every pattern"),
        *(
            pytest.param(
                dtype, bytes.fromhex(pattern) * 50_000 + random.Random(7).randbytes(8_000), id=f"{dtype}: {what}"
            )
            for dtype, what, pattern in (
                ("float32", "a signalling NaN", "0100807f"),
                ("float32", "a NaN with sign and payload", "efbeadff"),
                ("float32", "minus zero", "00000080"),
                ("float64", "a signalling NaN", "010000000000f07f"),
                ("complex64", "a signalling NaN and minus zero", "0100807f000000ff"),
            )
        ),
    ],
)
def test_bits_that_no_number_has_survive(dtype: str, data: bytes) -> None:
    written = write(data, dtype)
    assert read(written, len(data), DTYPE_BYTES[dtype]) == data


def splittable(data: bytes, element_bytes: int) -> bytes:
    """The same bytes, made to shrink: nothing but the lowest byte of an element differs from its neighbour's."""
    return b"".join(bytes([byte]) + bytes(element_bytes - 1) for byte in data)


@settings(max_examples=25)
@given(
    st.sampled_from([dtype for dtype, width in DTYPE_BYTES.items() if width > 1]),
    st.binary(min_size=100, max_size=2000),
    st.integers(1, 60),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.lists(st.integers(0, 1 << 20), max_size=6),
)
def test_any_slot_survives_however_it_is_cut(
    dtype: str, data: bytes, times: int, written_in: list[int], read_in: list[int]
) -> None:
    data = splittable(data * times, DTYPE_BYTES[dtype])
    with mock.patch.object(codecs_module, "MAX_EXPANSION", 1 << 30):  # what is all alike would be stored raw
        written = write(data, dtype, written_in)
    assert written is not None
    assert read(written, len(data), DTYPE_BYTES[dtype], read_in) == data


# A slot of 40,000 float32 in one chunk, made from docs/reference/format.md alone, without the writer.

ELEMENTS, WIDTH = 40_000, 4
SLOT = like_kv("float32", ELEMENTS)
LOW, _, _, HIGH = (SLOT[number::WIDTH] for number in range(WIDTH))


def parts_of(data: bytes = SLOT) -> list[bytes]:
    """The planes of SLOT: raw, raw, raw, zstd."""
    every = [data[number::WIDTH] for number in range(WIDTH)]
    return [*every[:3], frame(every[3])]


def payload(
    parts: Sequence[bytes],
    lengths: Sequence[int] | None = None,
    plane_count: int = WIDTH,
    chunk_bytes: int = WRITTEN_CHUNK,
) -> bytes:
    lengths = [len(part) for part in parts] if lengths is None else lengths
    return struct.pack(f"<II{len(lengths)}I", plane_count, chunk_bytes, *lengths) + b"".join(parts)


def planes_refused(stored: bytes, why: str, raw_bytes: int = len(SLOT), element_bytes: int = WIDTH) -> None:
    """Both ways of decoding refuse it for this reason, and neither took more than two chunks of memory."""
    targets = [memoryview(bytearray(raw_bytes))]
    attempts: list[Callable[[], object]] = [
        lambda: decode_into(stored, targets, element_bytes, "slot 0.k"),
        lambda: [len(chunk) for chunk in decode_chunks(stored, raw_bytes, element_bytes, "slot 0.k")],
    ]
    for attempt in attempts:
        with taking_at_most(2 * CHUNK_BYTES), pytest.raises(CorruptBlock, match=rf"slot 0\.k.*{why}"):
            attempt()


def test_the_payload_is_laid_out_as_the_format_says() -> None:
    assert read(payload(parts_of()), len(SLOT), WIDTH) == SLOT
    assert read(payload(parts_of(), chunk_bytes=1 << 20), len(SLOT), WIDTH) == SLOT  # it has one chunk
    stored = write(SLOT, "float32")
    assert stored is not None
    assert PLANES_CODE == 2
    plane_count, chunk_bytes, *lengths = struct.unpack_from("<II4I", stored)
    assert (plane_count, chunk_bytes) == (WIDTH, WRITTEN_CHUNK)
    assert lengths[:3] == [ELEMENTS] * 3
    assert sum(lengths) + 24 == len(stored)
    assert stored[24 : 24 + ELEMENTS] == LOW
    assert zstandard.ZstdDecompressor().decompress(stored[-lengths[3] :]) == HIGH


@pytest.mark.parametrize("chunk_bytes", [MIN_PLANE_CHUNK_BYTES, 128 * KIB, 512 * KIB, CHUNK_BYTES])
def test_chunks_of_other_sizes_within_the_limits_are_read(chunk_bytes: int) -> None:
    data = like_kv("float32", 400_000)
    parts = [part for start in range(0, len(data), chunk_bytes) for part in parts_of(data[start : start + chunk_bytes])]
    assert read(payload(parts, chunk_bytes=chunk_bytes), len(data), WIDTH) == data


PARTS = parts_of()
SOUND = payload(PARTS)
NOT_FIT = "its planes do not fit it"


def with_lengths(places: dict[int, int]) -> bytes:
    """The sound payload with some of its lengths changed."""
    return payload(PARTS, [len(part) + places.get(number, 0) for number, part in enumerate(PARTS)])


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        *((payload(PARTS, plane_count=count), f"it has {count} planes") for count in (0, 1, 2, 3, 5, 8, (1 << 32) - 1)),
        *(
            (payload(PARTS, chunk_bytes=size), f"its chunks have {size} bytes")
            for size in (0, 1, 4, 32 * KIB, MIN_PLANE_CHUNK_BYTES + 4, 192 * KIB, 2 * MIB, (1 << 32) - 1, 1 << 31)
        ),
        *((SOUND[:size], "too short|does not fit it|do not fit it") for size in (0, 1, 7, 8, 9, 23, 24, 25)),
        *((SOUND[:-size], NOT_FIT) for size in (1, 4, 100, ELEMENTS, 3 * ELEMENTS)),
        pytest.param(with_lengths({0: 1, 1: -1}), NOT_FIT, id="the next plane gives up what this one takes"),
        pytest.param(with_lengths({3: 1}), NOT_FIT, id="a plane beyond the payload"),
        pytest.param(with_lengths({3: (1 << 32) - 1 - len(PARTS[3])}), NOT_FIT, id="a plane far beyond it"),
        pytest.param(with_lengths({0: 1 << 31, 1: 1 << 31}), NOT_FIT, id="lengths whose sum wraps to the true one"),
        # Places follow from lengths: a plane that starts in the one before is one that ends the payload too soon.
        pytest.param(
            payload([PARTS[0], PARTS[1][ELEMENTS // 2 :], *PARTS[2:]], [ELEMENTS] * 3 + [len(PARTS[3])]), NOT_FIT,
            id="planes that overlap",
        ),
        pytest.param(SOUND + b"\0", "after its planes", id="a byte behind the planes"),
        pytest.param(with_lengths({3: -1}), "after its planes", id="a plane that ends early"),
        pytest.param(payload([b"", *PARTS[1:]]), "not a zstd frame", id="a plane of no bytes"),
        pytest.param(payload([PARTS[0][:-1], *PARTS[1:]]), "not a zstd frame", id="a plane that is not of zstd"),
        pytest.param(last_byte_changed(SOUND), "zstd says", id="a false checksum"),
    ],
)  # fmt: skip
def test_threat_16_planes_that_the_store_does_not_write_are_refused(stored: bytes, why: str) -> None:
    planes_refused(stored, why)


@pytest.mark.parametrize(
    ("plane_count", "element_bytes", "raw_bytes", "why"),
    [
        (4, 2, 160_000, "it has 4 planes"),
        (4, 8, 160_000, "it has 4 planes"),
        (4, 1, 160_000, "it has 4 planes"),
        (4, 4, 160_001, "not elements"),
        (4, 4, 159_999, "not elements"),
    ],
)
def test_threat_16_planes_of_another_slot_are_refused(
    plane_count: int, element_bytes: int, raw_bytes: int, why: str
) -> None:
    planes_refused(payload(PARTS, plane_count=plane_count), why, raw_bytes, element_bytes)


def test_threat_16_a_bad_last_plane_is_found_before_the_first_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs_module, "_decompress_plane", refusing(AssertionError("a plane was decompressed")))
    parts = zero_planes(WRITTEN_CHUNK) * 4
    planes_refused(payload([*parts[:-1], parts[-1] + b"\0"]), "after its frame", raw_bytes=4 * WRITTEN_CHUNK)


def zero_planes(chunk_bytes: int) -> list[bytes]:
    return [frame(bytes(chunk_bytes // WIDTH))] * WIDTH


def test_threat_16_a_large_slot_is_streamed_in_the_memory_of_two_chunks() -> None:
    # What a verify reads: 128 MiB of zeros in 16 KiB, at the largest chunks.
    raw_bytes = 128 * MIB
    stored = payload(zero_planes(CHUNK_BYTES) * (raw_bytes // CHUNK_BYTES), chunk_bytes=CHUNK_BYTES)
    assert len(stored) < 32 * KIB
    with taking_at_most(2 * CHUNK_BYTES):
        assert sum(map(len, decode_chunks(stored, raw_bytes, WIDTH, "slot 0.k"))) == raw_bytes


NOISE = random.Random(1).randbytes(400)
"""Whole and sound where it is stored, but it does not shrink, so it would have been stored raw."""


def test_what_does_not_shrink_is_stored_raw_and_refused_otherwise() -> None:
    stored = payload([NOISE[number::WIDTH] for number in range(WIDTH)])
    for attempt in (
        lambda: decode_into(stored, [memoryview(bytearray(400))], WIDTH, "slot 0.k"),
        lambda: list(decode_chunks(stored, 400, WIDTH, "slot 0.k")),
    ):
        with pytest.raises(CorruptBlock, match="bytes for 400"):
            attempt()


@settings(max_examples=60)
@given(st.data())
def test_a_payload_with_any_byte_changed_is_refused_or_means_the_same_size(data: st.DataObject) -> None:
    # The layers above compare digests first; here nothing may crash, hang, overrun, or end in another exception.
    good = SOUND
    at = data.draw(st.one_of(st.integers(0, 30), st.integers(len(good) - 300, len(good) - 1)))
    bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    target = bytearray(len(SLOT))
    try:
        decode_into(bad, [memoryview(target)], WIDTH, "slot 0.k")
    except CorruptBlock:
        return
    # A larger chunk means the same for a slot of one chunk; a plane without compression has no checksum of its own.
    assert target == SLOT or 24 <= at < 24 + 3 * ELEMENTS


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_any_bytes_as_planes_are_refused_in_a_typed_way(data: bytes) -> None:
    head = struct.pack("<II", WIDTH, WRITTEN_CHUNK)
    for stored in (data, head + data, head + struct.pack("<4I", 0, 0, 0, max(0, len(data))) + data):
        planes_refused(stored, "")
