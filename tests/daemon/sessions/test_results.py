"""Results are known by the calls that they answer, and told at these."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torpor.daemon.sessions import turn_parts
from torpor.daemon.sessions.results import Called, calls_answered
from torpor.daemon.sessions.said import Said, digested
from torpor.daemon.sessions.transcripts import TextMap, Turn, message_of, overlap_of

USER, ANSWER = message_of("user", "u1"), message_of("assistant", "a1")


CALLS = [{"name": "look", "arguments": {"at": at}} for at in range(3)]


def with_results(ids: Sequence[str], answered: Sequence[str], text: str = "20") -> Sequence[Any]:
    """A dialogue with calls of these ids, and results for some of them."""
    calls = [{**call, "id": each} for call, each in zip(CALLS, ids, strict=True)]
    results = [{**message_of("tool", text), "tool_call_id": each} for each in answered]
    return in_one_piece([USER, message_of("assistant", "", calls), *results, ANSWER])


def in_one_piece(messages: Sequence[Any], before: Sequence[Turn] = ()) -> Sequence[Any]:
    made = digested(messages, before)
    while True:
        try:
            next(made)
        except StopIteration as ended:
            found: Sequence[Any] = ended.value
            return found


@pytest.mark.parametrize("text", ["20", "x" * 600_000])
@pytest.mark.parametrize(
    ("answered", "common"),
    [("abc", 6), ("acb", 3), ("bac", 2), ("aac", 3), ("bca", 2), ("ab", 4), ("ac", 3), ("b", 2), ("a", 3)],
)
def test_results_are_known_by_the_calls_that_they_answer_and_not_by_the_ids_of_these(
    answered: str, common: int, text: str
) -> None:
    """Clients make new ids with each request, and a template may show them."""
    known = TextMap().extended(with_results("abc", "abc", text), start=0, end=9)
    assert overlap_of(TextMap.from_map(known.to_map()), with_results("abc", answered, text)).common == common
    other = TextMap().extended(with_results("abc", answered, text), start=0, end=9)
    named = {"a": "call_1", "b": "call_2", "c": "call_3"}
    again = with_results([*named.values()], [named[each] for each in answered], text)
    assert overlap_of(TextMap.from_map(other.to_map()), again).common == len(again)


def test_calls_of_neighbouring_messages_are_answered_together() -> None:
    """A client may bring each call in a message of its own; templates join them."""
    called = [message_of("assistant", "", [{**call, "id": each}]) for call, each in zip(CALLS, "abc", strict=True)]
    results = {each: {**message_of("tool", "20"), "tool_call_id": each} for each in "abc"}
    known = TextMap().extended(in_one_piece([USER, *called, *results.values()]), start=0, end=9)
    for order, common in (("abc", 7), ("acb", 5), ("bca", 4)):
        asked = in_one_piece([USER, *called, *(results[each] for each in order)])
        assert overlap_of(known, asked).common == common


@pytest.mark.parametrize("ids", [("", "", ""), ("x", "y", "z"), ("a", "a", "a")])
def test_results_whose_calls_are_not_known_count_in_their_order(ids: Sequence[str]) -> None:
    known = TextMap().extended(with_results(ids, "abc"), start=0, end=9)
    assert overlap_of(known, with_results(ids, "bca")).common == 6
    alone = [{**message_of("tool", "20"), "tool_call_id": each} for each in "ba"]
    assert [Said.of(each) for each in in_one_piece(alone)] == [Said.of(each) for each in alone]


@pytest.mark.parametrize("again", [False, True], ids=["once", "digested before"])
@pytest.mark.parametrize("answered", ["abc", "acb", "bac", "b", "c", "xab"])
def test_results_that_come_in_another_request_are_known_by_the_calls_before_them(answered: str, *, again: bool) -> None:
    whole = with_results("abc", answered)
    known = TextMap().extended(whole[:2], start=0, end=5)
    assert TextMap.from_map(known.to_map()) == known
    alone = [dict(each) for each in whole[2:]]
    new = in_one_piece(in_one_piece(alone) if again else alone, known.turns)
    behind = known.extended(new, start=5, end=9)
    assert overlap_of(behind, whole).common == len(whole)
    for other in {"abc", "acb", "bac", "b", "c"} - {answered}:
        assert overlap_of(behind, with_results("abc", other)).common < len(whole)


def called(*ids: str) -> Any:
    return message_of("assistant", "", [{**CALLS[0], "id": each} for each in ids])


def result(call_id: str) -> Any:
    return {**message_of("tool", "20"), "tool_call_id": call_id}


@pytest.mark.parametrize("split", range(2, 10))
def test_results_behind_a_later_answer_are_known_by_their_calls_in_one_request_and_in_two(split: int) -> None:
    def whole(one: str, other: str) -> list[Any]:
        return [USER, called("a", "b"), USER, ANSWER, result(one), USER, called("c"), USER, called("d"), result(other)]

    known, at = TextMap(), 0
    for messages in (whole("b", "c")[:split], whole("b", "c")[split:]):
        new, at = in_one_piece(messages, known.turns), at + 9
        known = known.extended(new, start=at - 9, end=at)
    assert overlap_of(TextMap.from_map(known.to_map()), in_one_piece(whole("b", "c"))).common == 10
    for one, other, common in (("a", "c", 4), ("b", "a", 9), ("b", "d", 9), ("b", "x", 9), ("x", "c", 4)):
        assert overlap_of(known, in_one_piece(whole(one, other))).common == common
    assert calls_answered(known.turns, 0, len(known.turns) - 1) == {4: Called([1], 1), 9: Called([6], 0)}


def test_a_result_names_its_call_also_beside_calls_without_ids() -> None:
    whole = [
        USER,
        message_of("assistant", "", CALLS[:1]),
        called("b", "c"),
        result("c"),
        result("b"),
        ANSWER,
        result("x"),
        result("c"),
    ]
    known = TextMap().extended(in_one_piece(whole), start=0, end=9)
    assert calls_answered(known.turns, 0, len(known.turns) - 1) == {
        3: Called([2], 1),
        4: Called([2], 0),
        6: Called([5], 0),
        7: Called([2], 1),
    }


def test_what_names_no_call_that_there_is_is_told_at_none() -> None:
    turns = [Turn.of(each, 1) for each in (USER, called("a"), result("a"))]
    for beyond in (b"x" * 16, struct.pack("<4sIII", b"call", 9, 0, 0), struct.pack("<4sIII", b"call", 0, 9, 0)):
        assert calls_answered([*turns[:2], replace(turns[2], beyond=beyond)], 0, 2)[2].answers in ((), [])


@pytest.mark.one_in(1)
def test_many_late_results_take_time_that_grows_as_the_dialogue_does_and_are_looked_at_in_pieces() -> None:
    answers = [each for at in range(4000) for each in (called(f"c{at}"), USER)]
    late = [result(f"c{at}") for at in range(4000)]
    known = TextMap().extended(in_one_piece([USER, *answers]), start=0, end=9)
    pieces = digested(late, known.turns)
    count = sum(1 for _ in pieces)
    assert count >= (len(known.turns) + len(late)) // 1024
    assert len(list(digested(in_one_piece(late), known.turns))) >= count // 2
    whole = TextMap().extended(in_one_piece([USER, *answers, *late]), start=0, end=9)
    told = calls_answered(whole.turns, 0, len(whole.turns) - 1)
    assert [called.answers for called in told.values()] == [[1 + 2 * at] for at in range(4000)]


def test_an_id_that_two_answers_have_is_that_of_the_newer_one() -> None:
    """Some clients count the calls of each answer from zero."""
    again = [USER, called("a"), result("a"), USER, called("a"), USER, ANSWER, result("a")]
    known = TextMap().extended(in_one_piece(again), start=0, end=9)
    assert calls_answered(known.turns, 0, len(known.turns) - 1) == {2: Called([1], 0), 7: Called([4], 0)}
    first = TextMap().extended(in_one_piece(again[:6]), start=0, end=9)
    second = first.extended(in_one_piece(again[6:], first.turns), start=9, end=12)
    assert calls_answered(second.turns, 7, 7) == {7: Called([4], 0)}


def test_the_ids_of_the_oldest_calls_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_parts, "MAX_CALL_IDS", 4)
    known = TextMap()
    for number in range(3):
        calls = [{**call, "id": f"{number}{each}"} for call, each in zip(CALLS[:2], "ab", strict=True)]
        known = known.extended([USER, message_of("assistant", "", calls)], start=known.end, end=known.end + 3)
    assert [len(turn.calls) for turn in known.turns] == [0, 0, 0, 2, 0, 2]
    assert TextMap.from_map(known.to_map()) == known
    row = TextMap().extended([USER, called("a", "b"), called("c"), result("a"), result("c")], start=0, end=9)
    row = row.extended([called("d", "e"), called("f")], start=9, end=12)
    assert [len(turn.calls) for turn in row.turns] == [0, 0, 0, 0, 0, 2, 1], "of answers in a row all or none"
    assert calls_answered(row.turns, 0, 4) == {3: Called([1, 2], 0), 4: Called([1, 2], 1)}
    behind = known.extended([USER], start=9, end=10)
    assert (known.ends_with_calls, behind.ends_with_calls) == (True, False)
