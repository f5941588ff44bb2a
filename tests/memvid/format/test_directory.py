"""Directories: one encoding, agreement with file and manifest, and nothing but what `encode` writes is read (15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid import BlockEntry
from torpor.memvid.errors import CorruptBundle, LimitExceeded
from torpor.memvid.format import directory
from torpor.memvid.format.directory import Directory, Frame, decode_directory, digest_of, require_covers

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
ONE, TWO = b"1" * 32, b"2" * 32
OWN = b"o" * 32
BLOCKS = (
    BlockEntry(A, None, "span", 0, 256, 10),
    BlockEntry(B, None, "span", 256, 256, 10),
    BlockEntry(C, None, "span", 512, 44, 10),
)
FRAMES = (Frame(C, 64, 256, 128), Frame(b"x" * 32, 320, 128, 128))
END = 448
DIRECTORY = Directory.of(FRAMES, BLOCKS, {A: TWO, B: ONE})


def test_a_directory_reads_back_as_it_was_written() -> None:
    assert Directory(FRAMES, (TWO, ONE), (1, 2, 0)) == DIRECTORY
    assert decode_directory(DIRECTORY.encode(), END, "file") == DIRECTORY
    require_covers(DIRECTORY, BLOCKS, OWN, "file")
    assert [DIRECTORY.holder_of(position) for position in range(3)] == [TWO, ONE, None]


def test_an_own_frame_goes_before_another_holder() -> None:
    assert Directory.of(FRAMES, BLOCKS[2:], {C: ONE}) == Directory(FRAMES, (), (0,))


def test_a_directory_of_nothing_is_one() -> None:
    empty = Directory((), (), ())
    assert decode_directory(empty.encode(), 64, "file") == empty
    require_covers(empty, (), OWN, "file")


def line(frame: Frame, **changes: int) -> bytes:
    changed: dict[str, Any] = {"zero": 0, **changes}
    zero = changed.pop("zero")
    frame = dataclasses.replace(frame, **changed)
    return directory._FRAME.pack(frame.id, frame.offset, frame.frame_bytes, frame.head_bytes, zero)


def places(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"frames": line(FRAMES[0])}, id="frames that end early"),
        pytest.param({"frames": line(FRAMES[1]) + line(FRAMES[0])}, id="frames out of order"),
        pytest.param({"frames": line(FRAMES[0]) + line(FRAMES[1], offset=384)}, id="a gap"),
        pytest.param({"frames": line(FRAMES[0]) + line(FRAMES[1], offset=256)}, id="an overlap"),
        pytest.param({"frames": line(FRAMES[0], offset=0) + line(FRAMES[1])}, id="a frame over the header"),
        pytest.param({"frames": line(FRAMES[0], head_bytes=0) + line(FRAMES[1])}, id="a head of nothing"),
        pytest.param({"frames": line(FRAMES[0], head_bytes=320) + line(FRAMES[1])}, id="a head beyond its frame"),
        pytest.param({"frames": line(FRAMES[0], head_bytes=100) + line(FRAMES[1])}, id="a head that is not aligned"),
        pytest.param({"frames": line(FRAMES[0], frame_bytes=1 << 63) + line(FRAMES[1])}, id="a frame of 2^63 bytes"),
        pytest.param(
            {"frames": line(FRAMES[0], frame_bytes=250) + line(FRAMES[1], offset=314, frame_bytes=134)},
            id="frames that are not aligned",
        ),
        pytest.param({"frames": line(FRAMES[0], zero=1) + line(FRAMES[1])}, id="zeros that are none"),
        pytest.param({"frames": line(FRAMES[0])[:-1]}, id="a line cut"),
        pytest.param({"frames": line(FRAMES[0]) + line(dataclasses.replace(FRAMES[1], id=C))}, id="a block twice"),
        pytest.param({"frames": None}, id="no frames"),
        pytest.param({"holders": TWO + ONE[:-1]}, id="a holder cut"),
        pytest.param({"holders": TWO + TWO}, id="a holder twice"),
        pytest.param({"holders": TWO + ONE + A}, id="a holder that is not used"),
        pytest.param({"holders": TWO}, id="a place without a holder"),
        pytest.param({"places": places(2, 1, 0)}, id="holders not in the order of use"),
        pytest.param({"places": places(1, 3, 0)}, id="a place that skips a holder"),
        pytest.param({"places": places(1, 1 << 31, 0)}, id="a place of 2^31"),
        pytest.param({"places": places(1, 2, 0)[:-1]}, id="a place cut"),
        pytest.param({"places": [1, 2, 0]}, id="places as a list"),
        pytest.param({"more": b""}, id="a field more"),
    ],
)
def test_threat_15_a_directory_that_encode_would_not_write_is_refused(edit: dict[str, object]) -> None:
    domain, fields = msgpack.unpackb(DIRECTORY.encode())
    with pytest.raises(CorruptBundle) as refusal:
        decode_directory(msgpack.packb([domain, dict(sorted((fields | edit).items()))]), END, "file")
    assert refusal.value.part == "directory"


@pytest.mark.parametrize(
    "document",
    [[], ["torpor.directory/2", {}], ["torpor.directory/1", []], ["torpor.directory/1", {}], {}, None],
    ids=repr,
)
def test_what_is_no_directory_is_refused(document: object) -> None:
    with pytest.raises(CorruptBundle):
        decode_directory(msgpack.packb(document), END, "file")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: dataclasses.replace(found, places=found.places[:-1]),
        lambda found: dataclasses.replace(found, places=(*found.places, 0)),
        lambda found: dataclasses.replace(found, places=(1, 2, 1)),
        lambda found: dataclasses.replace(found, places=(0, 2, 0)),
        lambda found: dataclasses.replace(found, holders=(OWN, ONE)),
    ],
    ids=["a place less", "a place more", "elsewhere what is here", "here what is not", "itself as another holder"],
)
def test_a_directory_that_contradicts_its_manifest_is_refused(change: Callable[[Directory], Directory]) -> None:
    with pytest.raises(CorruptBundle):
        require_covers(change(DIRECTORY), BLOCKS, OWN, "file")


@pytest.mark.parametrize(("name", "most"), [("MAX_FRAMES", 1), ("MAX_HOLDERS", 1), ("MAX_BLOCKS", 2)])
def test_a_directory_past_a_limit_is_neither_written_nor_read(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    encoded = DIRECTORY.encode()
    monkeypatch.setattr(directory, name, most)
    with pytest.raises(LimitExceeded):
        DIRECTORY.encode()
    with pytest.raises(CorruptBundle):
        decode_directory(encoded, END, "file")
    monkeypatch.setattr(directory, name, most + 1)
    assert decode_directory(encoded, END, "file") == DIRECTORY


def test_the_digest_is_over_the_encoded_bytes() -> None:
    encoded = DIRECTORY.encode()
    assert digest_of(encoded) != digest_of(encoded[:-1] + bytes([encoded[-1] ^ 1]))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(CorruptBundle):
        decode_directory(data, END, "file")
