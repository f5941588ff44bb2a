"""Block headers: the id names everything about a block, and a header has one encoding (threats 6, 8, 12 to 14)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.errors import CorruptBundle, InvalidDraft, StoreError
from torpor.memvid.format.blocks import DTYPE_BYTES, BlockEntry, BlockHeader, SlotSpec, block_id, require_chain

SPEC = SlotSpec("0.k", "kv.k/1", "bfloat16", (2, 3, 4))
HEADER = BlockHeader("span", b"i" * 32, 256, b"\1\0\0\0\2\0\0\0\3\0\0\0", b"p" * 32, ((SPEC, b"d" * 32),))

specs = st.builds(
    SlotSpec,
    st.text("abc.019", min_size=1, max_size=8),
    st.sampled_from(["kv.k/1", "kv.v/1", "state.logits/1"]),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 64), max_size=4).map(tuple),
)


@given(
    st.integers(0, 1 << 20).map(lambda n: n * 256),
    st.binary(min_size=4, max_size=1024).map(lambda data: data[: len(data) // 4 * 4]),
    st.lists(st.tuples(specs, st.binary(min_size=32, max_size=32)), max_size=6, unique_by=lambda slot: slot[0].name),
)
def test_every_header_survives(start: int, tokens: bytes, slots: list[tuple[SlotSpec, bytes]]) -> None:
    start %= 1 << 24
    header = BlockHeader("span", b"i" * 32, start, tokens, b"p" * 32 if start else None, tuple(slots))
    assert BlockHeader.decode(header.encode()) == header


def test_block_id_is_pinned_to_its_definition() -> None:
    assert block_id(HEADER.encode()).hex() == "74ff848892444d6996e9973675507b43e58bfaac866958593f94aba5beac7b77"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "state"},
        {"identity_digest": b"j" * 32},
        {"start": 512},
        {"tokens": b"\1\0\0\0\2\0\0\0\4\0\0\0"},
        {"parent": b"q" * 32},
        {"slots": ((SPEC, b"e" * 32),)},
        {"slots": ((dataclasses.replace(SPEC, name="0.v"), b"d" * 32),)},
        {"slots": ((dataclasses.replace(SPEC, kind="kv.v/1"), b"d" * 32),)},
        {"slots": ((dataclasses.replace(SPEC, dtype="float16"), b"d" * 32),)},
        {"slots": ((dataclasses.replace(SPEC, shape=(4, 3, 2)), b"d" * 32),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_threat_6_any_other_fact_gives_another_id(change: dict[str, object]) -> None:
    assert block_id(dataclasses.replace(HEADER, **change).encode()) != block_id(HEADER.encode())


def altered(position: int, value: object) -> bytes:
    document = msgpack.unpackb(HEADER.encode())
    document[position] = value
    return msgpack.packb(document)


def slot(*fields: object) -> list[list[object]]:
    defaults: list[object] = ["0.k", "kv.k/1", "bfloat16", [2, 3, 4], b"d" * 32]
    return [list(fields) + defaults[len(fields) :]]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(msgpack.packb({}), id="a map"),
        pytest.param(HEADER.encode() + b"\0", id="a byte more"),
        pytest.param(altered(0, "torpor.block/2"), id="another domain"),
        pytest.param(altered(1, "code"), id="an unknown kind"),
        pytest.param(altered(1, "state"), id="a state record with tokens"),
        pytest.param(altered(2, b"i" * 31), id="a short identity"),
        pytest.param(altered(3, -1), id="a negative start"),
        pytest.param(altered(3, 1 << 63), id="a start of 2^63"),
        pytest.param(altered(3, True), id="a start that is a truth value"),
        pytest.param(altered(3, 0), id="a parent at position 0"),
        pytest.param(altered(4, b""), id="a span without tokens"),
        pytest.param(altered(4, b"abc"), id="a third of a token"),
        pytest.param(altered(4, b"abcd" * 257), id="257 tokens"),
        pytest.param(altered(5, None), id="no parent"),
        pytest.param(altered(5, b"p"), id="a short parent"),
        pytest.param(altered(6, slot() * 2), id="two slots of one name"),
        pytest.param(altered(6, [[]]), id="an empty slot"),
        pytest.param(altered(6, slot("")), id="a slot without a name"),
        pytest.param(altered(6, slot("x" * 65)), id="a long name"),
        pytest.param(altered(6, slot("é")), id="a name beyond ASCII"),
        pytest.param(altered(6, slot("0.k", ["kv"])), id="a kind that is a list"),
        pytest.param(altered(6, slot("0.k", "kv.k/1", "object")), id="threat 14: an unknown dtype"),
        pytest.param(altered(6, slot("0.k", "kv.k/1", "uint8", [2], b"d")), id="a short digest"),
    ],
)
def test_a_header_that_encode_would_not_write_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptBundle):
        BlockHeader.decode(data)


def shaped(shape: Sequence[object]) -> bytes:
    """A header with a slot of this shape, honestly packed."""
    return altered(6, slot("0.k", "kv.k/1", "uint8", list(shape)))


@pytest.mark.parametrize(
    "shape", [[65536] * 4, [1 << 32, 1 << 32], [1 << 31, 1 << 31, 4], [1 << 32, 1 << 31, 2], [1 << 16] * 8]
)
def test_threat_12_a_shape_whose_product_wraps_is_refused(shape: list[int]) -> None:
    """2^64 elements are none in 64 bits: whoever multiplies in C allocates nothing and then indexes."""
    with pytest.raises(CorruptBundle):
        BlockHeader.decode(shaped(shape))
    with pytest.raises(InvalidDraft):
        SlotSpec("0.k", "kv.k/1", "uint8", tuple(shape))


@pytest.mark.parametrize("shape", [[-1], [-4, -4], [1 << 40], [1] * 200, [True], ["4"], [2.0], [4.0], [None]])
def test_threat_13_a_size_that_is_none_is_refused(shape: list[int]) -> None:
    with pytest.raises(CorruptBundle):
        BlockHeader.decode(shaped(shape))
    with pytest.raises((InvalidDraft, CorruptBundle)):
        SlotSpec("0.k", "kv.k/1", "uint8", tuple(shape))


@pytest.mark.parametrize(("good", "bad"), [([1, 4], [True, 4]), ([1, 4], [1, 4.0])])
def test_threat_13_a_size_is_refused_though_its_like_was_just_read(good: list[object], bad: list[object]) -> None:
    """True is 1 and 4.0 is 4 to a dictionary: what was checked once must not vouch for them."""
    BlockHeader.decode(shaped(good))
    with pytest.raises(CorruptBundle):
        BlockHeader.decode(shaped(bad))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_header_or_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(StoreError):
        BlockHeader.decode(data)


def test_a_spec_is_checked_when_it_is_built() -> None:
    with pytest.raises(InvalidDraft):
        SlotSpec("0.k", "kv.k/1", "float8", (1,))
    with pytest.raises(InvalidDraft):
        SlotSpec("0.k", "kv.k/1", "uint8", (1 << 32, 2))
    assert SlotSpec("0.k", "kv.k/1", "float32", (2, 0, 4)).size_bytes == 0


def entry(kind: str, start: int, count: int) -> BlockEntry:
    return BlockEntry(bytes(32), kind, start, count, 0)


@pytest.mark.parametrize(
    ("entries", "token_count"),
    [
        ([], 0),
        ([entry("state", 0, 0)], 0),
        ([entry("span", 0, 1)], 1),
        ([entry("span", 0, 256), entry("state", 256, 0), entry("span", 256, 4), entry("state", 260, 0)], 260),
    ],
)
def test_a_contiguous_chain_is_accepted(entries: list[BlockEntry], token_count: int) -> None:
    assert require_chain(entries, token_count) is None


@pytest.mark.parametrize(
    ("entries", "token_count"),
    [
        ([], 1),
        ([entry("span", 0, 256)], 255),
        ([entry("span", 0, 256)], 257),
        ([entry("span", 256, 256)], 256),
        ([entry("span", 0, 256), entry("span", 255, 4)], 260),
        ([entry("span", 0, 256), entry("span", 257, 4)], 260),
        ([entry("span", 0, 100), entry("span", 100, 100)], 200),
        ([entry("span", 0, 257)], 257),
        ([entry("span", 0, 0)], 0),
        ([entry("state", 4, 0), entry("span", 0, 4)], 4),
        ([entry("span", 0, 4), entry("state", 3, 0)], 4),
        ([entry("state", 0, 4)], 4),
        ([entry("state", 0, 0), entry("state", 0, 0)], 0),
        ([entry("span", 0, 4), entry("state", 4, 0), entry("state", 4, 0)], 4),
    ],
)
def test_threat_8_a_chain_with_a_gap_or_another_length_is_refused(entries: list[BlockEntry], token_count: int) -> None:
    assert require_chain(entries, token_count) is not None
