"""Frames: cut anywhere, refused early, never more memory than stated (threats 17, 42, 43)."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.socket_api.errors import FrameTooLarge, LocalProtocolError, MalformedFrame, TruncatedFrame
from torpor.socket_api.limits import REQUEST_LIMITS, FrameLimits
from torpor.socket_api.wire.framing import FrameDecoder, encode_frame, encode_in_pieces, whole

SMALL = FrameLimits(max_frame_bytes=1024, max_values=200)
messages = st.dictionaries(
    st.text(max_size=5), st.integers(0, 2**63) | st.text(max_size=10) | st.lists(st.booleans(), max_size=5), max_size=4
)


def frame_of(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def frames_in(decoder: FrameDecoder) -> list[dict[str, object]]:
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def as_decoded(value: object) -> object:
    if isinstance(value, dict):
        return {key: as_decoded(item) for key, item in value.items()}
    return tuple(map(as_decoded, value)) if isinstance(value, list) else value


@pytest.mark.one_in(2)
@given(st.lists(messages, max_size=5), st.data())
def test_any_chunking_gives_the_same_frames(sent: list[dict[str, object]], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(message, max_frame_bytes=1024) for message in sent)
    decoder = FrameDecoder(SMALL)
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        decoder.feed(stream[:size])
        found += frames_in(decoder)
        stream = stream[size:]
    assert found == as_decoded(sent) or found == [as_decoded(message) for message in sent]
    assert decoder.waiting_bytes == 0
    decoder.require_empty()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_frames_or_a_typed_refusal(junk: bytes) -> None:
    decoder = FrameDecoder(SMALL)
    decoder.feed(junk)
    try:
        frames_in(decoder)
    except (FrameTooLarge, MalformedFrame):
        with pytest.raises(MalformedFrame):
            decoder.next_frame()


def test_a_prefix_of_4_gib_is_refused_by_itself_and_allocates_nothing() -> None:
    """Threat 43."""
    tracemalloc.start()
    decoder = FrameDecoder(REQUEST_LIMITS)
    decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(FrameTooLarge) as caught:
        decoder.next_frame()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (2**32 - 1, 16 * 2**20)
    decoder.feed(b"x" * 1_000_000)
    assert decoder.waiting_bytes == 0  # a dead decoder keeps nothing


def test_the_limit_itself_is_taken_and_one_more_byte_is_not() -> None:
    text = "x" * (1024 - len(msgpack.packb({"t": "x" * 900})) + 900)
    decoder = FrameDecoder(SMALL)
    decoder.feed(encode_frame({"t": text}, max_frame_bytes=1024))
    assert decoder.next_frame() == {"t": text}
    decoder.feed((1025).to_bytes(4, "little"))
    with pytest.raises(FrameTooLarge):
        decoder.next_frame()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb("text"),
        msgpack.packb(7),
        msgpack.packb({1: 2}),
        msgpack.packb({b"bytes": 2}),
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xa1a\xa2\xff\xfe",
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        msgpack.packb({}) + b"\x00",
        b'{"type":"hello"}',
    ],
    ids=lambda payload: payload.hex()[:24] or "empty",
)
def test_payloads_that_are_not_one_plain_map_are_refused(payload: bytes) -> None:
    decoder = FrameDecoder(SMALL)
    decoder.feed(frame_of(payload))
    with pytest.raises(MalformedFrame):
        decoder.next_frame()


def test_frames_before_a_broken_one_are_still_handed_out() -> None:
    decoder = FrameDecoder(SMALL)
    decoder.feed(frame_of(msgpack.packb({"a": 1})) + frame_of(b"\xc1"))
    assert decoder.next_frame() == {"a": 1}
    with pytest.raises(MalformedFrame):
        decoder.next_frame()


def test_the_end_of_the_stream_inside_a_frame_is_truncation_at_every_offset() -> None:
    """Threat 42."""
    whole = encode_frame({"type": "hello", "protocol": 1}, max_frame_bytes=1024)
    for cut in range(1, len(whole)):
        decoder = FrameDecoder(SMALL)
        decoder.feed(whole[:cut])
        assert decoder.next_frame() is None
        with pytest.raises(TruncatedFrame) as caught:
            decoder.require_empty()
        assert caught.value.received_bytes == cut


def test_a_message_that_cannot_be_sent_is_our_own_fault() -> None:
    for message in ({"a": "\ud800"}, {"a": 2**64}, {"a": object()}, {"a": "x" * 2000}):
        with pytest.raises(LocalProtocolError):
            encode_frame(message, max_frame_bytes=1024)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("params.tools.1.parameters.maximum", {"params": {"tools": [{}, {"parameters": {"maximum": 0}}]}}),
        ("params.template_arguments.n", {"id": 1, "params": {"template_arguments": {"n": 0}}}),
        ("result.arguments.list.2", {"result": {"arguments": {"list": (1, 2, 0)}}}),
    ],
)
def test_an_integer_of_more_than_64_bits_is_named_with_its_place(
    place: str, message: dict[str, Any], number: int
) -> None:
    *within, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for is_in_pieces in (False, True):
        changed: Any = json.loads(json.dumps(message))
        inner = changed
        for step in within:
            inner = inner[step]
        inner[last] = number
        with pytest.raises(LocalProtocolError, match=f"cannot be sent: {place} has more than 64 bits") as refusal:
            sent_in_pieces(changed) if is_in_pieces else encode_frame(changed, max_frame_bytes=1000)
        assert refusal.value.field == place
    inner[last] = 2**64 - 1
    assert sent_in_pieces(changed)


def sent_in_pieces(message: dict[str, Any]) -> bytes:
    return whole(encode_in_pieces(message, max_frame_bytes=1000))


@pytest.mark.one_in(3)
def test_a_hostile_frame_of_full_size_stays_within_its_memory() -> None:
    """Threat 17: empty maps by the million would take gigabytes if they were built before they were counted."""
    decoder = FrameDecoder(REQUEST_LIMITS)
    payload = b"\x81\xa1a\xdd" + (1_000_000).to_bytes(4, "big") + b"\x80" * 1_000_000
    decoder.feed(frame_of(payload))
    tracemalloc.start()
    with pytest.raises(MalformedFrame):
        decoder.next_frame()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(payload)


nested = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.integers(0, 9).map(lambda each: [each] * 300)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 1), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.one_in(1)
@given(nested | st.dictionaries(st.text(max_size=2), nested, max_size=3), st.booleans(), st.data())
def test_what_is_read_in_pieces_is_the_same_frame_or_the_same_refusal(
    message: object, damaged: bool, data: st.DataObject
) -> None:
    payload = bytearray(msgpack.packb(message))
    if damaged:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    def read(in_pieces: bool) -> tuple[object, bool]:
        decoder = FrameDecoder(FrameLimits(max_frame_bytes=2**20, max_values=5000))
        decoder.feed(frame_of(bytes(payload)))
        found: object
        try:
            found = whole(decoder.next_frame_in_pieces()) if in_pieces else decoder.next_frame()
        except MalformedFrame:
            found = MalformedFrame
        return repr(found), decoder.waiting_bytes == 0

    assert read(in_pieces=True) == read(in_pieces=False)


def test_a_map_that_repeats_a_key_is_refused_in_pieces_too() -> None:
    decoder = FrameDecoder(SMALL)
    decoder.feed(frame_of(b"\x82\xa1a\x01\xa1a\x02"))
    with pytest.raises(MalformedFrame, match="repeats a key"):
        whole(decoder.next_frame_in_pieces())
    with pytest.raises(MalformedFrame, match="given up"):
        whole(decoder.next_frame_in_pieces())
