"""What a text map recognises, and how a transcript stands to it; values only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.sessions import transcripts
from torpor.daemon.sessions.transcripts import (
    MAX_SYSTEM_CHARS,
    MAX_TURNS,
    Standing,
    TextMap,
    message_of,
    spoken,
    standing,
)

SYSTEM, USER, USER_2 = message_of("system", "S"), message_of("user", "u1"), message_of("user", "u2")
ANSWER, ANSWER_2 = message_of("assistant", "a1"), message_of("assistant", "a2")
TALK = TextMap().extended([SYSTEM, USER], start=0, end=10).extended([ANSWER], start=10, end=15)
LONG = TALK.extended([USER_2], start=15, end=20).extended([ANSWER_2], start=20, end=25)


@pytest.mark.parametrize(
    ("shown", "given_back"),
    [
        ("hello", "hello"),
        ("hello", "  hello\n"),
        ("\n\nhello", "hello"),
        ("<think>why</think>\n\nhello", "<think>why</think>\n\nhello"),
        ("<think>why</think>\n\nhello", "hello"),
        ("<think>why</think>\n\nhello", "\nhello "),
        ("why</think>hello", "<think>why</think>hello"),
        ("why</think>hello", "<think>\nwhy</think>hello"),
        ("why</think>hello", "hello"),
        ("<think></think>hello", "hello"),
        ("<think>cut off", ""),
        ("", ""),
        ("\ud800", "\ud800"),
    ],
)
def test_an_answer_is_recognised_as_it_was_shown_and_without_its_thinking(shown: str, given_back: str) -> None:
    known = TextMap().extended([message_of("assistant", shown)], start=0, end=1)
    assert known.turns[0].is_mark_of(message_of("assistant", given_back))


@pytest.mark.parametrize(
    ("shown", "given_back"),
    [
        ("hello", "Hello"),
        ("hello", "<think>why</think>hello"),
        ("<think>why</think>hello", "<think>who</think>hello"),
        ("<think>why</think>hello", "<think>why</think>"),
        ("a  b", "a b"),
        ('{"a": 1}', '{"a":1}'),
    ],
)
def test_another_answer_is_not_recognised(shown: str, given_back: str) -> None:
    known = TextMap().extended([message_of("assistant", shown)], start=0, end=1)
    assert not known.turns[0].is_mark_of(message_of("assistant", given_back))


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
        ([SYSTEM, USER, ANSWER, USER_2], Standing(4, 4, 20)),  # the last answer is wanted again
        ([SYSTEM, USER], Standing(2, 2, 10)),
        ([SYSTEM, USER, ANSWER, USER], Standing(3, 3, 15)),  # another second question
        ([SYSTEM, USER, ANSWER_2, USER_2], Standing(2, 0, 0)),  # another first answer: its question ends in its opening
        ([SYSTEM, USER_2], Standing(1, 0, 0)),  # read together with the system's text
        ([SYSTEM], Standing(1, 0, 0)),
        ([USER, ANSWER, USER_2], Standing(0, 0, 0)),
        ([SYSTEM, USER, ANSWER, ANSWER, USER_2], Standing(3, 3, 15)),
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
        known = known.extended([message_of(role, text)], start=known.end, end=known.end + tokens)
    assert TextMap.from_map(known.to_map()) == known


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
        {**LONG.to_map(), "turns": bytes(37) * (MAX_TURNS + 1)},
        {**LONG.to_map(), "turns": b"\x04" + LONG.to_map()["turns"][1:]},
        {**LONG.to_map(), "turns": b"\x01\0\0\0\0" + LONG.to_map()["turns"][5:]},
        {**LONG.to_map(), "turns": LONG.to_map()["turns"][37 * 2 :] + LONG.to_map()["turns"][: 37 * 2]},
        {**LONG.to_map(), "system": 1},
        {**LONG.to_map(), "other": None},
    ],
)
def test_what_is_no_text_map_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="text_map"):
        TextMap.from_map(stored)
