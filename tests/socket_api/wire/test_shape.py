"""The walk over a payload's headers: every bound refuses, and what msgpack makes is let through (threat 17)."""

from __future__ import annotations

import random
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.socket_api.errors import MalformedFrame
from torpor.socket_api.limits import MAX_ARRAY_ITEMS, MAX_DEPTH
from torpor.socket_api.wire import shape
from torpor.socket_api.wire.shape import require_bounded

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


@pytest.mark.one_in(2)
@given(plain)
def test_what_msgpack_makes_is_let_through_up_to_the_depth(value: object) -> None:
    payload = msgpack.packb([value])
    try:
        require_bounded(payload, max_values=10_000)
    except MalformedFrame as error:
        assert "deeper" in str(error)  # noqa: PT017  # the only refusal that valid msgpack of this size can meet


@pytest.mark.one_in(2)
@given(plain, st.data())
def test_a_cut_payload_is_refused(value: object, data: st.DataObject) -> None:
    payload = msgpack.packb({"value": value})
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(MalformedFrame):
        require_bounded(payload[:cut], max_values=10_000)


def test_bytes_behind_the_message_are_refused() -> None:
    with pytest.raises(MalformedFrame, match="1 bytes follow"):
        require_bounded(msgpack.packb({}) + b"\x00", max_values=10)


def test_depth_is_bounded() -> None:
    require_bounded(b"\x91" * (MAX_DEPTH - 1) + b"\x90", max_values=100)
    with pytest.raises(MalformedFrame, match="deeper"):
        require_bounded(b"\x91" * (MAX_DEPTH + 1) + b"\x90", max_values=100)


def test_a_length_past_the_end_is_refused_by_its_header() -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(MalformedFrame, match="past its end"):
            require_bounded(header + b"\x00" * 100, max_values=1000)


@pytest.mark.parametrize("tag", [0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8])
def test_extension_types_and_the_unused_byte_are_refused(tag: int) -> None:
    with pytest.raises(MalformedFrame, match=f"0x{tag:02x}"):
        require_bounded(bytes([tag]) + b"\x00" * 40, max_values=1000)


def test_values_are_counted_unless_they_are_a_run_of_token_ids() -> None:
    many = 5_000
    require_bounded(msgpack.packb([70_000] * many), max_values=600)
    with pytest.raises(MalformedFrame, match="more than 600 values"):
        require_bounded(msgpack.packb([[]] * many), max_values=600)
    with pytest.raises(MalformedFrame, match="more than 600 values"):
        require_bounded(msgpack.packb([-1] * many), max_values=600)


@pytest.mark.one_in(1)
def test_integers_of_a_frame_are_bounded_even_in_several_lists() -> None:
    half = list(range(100)) * (MAX_ARRAY_ITEMS // 150)
    require_bounded(msgpack.packb([half]), max_values=1000)
    with pytest.raises(MalformedFrame, match="integers"):
        require_bounded(msgpack.packb([half, half]), max_values=1000)


def test_an_array_longer_than_allowed_is_refused() -> None:
    with pytest.raises(MalformedFrame, match="array or map of more"):
        require_bounded(msgpack.packb([0] * (MAX_ARRAY_ITEMS + 1)), max_values=10**9)


def test_runs_of_every_integer_width_are_walked_exactly() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    tokens = [dice.choice([dice.randrange(128), dice.randrange(2**16), dice.randrange(2**32)]) for _ in range(3_000)]
    payload = msgpack.packb({"tokens": tokens, "after": "x"})
    one_by_one = 5 + len(tokens) % 256  # the map, two keys, the list and the string; what is left behind whole runs
    require_bounded(payload, max_values=one_by_one)
    with pytest.raises(MalformedFrame, match=f"more than {one_by_one - 1} values"):
        require_bounded(payload, max_values=one_by_one - 1)


@pytest.mark.one_in(1)
def test_hostile_mixes_cost_no_more_than_a_walk() -> None:
    """255 integers and a string, again and again, must not start a run that fails each time. Only printed, not judged:
    the assertion is that the walk ends at the bound on values."""
    payload = msgpack.packb(([1] * 255 + ["x"]) * 4_000)
    began = time.perf_counter()
    with pytest.raises(MalformedFrame, match="values"):
        require_bounded(payload, max_values=131_072)
    print(f"{time.perf_counter() - began:.3f} s")


def test_a_run_that_fails_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try may read 255 integers in vain: counted, because time is not judged."""
    tries = []
    run = shape._INTEGER_RUN

    class Counted:
        def match(self, payload: bytes, position: int) -> object:
            tries.append(position)
            return run.match(payload, position)

    monkeypatch.setattr(shape, "_INTEGER_RUN", Counted())
    require_bounded(msgpack.packb(([1] * 255 + ["x"]) * 40), max_values=131_072)
    assert len(tries) <= 41
