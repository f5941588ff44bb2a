"""Volatile lines: what is taken out of a system text, and where it is said."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.chat.volatile import opening_parted, parted, with_volatile
from torpor.daemon.sessions.said import VOLATILE
from torpor.daemon.sessions.transcripts import MAX_SYSTEM_CHARS, TextMap, message_of


def is_clock(line: str) -> bool:
    return line.startswith("now ")


LINES: dict[str, Any] = {**message_of("system", "now 3"), VOLATILE: True}
RESULT = {**message_of("tool", "found"), "tool_call_id": "c"}
SYSTEM, USER, ANSWER = (message_of(role, role) for role in ("system", "user", "assistant"))


@pytest.mark.parametrize(
    ("text", "stays", "goes"),
    [
        ("now 3\nBe brief.\nnow 4 \r\n\nEnd.", "Be brief.\n\nEnd.", "now 3\nnow 4 \r"),
        ("Be brief, now 3.\n", "Be brief, now 3.\n", ""),
        ("now 3", "", "now 3"),
        ("Status:\ngitStatus: of then\nStatus:\nEnd.", "Status:\ngitStatus: of then\nEnd.", "Status:"),
        ("now 3\n" + "x" * MAX_SYSTEM_CHARS, "now 3\n" + "x" * MAX_SYSTEM_CHARS, ""),
    ],
)
def test_lines_go_and_all_others_stay_as_they_are(text: str, stays: str, goes: str) -> None:
    assert parted(text, is_clock) == (stays, goes)


def test_what_a_field_of_the_request_said_is_still_told_apart() -> None:
    opening = {**message_of("system", "now 3\nBe brief.\n\nnow 4\nEnd."), "instructed": len("now 3\nBe brief.")}
    rest = {**message_of("system", "Be brief.\n\nEnd."), "instructed": len("Be brief.")}
    clock, empty = message_of("system", "now 5"), message_of("system", "")
    lines = "now 3\nnow 4\nnow 5"
    assert opening_parted([opening, clock, USER, clock], is_clock) == ([rest, empty, USER, clock], lines)
    long = message_of("system", "x" * MAX_SYSTEM_CHARS)
    for others in ([USER, clock], [clock, long], [SYSTEM, USER]):
        assert opening_parted(others, is_clock) == (others, "")


@pytest.mark.parametrize(
    ("new", "at"),
    [
        ([SYSTEM, USER], 1),
        ([USER], 0),
        ([SYSTEM, USER, ANSWER, RESULT, SYSTEM, USER, USER], 5),
        ([RESULT, RESULT], 2),
        ([USER, ANSWER, RESULT], 3),
    ],
)
def test_they_stand_before_the_question_behind_results_and_once(new: list[Any], at: int) -> None:
    said = with_volatile(TextMap(), new, "now 3")
    assert said == [*new[:at], LINES, *new[at:]]
    known = TextMap().extended([*said, ANSWER], start=0, end=9)
    assert with_volatile(known, new, "now 3") == new
    assert with_volatile(known, new, "now 4", is_field=True)[at] == {
        **LINES,
        "content": "now 4",
        "instructed": len("now 4"),
    }
    assert with_volatile(known, new, "") == with_volatile(known, new, None) == new
    assert with_volatile(known, [], "now 4") == []
