"""OpenAI's responses over HTTP, around a service without a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from torpor.daemon.api.conversing import ConverseRequest
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.api.recalling import RecalledMessage, RecalledPiece, RecallRequest, RecallResult
from torpor.daemon.errors import AnswerNotFound
from torpor.socket_api.http.connections import MAX_BODY_BYTES
from torpor.tests.socket_api.http.answers import (
    ADD,
    asked_for,
    chats,
    named_events_of,
    result,
    says,
)
from torpor.tests.socket_api.http.http_rig import HttpThread

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "fake", "input": "hello"}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch."}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{**ADD, "name": "spawn"}, PATCH]}


async def thinks_and_calls(request: ConverseRequest) -> GenerateResult:
    calls = (
        ToolCall("add", {"a": 1}, "c1"),
        ToolCall("patch", {"input": "+1"}, "c2", "custom:"),
        ToolCall("agents__spawn", {}, "c3", "function:agents"),
    )
    request.emit(ProgressEvent("prefill", 1, 1))
    request.emit(TokenEvent(1, "so", "reasoning"))
    request.emit(TokenEvent(2, " it", "reasoning"))
    request.emit(TokenEvent(3, "hi"))
    for call in calls:
        request.emit(TokenEvent(4, "", "call"))
        request.emit(TokenEvent(None, "", "call", call))
    return result(request.session, reasoning="so it", tool_calls=calls, finish_reason="tool_calls")


def test_a_stream_tells_each_item_from_its_beginning_to_its_end_in_numbered_events(server: HttpThread) -> None:
    chats(server, thinks_and_calls)
    asked = {**HELLO, "tools": [ADD, PATCH, AGENTS]}
    events = named_events_of(server.ask("POST", PATH, {**asked, "stream": True}))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    function = ["function_call_arguments.delta", "function_call_arguments.done"]
    custom = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta", "reasoning_summary_text.done"),
        *("reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", *function, "output_item.done"),
        *("output_item.added", *custom, "output_item.done"),
        *("output_item.added", *function, "output_item.done"),
        "completed",
    ]
    about_items = [each for each in events if "output_index" in each]
    assert [at for at, _ in groupby(about_items, key=lambda each: each["output_index"])] == list(range(5))
    for at in range(5):
        own = [each for each in about_items if each["output_index"] == at]
        assert {each.get("item_id") or each["item"]["id"] for each in own} == {own[0]["item"]["id"]}
        assert (own[0]["item"]["status"], own[-1]["item"]["status"]) == ("in_progress", "completed")
    whole = server.ask("POST", PATH, asked).json
    last = events[-1]["response"]
    assert [each["item"] for each in events if each["type"] == "response.output_item.done"] == last["output"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["usage"] == whole["usage"]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name not in ("id", "encrypted_content")} for each in items]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_each_item_that_comes_back_names_its_answer(server: HttpThread, kept: int) -> None:
    """In its `encrypted_content`, also without an id, as Codex sends it; or in its id."""
    chats(server, thinks_and_calls)
    told = server.ask("POST", PATH, {**HELLO, "tools": [ADD], "store": False}).json
    item = told["output"][kept]
    back = [{name: value for name, value in item.items() if name != "id"} if kept == 0 else item]
    server.ask(
        "POST", PATH, {"input": [{"role": "user", "content": "hello"}, *back, {"role": "user", "content": "on"}]}
    )
    *_, given = asked_for(server, "converse")
    assert given["messages"][1]["answer_id"] == asked_for(server, "converse")[0]["answer_id"]
    assert "after" not in given


@pytest.mark.one_in(1)
def test_what_is_long_is_not_repeated_with_each_event(server: HttpThread) -> None:
    long = "a" * 300_000
    for given in ({"text": {"more": long}}, {"tool_choice": {"type": "auto", "more": [[1] * 200_000]}}):
        told = server.ask("POST", PATH, {**HELLO, **given}).json
        assert (told["text"]["format"], told["tool_choice"]) == ({"type": "text"}, "auto")
    for pairs in ({"a": long}, {"k" * 65: "a"}):
        assert server.ask("POST", PATH, {**HELLO, "metadata": pairs}).status == 400


ONE = "0" * 31 + "1"
UNSTORED = "f" * 32


async def recalls(request: RecallRequest) -> RecallResult:
    """An answer behind a message and the result of a call."""
    assert (request.answer_id, request.namespace) == (ONE, None)
    call = ToolCall("add", {"a": 1}, "c2")
    messages = (
        RecalledMessage("user", "hello", start=0, end=9),
        RecalledMessage("tool", "3", tool_call_id="c1", start=0, end=9, number=1),
        RecalledMessage("tool", "done", tool_call_id="c0", told_as="custom:agents", start=0, end=9, number=2),
        RecalledMessage(
            *("assistant", "hi"),
            reasoning="so",
            tool_calls=(call,),
            answer_id=ONE,
            start=9,
            end=12,
            pieces=(RecalledPiece("reasoning", "so"), RecalledPiece("text", "hi"), RecalledPiece("call", "", call)),
        ),
    )
    return RecallResult("torpor://default/a", "fake", messages, "e" * 32)


def test_an_answer_that_names_itself_as_the_one_before_ends_what_is_told(server: HttpThread) -> None:
    """A text map of no daemon may have one id twice."""

    async def circles(request: RecallRequest) -> RecallResult:
        return replace(await recalls(replace(request, answer_id=ONE)), after=UNSTORED)

    server.service.answers[RecallRequest] = circles
    assert server.ask("GET", f"{PATH}/resp_{ONE}").json["previous_response_id"] is None
    assert len(server.ask("GET", f"{PATH}/resp_{ONE}/input_items").json["data"]) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        ToolCall("add", {"a": 1}, "c2"),
        ToolCall("patch", {"input": "+1"}, "c2", "custom:"),
        ToolCall("agents__patch", {"input": "+1"}, "c2", "custom:agents"),
        ToolCall("agents__spawn", {"a": 1}, "c2", "function:agents"),
    ],
    ids=["function", "custom", "custom of a namespace", "function of a namespace"],
)
def test_the_items_of_an_answer_are_the_same_whole_streamed_and_retrieved(
    server: HttpThread, call: ToolCall, stream: bool
) -> None:
    """Also of a text behind a call."""
    pieces = (("reasoning", "so "), ("reasoning", "so"), ("text", "a"), ("call", ""), ("text", "b"), ("text", "c"))
    events = [TokenEvent(1, text, channel, call if channel == "call" else None) for channel, text in pieces]  # type: ignore[arg-type]
    says(server, *events, text="abc", reasoning="so so", tool_calls=(call,))
    answer = server.ask("POST", PATH, {**HELLO, "stream": stream})
    told = named_events_of(answer)[-1]["response"] if stream else answer.json
    answer_id = told["id"].removeprefix("resp_")

    async def recalls_it(request: RecallRequest) -> RecallResult:
        joined = (
            RecalledPiece("reasoning", "so so"),
            RecalledPiece("text", "a"),
            RecalledPiece("call", "", call),
            RecalledPiece("text", "bc"),
        )
        facts: Any = {"reasoning": "so so", "tool_calls": (call,), "answer_id": answer_id, "pieces": joined}
        return RecallResult("a", "fake", (RecalledMessage("assistant", "abc", start=1, end=7, **facts),))

    server.service.answers[RecallRequest] = recalls_it
    called = "custom_tool_call" if call.told_as.startswith("custom") else "function_call"
    assert [each["type"] for each in told["output"]] == ["reasoning", "message", called, "message"]
    assert server.ask("GET", f"{PATH}/resp_{answer_id}").json["output"] == told["output"]


USER: dict[str, Any] = {"role": "user", "content": "a"}


def reference(item: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": f"{item[:3].strip('_')}_{ONE}_{item[-1]}"}


def test_a_reference_may_name_an_item_of_a_conversation(server: HttpThread) -> None:
    """By the id under which the conversation tells it, which is made of the conversation's own."""

    async def recalls_conversation(request: RecallRequest) -> RecallResult:
        if request.answer_id is not None:
            raise AnswerNotFound("No.", answer_id=request.answer_id)
        assert (request.session or "").endswith(f"conv_{ONE}")
        said = RecalledMessage("assistant", "hm", reasoning="so", start=0, end=9, number=7)
        return RecallResult(request.session, "fake", (said,))

    server.service.answers[RecallRequest] = recalls_conversation
    items = [{"type": "item_reference", "id": f"in_{ONE}_{at}"} for at in ("7", "7_1")]
    assert server.ask("POST", PATH, {"input": [*items, USER]}).status == 200
    answer = asked_for(server, "converse")[0]["messages"][0]
    assert (answer["reasoning"], answer["content"]) == ("so", "hm")
    for wrong in (f"in_{ONE}_8", f"in_{ONE}_7_2", f"msg_{ONE}_7"):
        assert server.ask("POST", PATH, {"input": [{"type": "item_reference", "id": wrong}, USER]}).status == 400


def test_what_references_name_takes_no_more_than_a_body_may(server: HttpThread) -> None:
    async def recalls_much(request: RecallRequest) -> RecallResult:
        told = await recalls(request)
        text = "x" * (MAX_BODY_BYTES // 4)
        return replace(
            told, messages=(replace(told.messages[-1], content=text, pieces=(RecalledPiece("text", text),)),)
        )

    server.service.answers[RecallRequest] = recalls_much
    for times, status in ((3, 200), (4, 413)):
        answer = server.ask("POST", f"{PATH}/input_tokens", {"input": [reference("msg_0"), USER] * times})
        assert answer.status == status


def test_all_routes_are_described(server: HttpThread) -> None:
    paths = server.ask("GET", "/openapi.json").json["paths"]
    described = {(method, path) for path, methods in paths.items() for method in methods if path.startswith(PATH)}
    assert described == {
        ("post", PATH),
        ("post", f"{PATH}/input_tokens"),
        ("get", f"{PATH}/{{response_id}}"),
        ("delete", f"{PATH}/{{response_id}}"),
        ("get", f"{PATH}/{{response_id}}/input_items"),
    }
