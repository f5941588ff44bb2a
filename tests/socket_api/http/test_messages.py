"""Anthropic's messages over HTTP, around a service without a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from torpor.daemon.api.conversing import ConverseRequest, MeasureResult
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import ProgressEvent, SessionEvent, TokenEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.tests.socket_api.http.answers import asked_for, chats, measures, named_events_of, result, says
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
CACHED = {"cache_control": {"type": "ephemeral"}}


async def thinks_and_calls(request: ConverseRequest) -> GenerateResult:
    call = ToolCall("add", {"a": 1}, "toolu_1")
    request.emit(ProgressEvent("prefill", 1, 1))
    for event in (
        TokenEvent(1, "so", "reasoning"),
        TokenEvent(2, " it", "reasoning"),
        TokenEvent(3, "hi"),
        TokenEvent(4, "", "call"),
        TokenEvent(None, "", "call", call),
    ):
        request.emit(event)
    return result(request.session, reasoning="so it", tool_calls=(call,), finish_reason="tool_calls")


def test_an_answer_has_its_blocks_and_tokens_that_add_up(server: HttpThread) -> None:
    chats(server, thinks_and_calls)
    told = server.ask("POST", PATH, HELLO).json
    thought, text, call = told["content"]
    assert (told["type"], told["role"], told["stop_reason"]) == ("message", "assistant", "tool_use")
    assert (thought["thinking"], text["text"], call["input"], call["id"]) == ("so it", "hi", {"a": 1}, "toolu_1")
    assert thought["signature"]
    usage = told["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 7, 2)
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize(
    "marked",
    [
        {"system": [{"type": "text", "text": "Be brief.", **CACHED}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **CACHED}]}]},
        {"tools": [{"name": "add", "input_schema": {}, **CACHED}]},
        CACHED,
    ],
)
def test_where_a_request_marks_a_cache_what_was_read_counts_as_written_to_it(
    server: HttpThread, marked: dict[str, Any]
) -> None:
    says(server)
    usage = server.ask("POST", PATH, {**HELLO, **marked}).json["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 3, 7)


def test_tokens_that_were_computed_again_are_no_cache_and_are_told(server: HttpThread) -> None:
    says(server, recomputed_tokens=5)
    usage = server.ask("POST", PATH, HELLO).json["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["recomputed_tokens"]) == (8, 2, 5)


def test_the_opening_of_a_stream_knows_what_the_wake_has_computed_again(server: HttpThread) -> None:
    says(server, SessionEvent("torpor://default/a", 5), recomputed_tokens=5)
    measures(server, MeasureResult(10, 7, 100, "fake"))
    start, *_, delta, _ = named_events_of(server.ask("POST", PATH, {**HELLO, "stream": True}))
    for usage in (start["message"]["usage"], delta["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["recomputed_tokens"]) == (8, 2, 5)


def test_a_stream_opens_and_closes_each_block(server: HttpThread) -> None:
    chats(server, thinks_and_calls)
    measures(server, MeasureResult(10, 7, 100, "fake"))
    start, ping, *blocks, delta, stop = named_events_of(server.ask("POST", PATH, {**HELLO, "stream": True}))
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 7, 0)
    assert (ping["type"], stop["type"]) == ("ping", "message_stop")
    assert (delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]) == ("tool_use", 2)
    kinds = [(each["type"].removeprefix("content_block_"), each["index"]) for each in blocks]
    assert kinds == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("stop", 2)),
    ]
    deltas = [each["delta"] for each in blocks if "delta" in each]
    assert [each["type"] for each in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta", "text_delta", "input_json_delta"),
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 1}


def test_omitted_thinking_is_told_by_its_signature_alone(server: HttpThread) -> None:
    chats(server, thinks_and_calls)
    asked = {**HELLO, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert server.ask("POST", PATH, asked).json["content"][0]["thinking"] == ""
    events = named_events_of(server.ask("POST", PATH, {**asked, "stream": True}))
    kinds = [each["delta"]["type"] for each in events if each["type"] == "content_block_delta"]
    assert kinds == ["signature_delta", "text_delta", "input_json_delta"]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_signature_that_comes_back_names_its_answer(server: HttpThread, display: str) -> None:
    chats(server, thinks_and_calls)
    asked = {**HELLO, "thinking": {"type": "adaptive", "display": display}}
    told = server.ask("POST", PATH, asked).json
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": told["content"]}]
    server.ask("POST", PATH, {**asked, "messages": [*said, {"role": "user", "content": "b"}]})
    *_, given = asked_for(server, "converse")
    assert given["messages"][1]["answer_id"] == told["id"].removeprefix("msg_")


def test_a_dialogue_is_asked_for_as_the_service_takes_it(server: HttpThread) -> None:
    result_of_tool = [{"type": "text", "text": "3"}, {"type": "tool_reference", "tool_name": "later"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **CACHED}]},
        {"role": "system", "content": "In the middle."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "hm"},
                {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": result_of_tool, "is_error": False},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    tools = [
        {"name": "add", "input_schema": {"type": "object"}, "eager_input_streaming": True},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"name": "search", "type": "web_search_20250305"},
        {"type": "mcp_toolset", "mcp_server_name": "files"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 3f1"}, {"type": "text", "text": "Be brief."}]
    user = json.dumps({"device_id": "d", "session_id": "uuid-01"})
    asked = {
        **HELLO,
        "messages": messages,
        "system": system,
        "tools": tools,
        "metadata": {"user_id": user},
        "temperature": 1.0,
        "top_k": 3,
        "stop_sequences": ["END"],
        "thinking": {"type": "disabled"},
        "context_management": {"edits": []},
    }
    answer = server.ask("POST", PATH, asked, anthropic_beta="effort-1, other")
    assert answer.status == 200
    assert answer.headers["x-torpor-ignored"] == (
        "context_management, tools.web_search_20250305, tools.mcp_toolset, beta.effort-1, beta.other"
    )
    (given,) = asked_for(server, "converse")
    *said, tool, last = given["messages"]
    assert said == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "In the middle."},
        {
            "role": "assistant",
            "content": "hm",
            "reasoning": "so",
            "tool_calls": [{"name": "add", "arguments": {"a": 1}, "id": "t"}],
        },
    ]
    assert (tool["role"], tool["tool_call_id"], last) == ("tool", "t", {"role": "user", "content": "go on"})
    text, loaded = tool["content"].split("\n")
    assert (text, json.loads(loaded)["name"]) == ("3", "later")
    assert [(each["name"], each.get("deferred", False)) for each in given["tools"]] == [("add", False), ("later", True)]
    assert (given["session"], given["template_arguments"]) == ("uuid-01", {"enable_thinking": False})
    assert given["sampling"] == {"temperature": 1.0, "top_k": 3}
    assert given["stop"] == ("END",)
    assert given["left_out"] == ("x-anthropic-billing-header",)


ADD = {"name": "add", "input_schema": {"type": "object"}}
LATER = {"name": "later", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
OTHER = {**LATER, "name": "other"}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}
FOUND = [{"type": "tool_result", "tool_use_id": "t", "content": [REFERENCE]}]
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]}


@pytest.mark.parametrize(
    ("more", "tools", "given"),
    [
        ([], [ADD, LATER], {"add": False}),
        ([CALLED, {"role": "user", "content": FOUND}], [LATER, ADD, OTHER], {"later": True, "add": False}),
        (
            [CALLED, {"role": "user", "content": FOUND}, {"role": "assistant", "content": "ok"}, *HELLO["messages"]],
            [ADD, LATER],
            {"add": False, "later": True},
        ),
        ([CALLED, {"role": "user", "content": FOUND}], [ADD, OTHER], {"add": False}),
        ([CALLED, {"role": "user", "content": FOUND}], [ADD, {**LATER, "input_schema": None}], {"add": False}),
        ([CALLED, {"role": "user", "content": [{**FOUND[0], "content": "later"}]}], [ADD, LATER], {"add": False}),
        ([], [{"type": "tool_search_tool_bm25_20251119", "name": "s"}, ADD, LATER], {"add": False, "later": False}),
    ],
    ids=["none", "named", "before", "gone", "no schema", "quoted", "searched"],
)
def test_a_tool_that_is_loaded_later_may_be_called_once_a_result_refers_to_it(
    server: HttpThread, more: list[Any], tools: list[Any], given: dict[str, bool]
) -> None:
    told = server.ask("POST", PATH, {**HELLO, "messages": [*HELLO["messages"], *more], "tools": tools})
    assert told.status == 200
    *_, asked = asked_for(server, "converse")
    assert {each["name"]: each.get("deferred", False) for each in asked["tools"]} == given


def test_what_has_no_effect_within_a_field_is_named_too(server: HttpThread) -> None:
    asked = {
        **HELLO,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    ignored = server.ask("POST", PATH, asked).headers["x-torpor-ignored"]
    assert ignored == "thinking.budget_tokens"
    assert asked_for(server, "converse")[0]["template_arguments"] == {"enable_thinking": True}


def test_a_long_reading_of_which_nothing_is_told_pings_too(begin: Begin) -> None:
    """Its progress comes more often than a ping is due, and this API has no event for it."""
    server = begin(silence_s=0.02)

    async def chat(request: ConverseRequest) -> GenerateResult:
        for done in range(100):
            request.emit(ProgressEvent("prefill", done, 100))
            await asyncio.sleep(0.002)
        return result(request.session)

    chats(server, chat)
    names = [each["type"] for each in named_events_of(server.ask("POST", PATH, {**HELLO, "stream": True}))]
    assert names.count("ping") > 3


def test_an_answer_that_a_stop_sequence_ended_says_which(server: HttpThread) -> None:
    says(server, stopped_by="END")
    expected = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    asked = {**HELLO, "stop_sequences": ["END"]}
    told = server.ask("POST", PATH, asked).json
    assert {name: told[name] for name in expected} == expected
    (delta,) = [
        each["delta"]
        for each in named_events_of(server.ask("POST", PATH, {**asked, "stream": True}))
        if each["type"] == "message_delta"
    ]
    assert delta == expected


CALLED = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (["I look.", CALLED, "\nDone."], "I look.\nDone."),
        (["I ", CALLED, "look ", CALLED, "twice."], "I look twice."),
        (["I look.", THOUGHT, "Done."], "I look.Done."),
        ([THOUGHT, "I look.", CALLED], "I look."),
        (["I look.", "Done."], "I look.\nDone."),
        ([CALLED, "I look.", "Done."], "I look.\nDone."),
    ],
)
def test_a_text_that_the_stream_told_in_parts_comes_back_as_it_was_written(
    server: HttpThread, blocks: list[Any], text: str
) -> None:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks]
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "b"},
    ]
    assert server.ask("POST", PATH, {"max_tokens": 5, "messages": said}).status == 200
    (given,) = asked_for(server, "converse")
    assert given["messages"][1]["content"] == text
