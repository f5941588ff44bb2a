"""What a text map recognises, and how a transcript stands to it; values only."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.models.chat_template import NO_ROOT, Root
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
FIRST: dict[str, Any] = {"turns": b"", "system": None}
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
        ("hello", "<think>why</think>hello"),
        ("<think>why</think>hello", "<think>who</think>hello"),
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
        ("<think>why</think>hello", "<think>why</think>"),
        ("a  b", "a b"),
        ('{"a": 1}', '{"a":1}'),
    ],
)
def test_another_answer_is_not_recognised(shown: str, given_back: str) -> None:
    known = TextMap().extended([message_of("assistant", shown)], start=0, end=1)
    assert not known.turns[0].is_mark_of(message_of("assistant", given_back))


CALL = {"name": "look", "arguments": {"path": "a", "deep": {"x": 1, "y": [1.5, None]}}}


@pytest.mark.parametrize(
    "given_back",
    [
        {**CALL, "id": "another"},
        {"name": "look", "arguments": {"deep": {"y": [1.5, None], "x": 1.0}, "path": "a"}},
    ],
    ids=["another id", "keys in another order, and 1.0 for 1"],
)
def test_a_call_is_recognised_by_its_name_and_values(given_back: dict[str, Any]) -> None:
    known = TextMap().extended([message_of("assistant", "hm", [{**CALL, "id": "c1"}])], start=0, end=1)
    thoughtful = {**message_of("assistant", "hm", [given_back]), "reasoning": "why"}
    assert known.turns[0].is_mark_of(thoughtful)


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
    known = TextMap().extended([message_of("assistant", "hm", [CALL])], start=0, end=1)
    assert not known.turns[0].is_mark_of(message_of("assistant", "hm", calls))


TOOL = {"name": "look", "description": "", "parameters": {"b": 1, "a": 2}}


@pytest.mark.parametrize(
    ("root", "goes_on"),
    [
        (Root((TOOL,)), True),
        (Root(({"parameters": {"a": 2, "b": 1}, "description": "", "name": "look"},)), True),
        (NO_ROOT, False),
        (Root((TOOL,), {"enable_thinking": False}), False),
        (Root((TOOL, {**TOOL, "name": "see"})), False),
        (Root(({**TOOL, "description": "x"},)), False),
    ],
)
def test_a_transcript_with_another_root_is_another_conversation(root: Root, goes_on: bool) -> None:
    known = TextMap().begun(Root((TOOL,))).extended([USER], start=0, end=10)
    known = known.extended([ANSWER], start=10, end=15)
    found = standing(TextMap.from_map(known.to_map()), [USER, ANSWER, USER_2], root)
    assert found == (Standing(2, 2, 15) if goes_on else Standing(0, 0, 0))


def test_the_map_of_an_older_snapshot_tells_the_same_turns() -> None:
    """The first version had two digests a turn; the second of them is the one that counts."""
    lines = b"".join(
        struct.pack("<BI16s16s", 1 + (turn.role == "assistant"), turn.end, bytes(16), turn.digest)
        for turn in LONG.turns[1:]
    )
    older = TextMap.from_map({"turns": lines, "system": "S"})
    assert older == TextMap(LONG.turns[1:], "S")
    assert standing(older, [USER, ANSWER, USER_2, ANSWER_2, USER]).at == LONG.end


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
        answer = bytes([tokens]) * 16 if role == "assistant" and tokens % 2 else b""
        known = known.extended([message_of(role, text)], start=known.end, end=known.end + tokens, answer=answer)
    assert TextMap.from_map(known.to_map()) == known


def test_an_answer_is_known_by_its_id_until_that_is_taken_from_it() -> None:
    known = TextMap().extended([message_of("user", "a")], start=0, end=5)
    known = known.extended([message_of("assistant", "b")], start=5, end=9, answer=b"x" * 16)
    assert [turn.answer for turn in known.turns] == [b"", b"x" * 16]
    assert known.without_answer(b"y" * 16) == known
    assert known.without_answer(b"x" * 16).to_map().keys() == {"version", "turns", "system", "root"}


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
        {**LONG.to_map(), "version": 3},
        {**FIRST, "turns": bytes(21)},
        {**FIRST, "more": 1},
        {**LONG.to_map(), "turns": b"\x04" + LONG.to_map()["turns"][1:]},
        {**LONG.to_map(), "turns": b"\x01\0\0\0\0" + LONG.to_map()["turns"][5:]},
        {**LONG.to_map(), "turns": LONG.to_map()["turns"][21 * 2 :] + LONG.to_map()["turns"][: 21 * 2]},
        {**LONG.to_map(), "system": 1},
        {**LONG.to_map(), "other": None},
        {**LONG.to_map(), "answers": None},
        {**LONG.to_map(), "answers": bytes(19)},
        {**LONG.to_map(), "answers": bytes(20)},
        {**LONG.to_map(), "answers": b"\xff" * 20},
    ],
)
def test_what_is_no_text_map_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="text_map"):
        TextMap.from_map(stored)
