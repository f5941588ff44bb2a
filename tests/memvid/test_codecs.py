"""zstd slots: exactly one frame of exactly the declared size, or a refusal before memory is taken (threat 16)."""

from __future__ import annotations

import resource

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid import Codec, zstd
from torpor.memvid.codecs import compress, decompress_chunks, decompress_into
from torpor.memvid.errors import CorruptBlock, InvalidDraft

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
