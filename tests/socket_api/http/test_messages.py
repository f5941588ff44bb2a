"""Anthropic's messages over HTTP, around a service without a model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torpor.daemon.api.conversing import ConverseRequest
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.tests.socket_api.http.answers import asked_for, chats, named_events_of, result
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


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


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_signature_that_comes_back_names_its_answer(server: HttpThread, display: str) -> None:
    chats(server, thinks_and_calls)
    asked = {**HELLO, "thinking": {"type": "adaptive", "display": display}}
    told = server.ask("POST", PATH, asked).json
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": told["content"]}]
    server.ask("POST", PATH, {**asked, "messages": [*said, {"role": "user", "content": "b"}]})
    *_, given = asked_for(server, "converse")
    assert given["messages"][1]["answer_id"] == told["id"].removeprefix("msg_")


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
