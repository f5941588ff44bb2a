"""What a text map recognises, and how a transcript stands to it; values only."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.models.chat_template import Root
from torpor.daemon.sessions import transcripts, turn_parts
from torpor.daemon.sessions.said import VOLATILE
from torpor.daemon.sessions.transcripts import (
    MAX_SYSTEM_CHARS,
    MAX_TURNS,
    Overlap,
    TextMap,
    message_of,
    overlap_of,
    spoken,
)

SYSTEM, USER, USER_2 = message_of("system", "S"), message_of("user", "u1"), message_of("user", "u2")
ANSWER, ANSWER_2 = message_of("assistant", "a1"), message_of("assistant", "a2")
TALK = TextMap().extended([SYSTEM, USER], start=0, end=10).extended([ANSWER], start=10, end=15)
FIRST: dict[str, Any] = {"turns": b"", "system": None}
LONG = TALK.extended([USER_2], start=15, end=20).extended([ANSWER_2], start=20, end=25)


def test_no_transcript_has_the_volatile_lines_of_a_text_map() -> None:
    clocks = [{**message_of("system", hour), VOLATILE: True, "instructed": 2} for hour in ("10", "11")]
    known = TextMap().extended([SYSTEM, clocks[0], USER], start=0, end=10).extended([ANSWER], start=10, end=15)
    known = known.extended([clocks[1], USER_2], start=15, end=20).extended([ANSWER_2], start=20, end=25)
    for each in (known, TextMap.from_map(known.to_map()), TALK.followed_by(known.turns, 15).cut(40)):
        assert [turn.volatile for turn in each.turns][-6:] == [True, False, False, True, False, False]
        assert [each.says_volatile(hour) for hour in ("10", "11")] == [False, True]
    assert known.says("S")
    assert known.cut(15).says_volatile("10")
    assert known.turns[-1].chain == LONG.turns[-1].chain
    assert overlap_of(known, [SYSTEM, USER, ANSWER, USER_2, ANSWER_2, USER]) == Overlap(5, 5, 25)


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


TOOL = {"name": "look", "description": "", "parameters": {"b": 1, "a": 2}}


def test_a_transcript_with_another_root_is_another_conversation() -> None:
    known = TextMap().begun(b"r" * 16).extended([USER], start=0, end=10)
    known = TextMap.from_map(known.extended([ANSWER], start=10, end=15).to_map())
    assert overlap_of(known, [USER, ANSWER, USER_2], b"r" * 16) == Overlap(2, 2, 15)
    for other in (b"", b"o" * 16):
        assert overlap_of(known, [USER, ANSWER, USER_2], other) == Overlap(0, 0, 0)


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
        assert overlap_of(older, [USER, message_of("assistant", other), USER_2]) == Overlap(1, 0, 0)
    assert older.turns[1].proves(message_of("assistant", text))
    assert not older.turns[1].proves(message_of("assistant", "another"))
    assert TextMap.from_map(older.to_map()) == older, "it is kept in the new form"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER, ANSWER, USER_2, ANSWER_2, USER], Overlap(5, 5, 25)),  # all, and one more
        ([SYSTEM, USER, ANSWER, USER_2], Overlap(4, 3, 15)),  # another answer: its turn may open in another way
        ([SYSTEM, USER], Overlap(2, 0, 0)),
        ([SYSTEM, USER, ANSWER, USER], Overlap(3, 3, 15)),  # another second question
        ([SYSTEM, USER, ANSWER_2, USER_2], Overlap(2, 0, 0)),  # another first answer: its question ends in its opening
        ([SYSTEM, USER_2], Overlap(1, 0, 0)),  # read together with the system's text
        ([SYSTEM], Overlap(1, 0, 0)),
        ([USER, ANSWER, USER_2], Overlap(0, 0, 0)),
        ([SYSTEM, USER, ANSWER, ANSWER, USER_2], Overlap(3, 0, 0)),  # a template may make two answers one turn
    ],
)
def test_a_transcript_is_kept_up_to_where_a_conversation_can_go_on(messages: list[Any], expected: Overlap) -> None:
    assert overlap_of(LONG, messages) == expected


def test_an_empty_map_knows_nothing() -> None:
    assert overlap_of(TextMap(), [USER]) == Overlap(0, 0, 0)


def test_the_own_system_text_is_spoken_unless_the_transcript_says_one() -> None:
    assert spoken([USER], "S") == [SYSTEM, USER]
    assert spoken([SYSTEM, USER], "other") == [SYSTEM, USER]
    assert spoken([USER], None) == spoken([USER], "") == [USER]


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
        {**LONG.to_map(), "turns": b"\x05" + LONG.to_map()["turns"][1:]},
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
