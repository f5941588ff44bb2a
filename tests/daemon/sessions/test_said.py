"""What of a message counts, and what a client may change in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torpor.daemon.api.dialogue import canonical
from torpor.daemon.sessions import said as said_module
from torpor.daemon.sessions.said import Said, digested
from torpor.daemon.sessions.transcripts import TextMap, Turn, message_of, overlap_of

USER, ANSWER = message_of("user", "u1"), message_of("assistant", "a1")


def own(text: str, thought: str = "", calls: Sequence[Any] = ()) -> Turn:
    """An answer of the model."""
    written = {**message_of("assistant", text, calls), "reasoning": thought}
    return TextMap().extended([written], start=0, end=1, own=True).turns[0]


def read(text: str, thought: str = "", calls: Sequence[Any] = ()) -> Turn:
    """The same, where a client brought it."""
    return Turn.of(said(text, thought, calls), 1)


def said(text: str, thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    return {**message_of("assistant", text, calls), **({"reasoning": thought} if thought else {})}


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


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_what_was_said_to_the_assistant_is_recognised_as_it_is_alone(role: str) -> None:
    known = TextMap().extended([message_of(role, "<think>x</think> hi ")], start=0, end=1)
    assert known.turns[0].is_mark_of(message_of(role, "<think>x</think> hi "))
    for text in ("<think>x</think> hi", "hi", " hi "):
        assert not known.turns[0].is_mark_of(message_of(role, text))
    assert not known.turns[0].is_mark_of(message_of("assistant", "<think>x</think> hi "))


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
    assert overlap_of(known, found).common == len(messages)
    assert len(list(digested(found))) == 1, "what has its digests is looked at in pieces, too"
    assert len(hashed) == made
