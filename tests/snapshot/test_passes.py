"""How a ledger was read: kept as it was, and a stored number never asks for a model call of any size."""

from __future__ import annotations

from array import array

import pytest
from torpor.snapshot.passes import MAX_PASS_TOKENS, UNREPEATABLE, Passes


def test_passes_come_back_as_they_were_stored_and_are_cut_where_they_are_asked_to() -> None:
    passes = Passes()
    for size in (256, 256, 87, 1, 1, 1):
        passes.add(size)
    again = Passes.from_bytes(passes.tobytes(), 602)
    assert list(again) == [256, 256, 87, 1, 1, 1]
    assert (again.run_count, again.token_count, again.ends_alone) == (3, 602, True)
    assert list(again.between(300, 600)) == [212, 87, 1]
    assert list(again.cut(513)) == [256, 256, 1]
    assert list(again.cut(260)) == [256, 4]
    assert list(again.cut_back(260)) == [256, *[UNREPEATABLE] * 4], (
        "neither a call of four tokens was made, nor four of one"
    )
    assert list(again.cut_back(599)) == [256, 256, 87]
    assert list(Passes().cut_back(300)) == [UNREPEATABLE] * 300, "nobody knows"
    assert list(Passes().cut(300)) == [256, 44]


def test_a_token_that_was_read_beside_those_of_others_is_told_from_one_that_was_read_alone() -> None:
    """Its bits are not those that reading it alone would give, so nobody may take them for these."""
    passes = Passes()
    for size in (256, 1, UNREPEATABLE, UNREPEATABLE, 1, UNREPEATABLE):
        passes.add(size)
    again = Passes.from_bytes(passes.tobytes(), 261)
    assert list(again) == [256, 1, UNREPEATABLE, UNREPEATABLE, 1, UNREPEATABLE]
    assert list(again.between(255, 261)) == [1, 1, 1, 1, 1, 1], "each read one token of this ledger"
    assert [again.cut(count).ends_alone for count in range(257, 262)] == [True, False, False, True, False]
    assert list(again.cut_back(259)) == [256, 1, UNREPEATABLE, UNREPEATABLE]
    assert list(again.cut(100)) == [100]


def test_the_end_of_a_call_is_found_behind_any_token() -> None:
    passes = Passes()
    for size in (256, 64, 64, 87, 1, UNREPEATABLE, 1):
        passes.add(size)
    ends = [256, 320, 384, 471, 472, 473, 474]
    for count in range(1, 475):
        assert passes.end_behind(count) == next(end for end in ends if end >= count)
    assert (passes.end_behind(0), passes.end_behind(500), Passes().end_behind(1)) == (0, 474, 0)


@pytest.mark.parametrize("runs", [(256, 2), (256, 1, 0, 1), (256, 0), (1, 257), ()])
def test_passes_that_do_not_read_the_ledger_are_refused(runs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not read 256 tokens"):
        Passes.from_bytes(array("I", runs).tobytes(), 256)


def test_one_call_never_reads_more_than_the_limit() -> None:
    """What a call computes may grow with its square, and who wakes at an earlier token repeats the calls."""
    most = array("I", (MAX_PASS_TOKENS, 2)).tobytes()
    assert list(Passes.from_bytes(most, 2 * MAX_PASS_TOKENS)) == [MAX_PASS_TOKENS] * 2
    with pytest.raises(ValueError, match=f"reads {MAX_PASS_TOKENS + 1} tokens, and {MAX_PASS_TOKENS} are the most"):
        Passes.from_bytes(array("I", (1, 1, MAX_PASS_TOKENS + 1, 1)).tobytes(), MAX_PASS_TOKENS + 2)


def test_what_a_session_map_tells_of_calls_may_be_of_more_tokens_than_a_version_has() -> None:
    passes = Passes()
    for size in (256, 87, 1):
        passes.add(size)
    told = Passes.in_map({"passes": passes.tobytes()})
    assert (list(told), list(told.cut_back(256)), told.token_count) == ([256, 87, 1], [256], 344)
    assert list(Passes.in_map({})) == []


@pytest.mark.parametrize(
    "stored",
    [
        "text",
        b"1234",
        array("I", [MAX_PASS_TOKENS + 1, 1]).tobytes(),
        array("I", [64, 0]).tobytes(),
        array("I", [2048, 0xFFFF_FFFF]).tobytes(),
    ],
)
def test_a_session_map_that_tells_of_calls_that_cannot_be_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="pass"):
        Passes.in_map({"passes": stored})
