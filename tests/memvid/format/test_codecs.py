"""Compressed slots: what was written comes back to the bit, and anything else is refused before memory is taken.

A zstd slot is exactly one frame of the declared size; a slot on byte planes is a header, a table and planes that fill
it to the last byte (threat 16).
"""

from __future__ import annotations

import itertools
import random
import resource
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor.memvid import RAW as RAW_CODEC
from torpor.memvid import Codec, zstd
from torpor.memvid.errors import CorruptBlock, InvalidDraft
from torpor.memvid.format import codecs as codecs_module
from torpor.memvid.format.blocks import DTYPE_BYTES, SlotSpec
from torpor.memvid.format.codecs import (
    PLANES_CODE,
    RAW_CODE,
    ZSTD_CODE,
    compress,
    decode_chunks,
    decode_into,
    decompress_chunks,
    decompress_into,
    encode_slot,
    planes,
)
from torpor.memvid.limits import CHUNK_BYTES, KIB, MAX_EXPANSION, MIB, MIN_PLANE_CHUNK_BYTES

RAW = b"torpor " * 1000


def frame(data: bytes = RAW, **options: object) -> bytes:
    settings = {"level": 3, "write_checksum": True, "write_content_size": True} | options
    return zstandard.ZstdCompressor(**settings).compress(data)


def restore(stored: bytes, size_bytes: int = len(RAW)) -> bytes:
    target = bytearray(size_bytes)
    decompress_into(stored, [memoryview(target)[: size_bytes // 3], memoryview(target)[size_bytes // 3 :]], "slot 0.k")
    assert b"".join(map(bytes, decompress_chunks(stored, size_bytes, "slot 0.k"))) == target
    return bytes(target)


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 19))
def test_every_slot_survives_compression(data: bytes, level: int) -> None:
    half = len(data) // 2
    stored = compress([memoryview(data)[:half], memoryview(data)[half:]], len(data), level)
    assert restore(stored, len(data)) == data


def test_a_slot_of_many_blocks_survives() -> None:
    data = RAW * 500  # 3.5 MB, 27 zstd blocks
    assert restore(compress([memoryview(data)], len(data), 1), len(data)) == data


def refused(stored: bytes, size_bytes: int = len(RAW)) -> None:
    for attempt in (
        lambda: decompress_into(stored, [memoryview(bytearray(size_bytes))], "slot 0.k"),
        lambda: list(decompress_chunks(stored, size_bytes, "slot 0.k")),
    ):
        with pytest.raises(CorruptBlock, match=r"slot 0\.k"):
            attempt()


def test_threat_16_a_bomb_is_refused_before_it_unfolds() -> None:
    bomb = frame(bytes(1 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_threat_16_a_frame_that_declares_less_than_it_holds_is_refused() -> None:
    big = bytearray(frame(bytes(60_000)))  # a two-byte content size, stored less 256
    at = big.index((60_000 - 256).to_bytes(2, "little"))
    big[at : at + 2] = (7_000 - 256).to_bytes(2, "little")
    refused(bytes(big), 7_000)


def test_threat_16_a_frame_that_declares_more_than_it_holds_is_refused() -> None:
    big = bytearray(frame(bytes(7_000)))
    at = big.index((7_000 - 256).to_bytes(2, "little"))
    big[at : at + 2] = (8_000 - 256).to_bytes(2, "little")
    refused(bytes(big), 8_000)


def test_threat_16_a_frame_without_its_size_is_refused() -> None:
    refused(frame(write_content_size=False))


def test_threat_16_a_frame_without_checksum_is_refused() -> None:
    refused(frame(write_checksum=False))
    refused(frame(write_checksum=False) + bytes(4))  # something else where it would be


def test_threat_16_a_frame_with_a_false_checksum_is_refused() -> None:
    stored = frame()
    refused(stored[:-1] + bytes([stored[-1] ^ 1]))


def test_threat_16_a_frame_that_wants_a_dictionary_is_refused() -> None:
    samples = [b"torpor session %d state" % number * 4 for number in range(400)]
    dictionary = zstandard.train_dictionary(1024, samples)
    refused(frame(dict_data=dictionary))


def test_threat_16_a_window_of_128_mib_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, compression_level=1, write_checksum=1, write_content_size=1, enable_ldm=1
    )
    data = bytes(9 << 20)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    stored = stream.compress(data) + stream.flush()
    assert zstandard.get_frame_parameters(stored).window_size > 8 << 20
    refused(stored, len(data))


def test_threat_16_bytes_after_the_frame_are_refused() -> None:
    refused(frame() + b"\0")


def test_threat_16_a_second_frame_is_refused() -> None:
    refused(frame(RAW[:3500]) + frame(RAW[3500:]))


def test_threat_16_a_skippable_frame_is_refused() -> None:
    refused(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame())


@pytest.mark.parametrize("cut", [0, 3, 4, 8, 12, 20, -1, -4, -5])
def test_a_frame_that_is_cut_is_refused(cut: int) -> None:
    refused(frame()[:cut])


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_a_typed_way(data: bytes) -> None:
    refused(data)
    refused(b"\x28\xb5\x2f\xfd" + data)


@pytest.mark.parametrize("level", [0, 20, -1])
def test_a_level_outside_the_limit_is_refused(level: int) -> None:
    with pytest.raises(InvalidDraft):
        zstd(level)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(InvalidDraft):
        Codec(7)


# --- byte planes

WRITTEN_CHUNK = 256 * KIB
FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64")


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


def write(data: bytes, dtype: str, codec: Codec, places: Sequence[int] = ()) -> tuple[int, bytes] | None:
    spec = spec_of(dtype, len(data) // DTYPE_BYTES[dtype])
    encoded = encode_slot(cut(data, places), spec, codec)
    if encoded is None:
        return None
    code, payload, stored_bytes = encoded
    stored = b"".join(payload)
    assert len(stored) == stored_bytes < len(data)
    return code, stored


def read(code: int, stored: bytes, raw_bytes: int, element_bytes: int, places: Sequence[int] = ()) -> bytes:
    """What both ways of decoding agree on."""
    target = bytearray(raw_bytes)
    bounds = [0, *sorted(min(place, raw_bytes) for place in places), raw_bytes]
    views = [memoryview(target)[start:end] for start, end in itertools.pairwise(bounds)]
    decode_into(code, stored, views, element_bytes, "slot 0.k")
    sizes, joined = [], bytearray()
    for chunk in decode_chunks(code, bytearray(stored), raw_bytes, element_bytes, "slot 0.k"):
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
    for codec in (zstd(1), planes(1), planes(3)):
        written = write(data, dtype, codec, [1, 12345, 300_001])
        if written is not None:
            assert read(*written, len(data), DTYPE_BYTES[dtype], [3, 3, 99_999, 262_143]) == data


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_planes_are_for_floating_point_slots_and_others_are_one_frame(dtype: str) -> None:
    chosen = planes(5).for_slot(spec_of(dtype, 10))
    assert chosen == (planes(5) if dtype in FLOATING else zstd(5))
    written = write(like_kv(dtype, 1000) + bytes(1000 * DTYPE_BYTES[dtype]), dtype, planes(5))
    assert written is not None
    assert written[0] == (PLANES_CODE if dtype in FLOATING else ZSTD_CODE)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_slot_that_does_not_shrink_is_left_raw(dtype: str) -> None:
    for codec in (zstd(1), planes(1)):
        for elements in (0, 1, 3):
            assert write(like_kv(dtype, elements), dtype, codec) is None
        assert write(random.Random(3).randbytes(DTYPE_BYTES[dtype] * 40_000), dtype, codec) is None
        assert write(bytes(80_000), dtype, RAW_CODEC) is None


def test_a_slot_is_compressed_exactly_where_that_saves_a_byte() -> None:
    outcomes = set()
    for zeros in range(120):  # `write` holds each payload to be smaller than its slot
        data = random.Random(5).randbytes(800) + bytes(8 * zeros)
        outcomes |= {write(data, "float64", planes(1)) is None, write(data, "uint8", zstd(1)) is None}
    assert outcomes == {True, False}


@pytest.mark.parametrize("codec", [zstd(1), planes(1)])
@pytest.mark.parametrize("value", [0, 0x3F80])
def test_a_slot_of_one_value_is_stored_raw_and_one_with_something_in_it_is_not(codec: Codec, value: int) -> None:
    """What shrinks to less than a part in MAX_EXPANSION would look like a bomb to whoever imports it."""
    constant = struct.pack("<H", value) * 500_000
    assert write(constant, "bfloat16", codec) is None
    for kept in (8_000, 100_000):
        written = write(constant + random.Random(7).randbytes(kept), "bfloat16", codec)
        assert written is not None
        assert len(constant) + kept <= MAX_EXPANSION * len(written[1])
        assert read(*written, len(constant) + kept, 2) == constant + random.Random(7).randbytes(kept)


def test_kv_takes_less_on_planes_than_in_one_frame() -> None:
    data = like_kv("bfloat16", 300_000)
    whole, split = write(data, "bfloat16", zstd(3)), write(data, "bfloat16", planes(1))
    assert whole is not None
    assert split is not None
    assert len(split[1]) < 0.95 * len(whole[1])


def test_every_pattern_of_16_bits_survives_nan_or_not() -> None:
    data = b"".join(struct.pack("<H", pattern) for pattern in range(1 << 16)) * 2
    for dtype in ("bfloat16", "float16"):
        written = write(data, dtype, planes(1))
        assert written is not None
        assert read(*written, len(data), 2) == data


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        ("float32", "0100807f"),  # a signalling NaN
        ("float32", "efbeadff"),  # a NaN with sign and payload
        ("float32", "00000080"),  # minus zero
        ("float64", "010000000000f07f"),
        ("complex64", "0100807f000000ff"),
    ],
)
def test_nan_payloads_and_minus_zero_survive(dtype: str, pattern: str) -> None:
    data = bytes.fromhex(pattern) * 50_000 + random.Random(7).randbytes(8_000)
    written = write(data, dtype, planes(1))
    assert written is not None
    assert read(*written, len(data), DTYPE_BYTES[dtype]) == data


def splittable(data: bytes, element_bytes: int) -> bytes:
    """The same bytes, made to shrink: nothing but the lowest byte of an element differs from its neighbour's."""
    return b"".join(bytes([byte]) + bytes(element_bytes - 1) for byte in data)


@settings(max_examples=25)
@given(
    st.sampled_from(FLOATING),
    st.binary(min_size=100, max_size=2000),
    st.integers(1, 60),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.integers(1, 19),
)
def test_any_slot_survives_however_it_is_cut(
    dtype: str, data: bytes, times: int, written_in: list[int], read_in: list[int], level: int
) -> None:
    data = splittable(data * times, DTYPE_BYTES[dtype])
    with mock.patch.object(codecs_module, "MAX_EXPANSION", 1 << 30):  # what is all alike would be stored raw
        written = write(data, dtype, planes(level), written_in)
    assert written is not None
    assert written[0] == PLANES_CODE
    assert read(*written, len(data), DTYPE_BYTES[dtype], read_in) == data


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
        lambda: decode_into(PLANES_CODE, stored, targets, element_bytes, "slot 0.k"),
        lambda: [len(chunk) for chunk in decode_chunks(PLANES_CODE, stored, raw_bytes, element_bytes, "slot 0.k")],
    ]
    for attempt in attempts:
        tracemalloc.start()
        try:
            with pytest.raises(CorruptBlock, match=rf"slot 0\.k.*{why}"):
                attempt()
            assert tracemalloc.get_traced_memory()[1] < 2 * CHUNK_BYTES
        finally:
            tracemalloc.stop()


def test_the_payload_is_laid_out_as_the_format_says() -> None:
    assert read(PLANES_CODE, payload(parts_of()), len(SLOT), WIDTH) == SLOT
    written = write(SLOT, "float32", planes(1))
    assert written is not None
    code, stored = written
    assert code == PLANES_CODE == 2
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
    assert read(PLANES_CODE, payload(parts, chunk_bytes=chunk_bytes), len(data), WIDTH) == data


@pytest.mark.parametrize(
    "chunk_bytes", [0, 1, 4, 32 * KIB, MIN_PLANE_CHUNK_BYTES + 4, 192 * KIB, 2 * MIB, (1 << 32) - 1, 1 << 31]
)
def test_threat_16_chunks_of_a_size_outside_the_limits_are_refused(chunk_bytes: int) -> None:
    planes_refused(payload(parts_of(), chunk_bytes=chunk_bytes), f"its chunks have {chunk_bytes} bytes")


@pytest.mark.parametrize("plane_count", [0, 1, 2, 3, 5, 8, (1 << 32) - 1])
def test_threat_16_a_count_of_planes_that_is_not_the_dtypes_is_refused(plane_count: int) -> None:
    planes_refused(payload(parts_of(), plane_count=plane_count), f"it has {plane_count} planes")


@pytest.mark.parametrize("element_bytes", [2, 8])
def test_threat_16_planes_of_another_dtypes_width_are_refused(element_bytes: int) -> None:
    planes_refused(payload(parts_of()), "it has 4 planes", element_bytes=element_bytes)


@pytest.mark.parametrize(("element_bytes", "raw_bytes"), [(1, 160_000), (0, 160_000), (4, 160_001), (4, 159_999)])
def test_threat_16_a_slot_that_has_no_planes_is_refused(element_bytes: int, raw_bytes: int) -> None:
    stored = payload(parts_of(), plane_count=element_bytes)
    planes_refused(stored, "not elements", raw_bytes=raw_bytes, element_bytes=element_bytes)


def shifted(places: dict[int, int]) -> list[int]:
    """The true lengths with some of them changed."""
    return [len(part) + places.get(number, 0) for number, part in enumerate(parts_of())]


def test_threat_16_a_plane_longer_than_its_elements_is_refused() -> None:
    # The sum is right: the next plane gives up what this one takes.
    planes_refused(payload(parts_of(), shifted({0: 1, 1: -1})), "its planes do not fit it")


def test_threat_16_lengths_that_go_beyond_the_payload_are_refused() -> None:
    planes_refused(payload(parts_of(), shifted({3: 1})), "its planes do not fit it")
    planes_refused(payload(parts_of(), [*shifted({})[:3], (1 << 32) - 1]), "its planes do not fit it")
    # Three in a row that add up to 2^32: nothing may wrap to the true sum.
    planes_refused(payload(parts_of(), shifted({0: 1 << 31, 1: 1 << 31})), "its planes do not fit it")


def test_threat_16_bytes_after_the_planes_are_refused() -> None:
    planes_refused(payload(parts_of()) + b"\0", "after its planes")
    planes_refused(payload(parts_of(), shifted({3: -1})), "after its planes")


def test_threat_16_bytes_after_the_frame_of_a_plane_are_refused() -> None:
    parts = parts_of()
    planes_refused(payload([*parts[:3], parts[3] + b"\0"]), "after its frame")
    planes_refused(payload([*parts[:3], frame(HIGH[:100]) + frame(HIGH[100:])]), "declares 100 bytes")


def test_threat_16_a_plane_of_no_bytes_or_not_of_zstd_is_refused() -> None:
    parts = parts_of()
    planes_refused(payload([b"", *parts[1:]]), "not a zstd frame")
    planes_refused(payload([parts[0][:-1], *parts[1:]]), "not a zstd frame")


def test_threat_16_planes_that_overlap_can_not_be_said() -> None:
    # Places follow from lengths: a plane that starts in the one before is one that ends the payload too soon.
    parts = parts_of()
    stored = payload([parts[0], parts[1][ELEMENTS // 2 :], *parts[2:]], [ELEMENTS] * 3 + [len(parts[3])])
    planes_refused(stored, "its planes do not fit it")


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 23, 24, 25])
def test_threat_16_a_payload_cut_in_its_header_or_table_is_refused(size_bytes: int) -> None:
    planes_refused(payload(parts_of())[:size_bytes], "too short|does not fit it|do not fit it")


@pytest.mark.parametrize("cut_bytes", [1, 4, 100, ELEMENTS, 3 * ELEMENTS])
def test_threat_16_a_payload_cut_in_its_planes_is_refused(cut_bytes: int) -> None:
    planes_refused(payload(parts_of())[:-cut_bytes], "its planes do not fit it")


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("declares", {"write_content_size": False}),
        ("no checksum", {"write_checksum": False}),
    ],
)
def test_threat_16_a_plane_is_held_to_the_rules_of_a_frame(why: str, options: dict[str, object]) -> None:
    planes_refused(payload([*parts_of()[:3], frame(HIGH, **options)]), why)


def test_threat_16_a_plane_with_a_false_checksum_is_refused() -> None:
    stored = payload(parts_of())
    planes_refused(stored[:-1] + bytes([stored[-1] ^ 1]), "zstd says")


@pytest.mark.parametrize("held_bytes", [ELEMENTS + 9_000, ELEMENTS - 9_000])
def test_threat_16_a_plane_that_holds_another_size_than_it_declares_is_refused(held_bytes: int) -> None:
    forged = bytearray(frame(bytes(held_bytes)))  # a two-byte content size, stored less 256
    at = forged.index((held_bytes - 256).to_bytes(2, "little"))
    forged[at : at + 2] = (ELEMENTS - 256).to_bytes(2, "little")
    planes_refused(payload([*parts_of()[:3], bytes(forged)]), "zstd says")


def test_threat_16_a_bomb_in_a_plane_is_refused_before_it_unfolds() -> None:
    planes_refused(payload([*parts_of()[:3], frame(bytes(1 << 30))]), "declares 1073741824 bytes")


def test_threat_16_a_bad_last_plane_is_found_before_the_first_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("a plane was decompressed")

    monkeypatch.setattr(codecs_module, "_decompress_plane", never)
    data = bytes(4 * WRITTEN_CHUNK)
    parts = [part for start in range(0, len(data), WRITTEN_CHUNK) for part in zero_planes(WRITTEN_CHUNK)]
    planes_refused(payload([*parts[:-1], parts[-1] + b"\0"]), "after its frame", raw_bytes=len(data))


def zero_planes(chunk_bytes: int) -> list[bytes]:
    return [frame(bytes(chunk_bytes // WIDTH))] * WIDTH


def test_threat_16_a_large_slot_is_streamed_in_the_memory_of_two_chunks() -> None:
    # What a verify reads: half a GiB of zeros in 60 KiB, at the largest chunks.
    raw_bytes = 512 * MIB
    stored = payload(zero_planes(CHUNK_BYTES) * (raw_bytes // CHUNK_BYTES), chunk_bytes=CHUNK_BYTES)
    assert len(stored) < 128 * KIB
    tracemalloc.start()
    try:
        assert sum(map(len, decode_chunks(PLANES_CODE, stored, raw_bytes, WIDTH, "slot 0.k"))) == raw_bytes
        assert tracemalloc.get_traced_memory()[1] < 2 * CHUNK_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", [ZSTD_CODE, PLANES_CODE])
def test_a_payload_that_is_no_smaller_than_its_slot_is_refused(code: int) -> None:
    # Whole and sound, but this slot would have been stored raw.
    data = random.Random(1).randbytes(400)
    stored = frame(data) if code == ZSTD_CODE else payload([data[number::WIDTH] for number in range(WIDTH)])
    assert len(stored) >= len(data)
    for attempt in (
        lambda: decode_into(code, stored, [memoryview(bytearray(400))], WIDTH, "slot 0.k"),
        lambda: list(decode_chunks(code, stored, 400, WIDTH, "slot 0.k")),
    ):
        with pytest.raises(CorruptBlock, match="bytes for 400"):
            attempt()


@pytest.mark.parametrize("code", [RAW_CODE, 3, 1 << 31])
def test_a_number_that_is_no_compression_is_refused(code: int) -> None:
    for attempt in (
        lambda: decode_into(code, frame(), [memoryview(bytearray(len(RAW)))], 1, "slot 0.k"),
        lambda: list(decode_chunks(code, frame(), len(RAW), 1, "slot 0.k")),
    ):
        with pytest.raises(CorruptBlock, match=f"no codec {code}"):
            attempt()


def test_larger_chunks_mean_the_same_for_a_slot_of_one_chunk() -> None:
    target = bytearray(len(SLOT))
    decode_into(PLANES_CODE, payload(parts_of(), chunk_bytes=1 << 20), [memoryview(target)], WIDTH, "slot 0.k")
    assert target == SLOT


@settings(max_examples=60)
@given(st.data())
def test_a_payload_with_any_byte_changed_is_refused_or_means_the_same_size(data: st.DataObject) -> None:
    # The layers above compare digests first; here nothing may crash, hang, overrun, or end in another exception.
    good = payload(parts_of())
    at = data.draw(st.one_of(st.integers(0, 30), st.integers(len(good) - 300, len(good) - 1)))
    bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    target = bytearray(len(SLOT))
    try:
        decode_into(PLANES_CODE, bad, [memoryview(target)], WIDTH, "slot 0.k")
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


@pytest.mark.parametrize("level", [0, 20, -1])
def test_a_level_outside_the_limit_is_refused_for_planes(level: int) -> None:
    with pytest.raises(InvalidDraft):
        planes(level)
