"""Whose tokens are whose: the turns of a text map, cut by blocks."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.sessions.transcripts import TextMap, Turn
from torpor.daemon.views.roles import held_in, role_spans, with_thinking

TURNS = [("system", 30), ("user", 30), ("assistant", 50), ("tool", 70), ("assistant", 90)]


def session(turns: Any = TURNS, **more: Any) -> dict[str, Any]:
    told = TextMap(tuple(Turn(role, bytes([at]) * 16, end) for at, (role, end) in enumerate(turns)))
    return {"text_map": told.to_map(), **more}


def test_each_message_has_the_tokens_up_to_its_end_and_what_was_read_in_one_go_is_joined() -> None:
    spans = ((0, 30, "system+user"), (30, 50, "assistant"), (50, 70, "tool"), (70, 90, "assistant"))
    assert role_spans(session(), 90) == spans
    assert role_spans(session(), 100) == (*spans, (90, 100, "text"))
    assert role_spans(session(), 60) == (*spans[:2], (50, 60, "text")), "a message that goes beyond is not told"
    told = role_spans(session(chat_root='{"tools": [{"name": "f"}], "arguments": {}}'), 90)
    assert told[0] == (0, 30, "tools+system+user")
    assert role_spans(session(chat_root='{"tools": [], "arguments": {"x": 1}}'), 90) == spans


def test_the_text_map_of_the_whole_ledger_counts_where_its_end_is_unread() -> None:
    whole = session([*TURNS, ("user", 95)])["text_map"]
    assert role_spans(session(unread={"tokens": b"", "text_map": whole}), 95)[-1] == (90, 95, "user")


@pytest.mark.parametrize(
    "told", [{}, {"text_map": 3}, {"text_map": {"turns": b"x", "version": 3}}, {"text_map": {"turns": 1}}]
)
def test_of_no_messages_or_of_what_is_no_text_map_nothing_is_told(told: dict[str, Any]) -> None:
    assert role_spans(told, 50) == ()


def test_a_role_that_cannot_be_is_no_role() -> None:
    told = session()
    told["text_map"]["turns"] = b"\x09" + told["text_map"]["turns"][1:]
    assert role_spans(told, 90) == ()


def test_thoughts_are_told_apart_within_answers_alone() -> None:
    spans = role_spans(session(), 90)
    assert with_thinking(spans, [(20, 35), (40, 44), (60, 75)]) == (
        (0, 30, "system+user"),
        (30, 35, "thinking"),
        (35, 40, "assistant"),
        (40, 44, "thinking"),
        (44, 50, "assistant"),
        (50, 70, "tool"),
        (70, 75, "thinking"),
        (75, 90, "assistant"),
    )


def test_a_block_holds_parts_of_messages() -> None:
    spans = role_spans(session(), 90)
    assert held_in(spans, 20, 80) == {"system+user": 10, "assistant": 30, "tool": 20}
    assert list(held_in(spans, 20, 80)) == ["system+user", "assistant", "tool"]
    assert held_in(spans, 90, 99) == {}
