"""What a text map recognises, and how a transcript stands to it; values only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.api.dialogue import canonical
from torpor.daemon.models.chat_template import Root
from torpor.daemon.sessions import said as said_module
from torpor.daemon.sessions import transcripts, turn_parts
from torpor.daemon.sessions.results import Called, calls_answered
from torpor.daemon.sessions.said import Said, digested
from torpor.daemon.sessions.transcripts import (
    MAX_SYSTEM_CHARS,
    MAX_TURNS,
    Standing,
    TextMap,
    Turn,
    message_of,
    spoken,
    standing,
)

SYSTEM, USER, USER_2 = message_of("system", "S"), message_of("user", "u1"), message_of("user", "u2")
ANSWER, ANSWER_2 = message_of("assistant", "a1"), message_of("assistant", "a2")
TALK = TextMap().extended([SYSTEM, USER], start=0, end=10).extended([ANSWER], start=10, end=15)
FIRST: dict[str, Any] = {"turns": b"", "system": None}
LONG = TALK.extended([USER_2], start=15, end=20).extended([ANSWER_2], start=20, end=25)


def own(text: str, thought: str = "", calls: Sequence[Any] = ()) -> Turn:
    """An answer of the model."""
    written = {**message_of("assistant", text, calls), "reasoning": thought}
    return TextMap().extended([written], start=0, end=1, own=True).turns[0]


def read(text: str, thought: str = "", calls: Sequence[Any] = ()) -> Turn:
    """The same, where a client brought it."""
    return Turn.of(said(text, thought, calls), 1)


def said(text: str, thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    return {**message_of("assistant", text, calls), **({"reasoning": thought} if thought else {})}


def test_a_text_map_tells_under_which_root_each_message_was_read() -> None:
    roots = [Root(({"name": name},), {}) for name in "abab"]
    text_map = TextMap()
    for at, root in enumerate(roots):
        text_map = text_map.changed(roots[max(0, at - 1)], root)
        text_map = text_map.extended([USER], start=2 * at, end=2 * at + 1)
        text_map = text_map.extended([ANSWER], start=2 * at + 1, end=2 * at + 2)
    again = TextMap.from_map(text_map.to_map())
    assert again == text_map
    assert len(text_map.to_map()["roots"]) == 3, "each text once"
    for count in range(9):
        cut = again.cut(count)
        assert TextMap.from_map(cut.to_map()) == cut
        assert [cut.root_at(at, roots[-1]) for at in range(count)] == [roots[at // 2] for at in range(count)]
        assert cut.root_at_end(roots[-1]) == roots[max(0, count - 1) // 2] or not count
    assert again.cut(4).changed(roots[1], roots[1]).extended([USER], start=4, end=5).root_at(4, roots[1]) == roots[1]


def test_the_oldest_roots_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MAX_EARLIER_ROOT_CHARS", 100)
    text_map, roots = TextMap(), [Root((), {"a": letter * 30}) for letter in "abcd"]
    for at, root in enumerate(roots):
        text_map = text_map.changed(roots[max(0, at - 1)], root).extended([USER], start=at, end=at + 1)
    assert [text_map.root_at(at, roots[-1]) for at in range(4)] == [roots[2], roots[2], roots[2], roots[3]]


@pytest.mark.parametrize("finished", [True, False, None])
def test_a_text_map_tells_how_an_answer_of_the_model_ended(finished: bool | None) -> None:
    """An older one does not."""
    text_map = TextMap().extended([ANSWER], start=0, end=1, own=True, finished=finished)
    text_map = text_map.extended([USER], start=1, end=2).extended([ANSWER_2], start=2, end=3)
    again = TextMap.from_map(text_map.to_map())
    assert again == text_map
    assert [(turn.own, turn.finished) for turn in again.turns] == [(True, finished), (False, None), (False, None)]


@pytest.mark.parametrize(
    ("turn", "given_back"),
    [
        (own("hello"), said("hello")),
        (own("hello"), said("  hello\n")),
        (own("\n\nhello"), said("hello")),
        (own("hello", "why"), said("hello", "why")),
        (own("hello", "\nwhy\n"), said("hello", "why")),
        (own("hello", "why"), said("\nhello ")),
        (own("", "cut off"), said("")),
        (own(""), said("")),
        (own("\ud800"), said("\ud800")),
        (own("the tag </think> ends"), said("the tag </think> ends")),
        (read(" hello", "why"), said(" hello", "why")),
        (read("<think>why</think>hello"), said("<think>why</think>hello")),
    ],
)
def test_an_answer_is_recognised_with_its_thinking_and_without_and_a_read_one_as_it_was(
    turn: Turn, given_back: Any
) -> None:
    assert turn.is_mark_of(given_back)


@pytest.mark.parametrize(
    ("turn", "given_back"),
    [
        (own("hello"), said("Hello")),
        (own("a  b"), said("a b")),
        (own('{"a": 1}'), said('{"a":1}')),
        (own("hello", "why"), said("hello", "who")),
        (own("hello"), said("hello", "why")),
        # Tags in a text are text, whoever wrote it.
        (own("A </think> ends"), said("B </think> ends")),
        (own("why</think>hello"), said("hello")),
        (own("hello"), said("<think>why</think>hello")),
        (own("<think>one"), said("<think>two")),
        (own("<think>one"), said("")),
        (read("A </think> ends"), said("B </think> ends")),
        (read("why</think>hello"), said("hello")),
        (read("<think>one"), said("<think>two")),
        # A template may show all of what is read.
        (read("hello"), said(" hello")),
        (read("hello\n"), said("hello")),
        (read("hello", "why"), said("hello")),
        (read("hello", "why"), said("hello", "who")),
        (read("hello"), said("hello", "why")),
    ],
)
def test_another_answer_is_not_recognised(turn: Turn, given_back: Any) -> None:
    assert not turn.is_mark_of(given_back)


CALL = {"name": "look", "arguments": {"path": "a", "deep": {"x": 1, "y": [1.5, None]}}}
TURNED = {"name": "look", "arguments": {"deep": {"y": [1.5, None], "x": 1.0}, "path": "a"}}


def test_a_call_of_the_model_is_recognised_by_its_name_and_values_and_a_read_one_as_it_was_written() -> None:
    for given_back in ({**CALL, "id": "another"}, TURNED):
        assert own("hm", "why", [{**CALL, "id": "c1"}]).is_mark_of(said("hm", "why", [given_back]))
    assert read("hm", "", [{**CALL, "id": "c1"}]).is_mark_of(said("hm", "", [{**CALL, "id": "another"}]))
    assert read("hm", "", [TURNED]).is_mark_of(said("hm", "", [TURNED]))
    assert not read("hm", "", [CALL]).is_mark_of(said("hm", "", [TURNED]))


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [CALL, CALL],
        [{**CALL, "name": "see"}],
        [{**CALL, "arguments": {**CALL["arguments"], "path": "b"}}],  # type: ignore[dict-item]
        [{**CALL, "arguments": {**CALL["arguments"], "deep": {"x": True, "y": [1.5, None]}}}],  # type: ignore[dict-item]
    ],
    ids=["none", "twice", "another name", "another text", "true for 1"],
)
def test_another_call_is_not_recognised(calls: list[Any]) -> None:
    assert not own("hm", "", [CALL]).is_mark_of(said("hm", "", calls))
    assert not read("hm", "", [CALL]).is_mark_of(said("hm", "", calls))


def test_a_text_that_spells_a_call_is_no_call() -> None:
    called = canonical([[CALL["name"], CALL["arguments"]]])
    for text in (f"hm\0{called}", f"calls\0{called}\0hm"):
        assert not own("hm", "", [CALL]).is_mark_of(said(text))


TOOL = {"name": "look", "description": "", "parameters": {"b": 1, "a": 2}}


def test_a_transcript_with_another_root_is_another_conversation() -> None:
    known = TextMap().begun(b"r" * 16).extended([USER], start=0, end=10)
    known = TextMap.from_map(known.extended([ANSWER], start=10, end=15).to_map())
    assert standing(known, [USER, ANSWER, USER_2], b"r" * 16) == Standing(2, 2, 15)
    for other in (b"", b"o" * 16):
        assert standing(known, [USER, ANSWER, USER_2], other) == Standing(0, 0, 0)


OLDER_WORDS = ["hello", "why</think>hello", "<think>why", "<think>why</think>\n\nhello"]
"""In maps before the third version these had two digests: that of `hello`, and that of nothing."""


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("text", OLDER_WORDS)
def test_an_older_map_never_takes_an_answer_for_another_and_still_proves_its_words(version: int, text: str) -> None:
    def digest(role: str, words: str) -> bytes:
        return blake3(f"{role}\0{words}".encode()).digest(16)

    words = text.rpartition("</think>")[2].strip() if "</think>" in text else "" if "<think>" in text else text
    turns = [(1, 10, digest("user", "u1")), (2, 15, digest("assistant", words))]
    line = "<BI16x16s" if version == 1 else "<BI16s"
    stored: dict[str, Any] = {"turns": b"".join(struct.pack(line, *each) for each in turns), "system": "S"}
    older = TextMap.from_map(stored if version == 1 else {**stored, "version": 2, "root": b""})
    assert [(turn.role, turn.end) for turn in older.turns] == [("user", 10), ("assistant", 15)]
    for other in (*OLDER_WORDS, ""):
        assert standing(older, [USER, message_of("assistant", other), USER_2]) == Standing(1, 0, 0)
    assert older.turns[1].proves(message_of("assistant", text))
    assert not older.turns[1].proves(message_of("assistant", "another"))
    assert TextMap.from_map(older.to_map()) == older, "it is kept in the new form"


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_what_was_said_to_the_assistant_is_recognised_as_it_is_alone(role: str) -> None:
    known = TextMap().extended([message_of(role, "<think>x</think> hi ")], start=0, end=1)
    assert known.turns[0].is_mark_of(message_of(role, "<think>x</think> hi "))
    for text in ("<think>x</think> hi", "hi", " hi "):
        assert not known.turns[0].is_mark_of(message_of(role, text))
    assert not known.turns[0].is_mark_of(message_of("assistant", "<think>x</think> hi "))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER, ANSWER, USER_2, ANSWER_2, USER], Standing(5, 5, 25)),  # all, and one more
        ([SYSTEM, USER, ANSWER, USER_2], Standing(4, 3, 15)),  # another answer: its turn may open in another way
        ([SYSTEM, USER], Standing(2, 0, 0)),
        ([SYSTEM, USER, ANSWER, USER], Standing(3, 3, 15)),  # another second question
        ([SYSTEM, USER, ANSWER_2, USER_2], Standing(2, 0, 0)),  # another first answer: its question ends in its opening
        ([SYSTEM, USER_2], Standing(1, 0, 0)),  # read together with the system's text
        ([SYSTEM], Standing(1, 0, 0)),
        ([USER, ANSWER, USER_2], Standing(0, 0, 0)),
        ([SYSTEM, USER, ANSWER, ANSWER, USER_2], Standing(3, 0, 0)),  # a template may make two answers one turn
    ],
)
def test_a_transcript_is_kept_up_to_where_a_conversation_can_go_on(messages: list[Any], expected: Standing) -> None:
    assert standing(LONG, messages) == expected


def test_an_empty_map_knows_nothing() -> None:
    assert standing(TextMap(), [USER]) == Standing(0, 0, 0)


def test_the_own_system_text_is_spoken_unless_the_transcript_says_one() -> None:
    assert spoken([USER], "S") == [SYSTEM, USER]
    assert spoken([SYSTEM, USER], "other") == [SYSTEM, USER]
    assert spoken([USER], None) == spoken([USER], "") == [USER]


def test_the_digests_of_a_long_transcript_are_made_in_pieces_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece has more than some messages, or than some characters of a message that is not the assistant's."""
    messages = [message_of("user", "é" * (3 << 20)), *[USER, ANSWER] * 500, message_of("tool", "x" * (2 << 20))]
    hashed: list[int] = []
    real = said_module.hashed
    monkeypatch.setattr(said_module, "hashed", lambda text: hashed.append(len(text)) or real(text))
    pieces, most = digested(messages), 0
    try:
        while True:
            before = len(hashed)
            next(pieces)
            most = max(most, len(hashed) - before)
    except StopIteration as end:
        found = end.value
    assert list(found) == messages
    assert (0 < most <= 128, max(hashed) < 100) == (True, True)
    made = len(hashed)
    monkeypatch.undo()
    assert [Said.of(each) for each in found] == [Said.of(each) for each in messages]
    monkeypatch.setattr(said_module, "hashed", lambda text: hashed.append(len(text)) or real(text))
    known = TextMap().extended(found, start=0, end=9)
    assert standing(known, found).common == len(messages)
    assert len(list(digested(found))) == 1, "what has its digests is looked at in pieces, too"
    assert len(hashed) == made


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
    assert standing(TextMap.from_map(known.to_map()), with_results("abc", answered, text)).common == common
    other = TextMap().extended(with_results("abc", answered, text), start=0, end=9)
    named = {"a": "call_1", "b": "call_2", "c": "call_3"}
    again = with_results([*named.values()], [named[each] for each in answered], text)
    assert standing(TextMap.from_map(other.to_map()), again).common == len(again)


def test_calls_of_neighbouring_messages_are_answered_together() -> None:
    """A client may bring each call in a message of its own; templates join them."""
    called = [said("", "", [{**call, "id": each}]) for call, each in zip(CALLS, "abc", strict=True)]
    results = {each: {**message_of("tool", "20"), "tool_call_id": each} for each in "abc"}
    known = TextMap().extended(in_one_piece([USER, *called, *results.values()]), start=0, end=9)
    for order, common in (("abc", 7), ("acb", 5), ("bca", 4)):
        asked = in_one_piece([USER, *called, *(results[each] for each in order)])
        assert standing(known, asked).common == common


@pytest.mark.parametrize("ids", [("", "", ""), ("x", "y", "z"), ("a", "a", "a")])
def test_results_whose_calls_are_not_known_count_in_their_order(ids: Sequence[str]) -> None:
    known = TextMap().extended(with_results(ids, "abc"), start=0, end=9)
    assert standing(known, with_results(ids, "bca")).common == 6
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
    assert standing(behind, whole).common == len(whole)
    for other in {"abc", "acb", "bac", "b", "c"} - {answered}:
        assert standing(behind, with_results("abc", other)).common < len(whole)


def called(*ids: str) -> Any:
    return said("", "", [{**CALLS[0], "id": each} for each in ids])


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
    assert standing(TextMap.from_map(known.to_map()), in_one_piece(whole("b", "c"))).common == 10
    for one, other, common in (("a", "c", 4), ("b", "a", 9), ("b", "d", 9), ("b", "x", 9), ("x", "c", 4)):
        assert standing(known, in_one_piece(whole(one, other))).common == common
    assert calls_answered(known.turns, 0, 9) == {4: Called([1], 1), 9: Called([6], 0)}


def test_a_result_names_its_call_also_beside_calls_without_ids() -> None:
    whole = [
        USER,
        said("", "", CALLS[:1]),
        called("b", "c"),
        result("c"),
        result("b"),
        ANSWER,
        result("x"),
        result("c"),
    ]
    known = TextMap().extended(in_one_piece(whole), start=0, end=9)
    assert calls_answered(known.turns, 0, 9) == {
        3: Called([2], 1),
        4: Called([2], 0),
        6: Called([5], 0),
        7: Called([2], 1),
    }


def test_what_names_no_call_that_there_is_is_told_at_none() -> None:
    turns = [Turn.of(each, 1) for each in (USER, called("a"), result("a"))]
    for beyond in (b"x" * 16, struct.pack("<4sIII", b"call", 9, 0, 0), struct.pack("<4sIII", b"call", 0, 9, 0)):
        assert calls_answered([*turns[:2], replace(turns[2], beyond=beyond)], 0, 2)[2].answers in ((), [])


def test_many_late_results_take_time_that_grows_as_the_dialogue_does_and_are_looked_at_in_pieces() -> None:
    answers = [each for at in range(4000) for each in (called(f"c{at}"), USER)]
    late = [result(f"c{at}") for at in range(4000)]
    known = TextMap().extended(in_one_piece([USER, *answers]), start=0, end=9)
    pieces = digested(late, known.turns)
    count = sum(1 for _ in pieces)
    assert count >= (len(known.turns) + len(late)) // 1024
    assert len(list(digested(in_one_piece(late), known.turns))) >= count // 2
    whole = TextMap().extended(in_one_piece([USER, *answers, *late]), start=0, end=9)
    told = calls_answered(whole.turns, 0, len(whole.turns))
    assert [called.answers for called in told.values()] == [[1 + 2 * at] for at in range(4000)]


def test_an_id_that_two_answers_have_is_that_of_the_newer_one() -> None:
    """Some clients count the calls of each answer from zero."""
    again = [USER, called("a"), result("a"), USER, called("a"), USER, ANSWER, result("a")]
    known = TextMap().extended(in_one_piece(again), start=0, end=9)
    assert calls_answered(known.turns, 0, 9) == {2: Called([1], 0), 7: Called([4], 0)}
    first = TextMap().extended(in_one_piece(again[:6]), start=0, end=9)
    second = first.extended(in_one_piece(again[6:], first.turns), start=9, end=12)
    assert calls_answered(second.turns, 7, 7) == {7: Called([4], 0)}


def test_the_ids_of_the_oldest_calls_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_parts, "MAX_CALL_IDS", 4)
    known = TextMap()
    for number in range(3):
        calls = [{**call, "id": f"{number}{each}"} for call, each in zip(CALLS[:2], "ab", strict=True)]
        known = known.extended([USER, said("", "", calls)], start=known.end, end=known.end + 3)
    assert [len(turn.calls) for turn in known.turns] == [0, 0, 0, 2, 0, 2]
    assert TextMap.from_map(known.to_map()) == known
    row = TextMap().extended([USER, called("a", "b"), called("c"), result("a"), result("c")], start=0, end=9)
    row = row.extended([called("d", "e"), called("f")], start=9, end=12)
    assert [len(turn.calls) for turn in row.turns] == [0, 0, 0, 0, 0, 2, 1], "of answers in a row all or none"
    assert calls_answered(row.turns, 0, 9) == {3: Called([1, 2], 0), 4: Called([1, 2], 1)}
    behind = known.extended([USER], start=9, end=10)
    assert (known.ends_with_calls, behind.ends_with_calls) == (True, False)


def test_the_oldest_blanks_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_parts, "MAX_BLANKS", 4)
    said = [message_of("user", text) for text in (" a ", "b", "\t\n", "c\n")]
    known = TextMap().extended(said, start=0, end=9)
    assert [turn.blanks for turn in known.turns] == [("", ""), ("", ""), ("\t\n", ""), ("", "\n")]
    assert TextMap.from_map(known.to_map()) == known
    known = known.extended([message_of("user", "\n" * 9)], start=9, end=12)
    assert not any(any(turn.blanks) for turn in known.turns)
    assert "blanks" not in known.to_map()


def test_instructions_are_those_of_the_request_that_was_answered() -> None:
    """Clients may open with the same words and mean other parts of them."""
    known = TextMap().extended([{**message_of("system", "A\n\nB"), "instructed": 1}, USER], start=0, end=5)
    known = known.extended([ANSWER], start=5, end=9)
    assert [known.says(each) for each in ("A", "A\n\nB", "B")] == [True, True, False]
    other = known.asked_with({**message_of("system", "A\n\nB"), "instructed": 4})
    later = other.asked_with(message_of("system", "A\n\nB")).asked_with({**SYSTEM, "instructed": 4})
    assert later == other
    later = later.extended([USER_2], start=9, end=12).extended([ANSWER_2], start=12, end=15)
    assert [later.says(each) for each in ("A", "A\n\nB", "B")] == [False, True, False]
    assert TextMap.from_map(later.to_map()) == later
    assert later.cut(9) == known
    assert later.asked_with({**SYSTEM, "instructed": 1}).says("A")


def test_a_map_does_not_go_on_behind_what_it_does_not_tell_qc7() -> None:
    assert TALK.extended([USER_2], start=16, end=20) == TALK
    assert TextMap().extended([USER], start=1, end=5) == TextMap()


def test_a_map_is_cut_with_its_ledger() -> None:
    assert LONG.cut(25) is LONG
    assert LONG.cut(24).turns == LONG.turns[:4]
    assert LONG.cut(15).turns == TALK.turns
    assert LONG.cut(9).turns == ()
    assert LONG.cut(9).system == "S"


def test_a_map_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MAX_TURNS", 3)
    assert TALK.extended([USER_2], start=15, end=20) == TALK, "and so it ends before the ledger does"
    assert MAX_TURNS == 16_384
    long = message_of("system", "x" * (MAX_SYSTEM_CHARS + 1))
    assert TextMap().extended([long, USER], start=0, end=10).system is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(), st.integers(1, 9)), max_size=9
    )
)
def test_a_map_comes_back_as_it_was_kept(turns: list[tuple[str, str, int]]) -> None:
    known = TextMap()
    for role, text, tokens in turns:
        is_own = role == "assistant" and tokens % 2 == 1
        place: Any = {"start": known.end, "end": known.end + tokens, "own": is_own}
        known = known.extended([message_of(role, text)], **place, answer=bytes([tokens]) * 16 if is_own else b"")
    assert TextMap.from_map(known.to_map()) == known


def test_an_answer_is_known_by_its_id_until_that_is_taken_from_it() -> None:
    known = TextMap().extended([message_of("user", "a")], start=0, end=5)
    known = known.extended([message_of("assistant", "b")], start=5, end=9, answer=b"x" * 16)
    assert [turn.answer for turn in known.turns] == [b"", b"x" * 16]
    gone = known.without_answers([b"x" * 16])
    assert gone.to_map().keys() == {"version", "turns", "system", "root", "disowned"}
    assert TextMap.from_map(gone.to_map()) == gone
    # An older version still has the id.
    assert known.without_answers(gone.disowned) == gone == gone.without_answers(gone.disowned)
    assert gone.cut(0).begun(b"r" * 16).disowned == (b"x" * 16,)


def test_an_older_snapshot_has_none() -> None:
    assert TextMap.from_map(None) == TextMap()


@pytest.mark.parametrize(
    "stored",
    [
        "x",
        {},
        {**LONG.to_map(), "more": 1},
        {**LONG.to_map(), "turns": LONG.to_map()["turns"][:-1]},
        {**LONG.to_map(), "turns": "x"},
        {**LONG.to_map(), "turns": bytes(21) * (MAX_TURNS + 1)},
        {**LONG.to_map(), "root": bytes(15)},
        {**LONG.to_map(), "root": ""},
        {**LONG.to_map(), "version": 4},
        {**LONG.to_map(), "version": 2, "beyond": b""},
        {**LONG.to_map(), "beyond": bytes(20)},
        {**LONG.to_map(), "beyond": None},
        {**LONG.to_map(), "beyond": bytes(21)},
        {**LONG.to_map(), "beyond": b"\x02\0\0\0\x04" + bytes(16)},
        {**LONG.to_map(), "beyond": b"\x09\0\0\0\x01" + bytes(16)},
        {**LONG.to_map(), "version": "3"},
        {**LONG.to_map(), "roots": {}},
        {**LONG.to_map(), "roots": [bytes(7)]},
        {**LONG.to_map(), "roots": [bytes(8), "{}"]},
        {**LONG.to_map(), "roots": [b"\x01" + bytes(7), "{}"]},
        {**LONG.to_map(), "roots": [b"\x01" + bytes(7)]},
        {**LONG.to_map(), "roots": [b"\x09" + bytes(7), Root().to_text()]},
        {**LONG.to_map(), "roots": [(b"\x01" + bytes(7)) * 2, Root().to_text()]},
        {**LONG.to_map(), "roots": [b"\x01" + bytes(7), 5]},
        {**LONG.to_map(), "disowned": bytes(15)},
        {**LONG.to_map(), "disowned": "x" * 16},
        {**LONG.to_map(), "version": 2, "disowned": bytes(16)},
        {**LONG.to_map(), "version": []},
        {**FIRST, "turns": bytes(21)},
        {**FIRST, "more": 1},
        {**LONG.to_map(), "turns": b"\x04" + LONG.to_map()["turns"][1:]},
        {**LONG.to_map(), "turns": b"\x01\0\0\0\0" + LONG.to_map()["turns"][5:]},
        {**LONG.to_map(), "turns": LONG.to_map()["turns"][21 * 2 :] + LONG.to_map()["turns"][: 21 * 2]},
        {**LONG.to_map(), "system": 1},
        {**LONG.to_map(), "other": None},
        {**LONG.to_map(), "answers": None},
        {**LONG.to_map(), "instructed": 1},
        {**LONG.to_map(), "instructed": bytes(7)},
        {**LONG.to_map(), "instructed": struct.pack("<II", 0, 2)},
        {**LONG.to_map(), "instructed": struct.pack("<II", 6, 1)},
        {**LONG.to_map(), "instructed": struct.pack("<IIII", 0, 1, 0, 1)},
        {**LONG.to_map(), "instructed": struct.pack("<IIII", 2, 1, 0, 1)},
        {**LONG.to_map(), "fields_said": None},
        {**LONG.to_map(), "fields_said": bytes(7)},
        {**LONG.to_map(), "fields_said": struct.pack("<II", 0, 0)},
        {**LONG.to_map(), "fields_said": struct.pack("<II", 1, 1)},
        {**LONG.to_map(), "fields_said": struct.pack("<II", 9, 1)},
        {**LONG.to_map(), "fields_said": struct.pack("<IIII", 0, 1, 0, 1)},
        {**LONG.to_map(), "fields_said": struct.pack("<II", 0, 1) * 9},
        {**LONG.to_map(), "blanks": None},
        {**LONG.to_map(), "blanks": [0, " "]},
        {**LONG.to_map(), "blanks": [0, " ", ""] * 6},
        {**LONG.to_map(), "blanks": [9, " ", ""]},
        {**LONG.to_map(), "blanks": [True, " ", ""]},
        {**LONG.to_map(), "blanks": [0, " ", None]},
        {**LONG.to_map(), "blanks": [0, " a", ""]},
        {**LONG.to_map(), "calls": None},
        {**LONG.to_map(), "calls": bytes(7)},
        {**LONG.to_map(), "calls": b"\x02\0\0\0" + bytes(4)},
        {**LONG.to_map(), "calls": b"\x02\0\0\0\x02\0\0\0" + bytes(8)},
        {**LONG.to_map(), "calls": b"\x02\0\0\0\xff\xff\xff\xff" + bytes(8)},
        {**LONG.to_map(), "calls": b"\x01\0\0\0\x01\0\0\0" + bytes(8)},
        {**LONG.to_map(), "calls": b"\x09\0\0\0\x01\0\0\0" + bytes(8)},
        {**LONG.to_map(), "calls": (b"\x02\0\0\0\x01\0\0\0" + bytes(8)) * 2},
        {**LONG.to_map(), "calls": b"\x02\0\0\0\x01\0\1\0" + bytes(8 * 65537)},
        {**LONG.to_map(), "answers": bytes(19)},
        {**LONG.to_map(), "answers": bytes(20)},
        {**LONG.to_map(), "answers": b"\xff" * 20},
    ],
)
def test_what_is_no_text_map_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="text_map"):
        TextMap.from_map(stored)
