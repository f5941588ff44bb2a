"""Strict msgpack: one encoding for each value, and bounded work for hostile bytes (threats 17, 18)."""

from __future__ import annotations

import datetime as dt
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.errors import CorruptBundle, InvalidDraft, LimitExceeded, StoreError
from torpor.memvid.format.packing import pack, unpack
from torpor.memvid.limits import MAX_NODES
from torpor.tests.memvid.store_making import taking_at_most

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


def read(data: bytes, max_bytes: int = 32 << 20) -> object:
    return unpack(data, max_bytes=max_bytes, what="document")


@given(plain)
def test_every_plain_value_survives(value: object) -> None:
    assert read(pack(value, "value")) == value


def test_map_order_does_not_change_the_encoding() -> None:
    assert pack({"a": 1, "b": 2}, "value") == pack({"b": 2, "a": 1}, "value")


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    "value", [{1: 2}, 1 << 64, object(), {"a": {1, 2}}, dt.datetime.now(dt.UTC), "\ud800", nested(40)]
)
def test_what_the_format_does_not_have_is_refused_when_written(value: object) -> None:
    with pytest.raises(InvalidDraft):
        pack(value, "value")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="a reserved byte"),
        pytest.param(b"\x81\x01\x02", id="a key that is a number"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", id="a key twice"),
        pytest.param(b"\x82\xa1b\x01\xa1a\x02", id="keys out of order"),
        pytest.param(b"\xa2\xff\xfe", id="text that is not UTF-8"),
        pytest.param(b"\xcc\x01", id="an integer in a longer form"),
        pytest.param(b"\xd9\x01a", id="text in a longer form"),
        pytest.param(b"\xca\x3f\x80\x00\x00", id="a float in 32 bits"),
        pytest.param(b"\xc7\x01\x05a", id="an extension"),
        pytest.param(b"\xd6\xff\x00\x00\x00\x00", id="a timestamp"),
        pytest.param(b"\x01\x02", id="a second document"),
        pytest.param(b"\x92\x01", id="too few elements"),
        pytest.param(b"\x91" * 33 + b"\x01", id="34 levels"),
        pytest.param(b"\x91" * 1025 + b"\x01", id="1,026 levels"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="2^32 - 1 elements"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="2^32 - 1 pairs"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
    ],
)
def test_threat_17_what_pack_would_not_write_is_refused(data: bytes) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError):
        read(data)
    assert time.monotonic() - started < 5  # a bound on runaway work, not a measurement


def test_a_document_over_its_limit_is_refused_unread() -> None:
    with pytest.raises(LimitExceeded):
        read(b"\xc1" * 11, max_bytes=10)


def test_threat_17_many_small_values_are_counted_before_they_are_built() -> None:
    """16 MiB of empty lists would be a gigabyte of Python objects."""
    inner = b"\xdd" + MAX_NODES.to_bytes(4, "big") + b"\x90" * MAX_NODES
    data = b"\xdc\x00\x80" + inner * 128
    with taking_at_most(64 << 20), pytest.raises(LimitExceeded):
        read(data)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "value", [b"\x80", b"\x90", b"\x81\xa1a\xc0", b"\xc0"], ids=["maps", "lists", "pairs", "nulls"]
)
def test_a_document_of_half_a_mebibyte_is_counted_too(value: bytes) -> None:
    """The size of a block header: as many values as it may have bytes would take a hundred times its size. They stand
    in lists that are each short enough to be built."""
    count = (512 << 10) // len(value) // 8
    assert count <= MAX_NODES
    data = b"\x98" + (b"\xdd" + count.to_bytes(4, "big") + value * count) * 8
    with taking_at_most(2 << 20), pytest.raises(LimitExceeded):
        read(data)


@pytest.mark.one_in(1)
def test_a_document_that_is_not_counted_takes_what_its_limit_says() -> None:
    data = b"\xdc" + (65_000).to_bytes(2, "big") + b"\x80" * 65_000
    with taking_at_most(7 << 20):
        read(data)


def test_more_values_than_a_reader_takes_are_refused_when_written() -> None:
    with pytest.raises(LimitExceeded):
        pack([None] * (MAX_NODES + 1), "value")
    assert len(pack([None] * (MAX_NODES - 1), "value")) == MAX_NODES + 4


def test_a_large_document_with_few_values_is_read() -> None:
    value = {"blob": b"x" * (1 << 20), "list": [1, -1, 1.5, "é" * 300, None, True, [200, 70_000, 1 << 40], {"a": b""}]}
    assert read(pack(value, "value")) == value


def test_a_large_document_that_is_cut_is_refused() -> None:
    data = pack({"blob": b"x" * (1 << 20), "more": [1, 2, 3]}, "value")
    for cut in (len(data) - 1, len(data) - 3, 1 << 20, 9):
        with pytest.raises(CorruptBundle):
            read(data[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_canonical_document_or_a_typed_refusal(data: bytes) -> None:
    try:
        value = read(data)
    except StoreError:
        return
    assert pack(value, "value") == data


@given(plain)
def test_another_encoder_s_plain_output_is_accepted_only_where_it_is_canonical(value: object) -> None:
    data = msgpack.packb(value, use_bin_type=True)
    try:
        assert read(data) == value
    except CorruptBundle:
        assert data != pack(value, "value")


@pytest.mark.parametrize("claim", [b"\xdd\x00\x01\xff\xff", b"\xdc\xff\xff", b"\xdf\x00\x01\xff\xff", b"\xde\xff\xff"])
def test_threat_17_containers_that_claim_more_than_there_is_get_no_room(claim: bytes) -> None:
    """msgpack sets a list up for what its head claims; a thousand nested heads must not add up to a gigabyte."""
    for count in (1000, 12_000):
        with taking_at_most(32 << 20), pytest.raises((CorruptBundle, LimitExceeded)):
            read(claim * count)
