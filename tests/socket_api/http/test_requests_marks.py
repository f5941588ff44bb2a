"""Marks for a cache in the requests of both APIs, around a service without a model."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.api.limits import MAX_CHECKPOINTS, MAX_KEEP_AWAKE_S
from torpor.socket_api.http.requests import Marks
from torpor.tests.socket_api.http.answers import asked_for
from torpor.tests.socket_api.http.http_rig import HttpThread

SHORT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
LONG: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BREAK: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


def test_marks_of_messages_are_counted_in_messages_of_the_dialogue(server: HttpThread) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "3"}
    asked = {
        "max_tokens": 2,
        "system": [text("Be brief.", **LONG)],
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
            {"role": "user", "content": [result, text("go on", **SHORT)]},
        ],
    }
    assert server.ask("POST", "/v1/messages", asked).status == 200
    (given,) = asked_for(server, "converse")
    assert [each["role"] for each in given["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert (given["checkpoints"], given["keep_awake_s"]) == ((1, 5), 3600.0)


@pytest.mark.parametrize(
    ("more", "checkpoints"),
    [({}, ()), ({"tools": [{"name": "a", "input_schema": {}, **SHORT}]}, (0,)), (SHORT, (1,))],
    ids=["none", "of a tool", "of the request"],
)
def test_a_mark_of_tools_stands_before_all_messages_and_that_of_a_request_behind_them(
    server: HttpThread, more: dict[str, Any], checkpoints: tuple[int, ...]
) -> None:
    hello = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    assert server.ask("POST", "/v1/messages", {**hello, **more}).status == 200
    (given,) = asked_for(server, "converse")
    assert (given.get("checkpoints", ()), given.get("keep_awake_s")) == (checkpoints, None)


def test_chat_completions_take_marks_of_both_kinds(server: HttpThread) -> None:
    asked = {
        "messages": [
            {"role": "system", "content": [text("Be brief.", **SHORT)]},
            {"role": "user", "content": [text("a", **BREAK), text("b")]},
            {"role": "user", "content": "c"},
        ],
        "prompt_cache_options": {"mode": "explicit", "ttl": "5m"},
    }
    answer = server.ask("POST", "/v1/chat/completions", asked)
    assert "x-torpor-ignored" not in answer.headers
    (given,) = asked_for(server, "converse")
    assert (given["checkpoints"], given["keep_awake_s"]) == ((1, 2), 1800.0)


def test_responses_take_marks_of_items_and_a_time_for_all(server: HttpThread) -> None:
    def item(role: str, **mark: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "input_text", "text": "a", **mark}]}

    asked = {
        "instructions": "Be brief.",
        "input": [item("developer", **BREAK), item("user"), item("user", **SHORT)],
        "prompt_cache_options": {"ttl": "1h"},
    }
    answer = server.ask("POST", "/v1/responses", asked)
    assert "x-torpor-ignored" not in answer.headers
    (given,) = asked_for(server, "converse")
    assert (given["checkpoints"], given["keep_awake_s"]) == ((1, 3), 3600.0)


def test_only_the_newest_marks_and_times_of_a_day_at_most_are_taken() -> None:
    marks = Marks()
    for count in range(9):
        marks.add({"ttl": f"{count}d"}, count)
    assert marks.checkpoints == tuple(range(9 - MAX_CHECKPOINTS, 9))
    assert marks.keep_awake_s == MAX_KEEP_AWAKE_S


@pytest.mark.parametrize("ttl", ["", "soon", "1e9s", "-1m", 5, None, "9999999d"])
def test_a_time_that_is_none_is_no_time_and_refuses_nothing(ttl: Any) -> None:
    marks = Marks()
    marks.add({"ttl": ttl}, 1)
    assert (marks.checkpoints, marks.keep_awake_s) == ((1,), None)
