"""OpenAI's chat over HTTP, around a service without a model."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from torpor.daemon.api.conversing import ConverseRequest, MeasureRequest, MeasureResult
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import ProgressEvent, SessionEvent, TokenEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.errors import ContextOverflow, EngineBusy, UnknownModel
from torpor.tests.socket_api.http.answers import (
    TOLD,
    asked_for,
    chats,
    events_of,
    holds,
    likelihoods,
    measures,
    result,
    says,
)
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

PATH = "/v1/chat/completions"
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def test_an_answer_has_its_text_its_end_and_tokens_that_add_up(server: HttpThread) -> None:
    says(server)
    answer = server.ask("POST", PATH, HELLO)
    told = answer.json
    assert (answer.status, told["object"], told["model"]) == (200, "chat.completion", "fake")
    (choice,) = told["choices"]
    assert (choice["message"]["role"], choice["message"]["content"], choice["finish_reason"]) == (
        "assistant",
        "hi",
        "stop",
    )
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 2, 12)
    details = usage["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cache_write_tokens"]) == (7, 3)


def test_tokens_that_were_computed_again_are_no_cache_and_are_told_and_counted(server: HttpThread) -> None:
    def counts() -> list[float]:
        lines = dict(line.rsplit(" ", 1) for line in server.ask("GET", "/metrics").body.decode().splitlines())
        kinds = ("cached", "recomputed", "read", "written")
        return [float(lines.get(f'torpor_http_tokens_total{{kind="{kind}",model="fake"}}', 0)) for kind in kinds]

    says(server, recomputed_tokens=5)
    before = counts()
    details = server.ask("POST", PATH, HELLO).json["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 2, "cache_write_tokens": 8, "recomputed_tokens": 5}
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 5, 3, 2]


def test_a_stream_tells_pieces_the_end_and_the_usage_if_it_is_wanted(server: HttpThread) -> None:
    answer = server.ask("POST", PATH, {**HELLO, "stream": True, "max_tokens": 2})
    first, *pieces, last, done = events_of(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    other = server.ask("POST", PATH, {**HELLO, "max_tokens": 2}, x_torpor_session="other")
    assert text == other.json["choices"][0]["message"]["content"]
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert {each["id"] for each in (first, *pieces, last)} == {first["id"]}
    assert "usage" not in last
    wanted = {**HELLO, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    *before, usage, _ = events_of(server.ask("POST", PATH, wanted))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert [each["usage"] for each in before] == [None] * len(before)


@pytest.mark.parametrize("wanted", [True, False])
def test_how_far_the_reading_is_is_told_if_it_is_wanted_as_llama_cpp_does(server: HttpThread, wanted: bool) -> None:
    says(server, *(ProgressEvent("prefill", done, 100) for done in (40, 100)))
    measures(server, MeasureResult(120, 20, 8192, "fake"))
    answer = server.ask("POST", PATH, {**HELLO, "stream": True, "return_progress": wanted})
    assert "x-torpor-ignored" not in answer.headers
    told = [each["prompt_progress"] for each in events_of(answer)[:-1] if "prompt_progress" in each]
    assert all(each.pop("time_ms") >= 0 for each in told)
    expected = [{"total": 120, "cache": 20, "processed": processed} for processed in (60, 120)]
    assert told == (expected if wanted else [])


def test_thinking_and_calls_are_told_apart_in_both_modes(server: HttpThread) -> None:
    call = ToolCall("add", {"a": 1}, "call_1")
    events = (
        TokenEvent(1, "so", "reasoning"),
        TokenEvent(2, "hi"),
        TokenEvent(3, "", "call"),
        TokenEvent(None, "", "call", call),
    )
    says(
        server,
        ProgressEvent("prefill", 1, 1),
        *events,
        reasoning="so",
        tool_calls=(call,),
        finish_reason="tool_calls",
    )
    told = server.ask("POST", PATH, HELLO).json
    message = told["choices"][0]["message"]
    function = {"name": "add", "arguments": '{"a":1}'}
    assert (message["reasoning_content"], message["content"]) == ("so", "hi")
    assert message["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert told["choices"][0]["finish_reason"] == "tool_calls"
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    _, *pieces, last, _ = events_of(server.ask("POST", PATH, {**HELLO, "stream": True}))
    assert [piece["choices"][0]["delta"] for piece in pieces] == [
        {"reasoning_content": "so"},
        {"content": "hi"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
    ]
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "text"), [({"input": "+1"}, "+1"), ({"input": "+1", "at": 2}, '{"input":"+1","at":2}')]
)
def test_a_custom_tool_takes_a_string(server: HttpThread, arguments: dict[str, Any], text: str) -> None:
    call = ToolCall("patch", arguments, "call_1", "custom")
    told = ProgressEvent("prefill", 1, 1), TokenEvent(None, "", "call", call)
    says(server, *told, tool_calls=(call,), finish_reason="tool_calls")
    said = {"id": "call_0", "type": "custom", "custom": {"name": "patch", "input": "+0"}}
    asked = {
        "tools": [{"type": "custom", "custom": {"name": "patch", "description": "Applies a patch."}}],
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        "messages": [
            *HELLO["messages"],
            {"role": "assistant", "tool_calls": [said]},
            {"role": "tool", "tool_call_id": "call_0", "content": "done"},
        ],
    }
    answer = server.ask("POST", PATH, {**HELLO, **asked})
    assert "x-torpor-ignored" not in answer.headers
    made = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": text}}
    assert answer.json["choices"][0]["message"]["tool_calls"] == [made]
    deltas = [
        each["choices"][0]["delta"]
        for each in events_of(server.ask("POST", PATH, {**HELLO, **asked, "stream": True}))[:-1]
    ]
    assert {"tool_calls": [{"index": 0, **made}]} in deltas
    given = asked_for(server, "converse")[0]
    assert given["messages"][1]["tool_calls"] == [{"name": "patch", "arguments": {"input": "+0"}, "id": "call_0"}]
    assert given["tools"][0]["parameters"]["required"] == ["input"]
    assert given["tool_choice"].names == ("patch",)


def test_a_dialogue_is_asked_for_as_the_service_takes_it(server: HttpThread) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": [1.0]}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
        {"type": "web_search"},
    ]
    asked = {
        **HELLO,
        "messages": messages,
        "tools": tools,
        "max_completion_tokens": 7,
        "temperature": 1,
        "top_p": 0.5,
        "seed": -1,
        "stop": "END",
        "chat_template_kwargs": {"enable_thinking": False},
        "store": False,
        "metadata": None,
        "bad\r\nname": 1,
    }
    answer = server.ask("POST", PATH, asked)
    assert answer.status == 200
    assert answer.headers["x-torpor-ignored"] == "store, tools.web_search"
    (given,) = asked_for(server, "converse")
    assert given["messages"] == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "so",
            "tool_calls": [{"name": "add", "arguments": {"b": 2, "a": [1.0]}, "id": "c"}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    )
    assert given["tools"] == ({"name": "add", "description": "", "parameters": {"type": "object"}},)
    assert given["template_arguments"] == {"enable_thinking": False}
    assert given["sampling"] == {"temperature": 1, "top_p": 0.5, "seed": 2**64 - 1}
    assert (given["max_tokens"], given["stop"]) == (7, ("END",))


NO = "I cannot help with that."
LINE = "[audio left out: this model reads text alone]"
OLD_CALL = {"name": "f", "arguments": '{"a": 1}'}
A_CALL = {"name": "f", "arguments": {"a": 1}, "id": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"refusal": NO}, {"content": NO}),
        ({"content": [{"type": "refusal", "refusal": NO}]}, {"content": NO}),
        ({"content": "Well.", "refusal": NO, "audio": None, "function_call": None}, {"content": f"Well.\n{NO}"}),
        ({"refusal": None, "content": "Well."}, {"content": "Well."}),
        ({"audio": {"id": "audio_1"}}, {"content": LINE}),
        ({"audio": {"id": "audio_1", "data": "UklGRg==", "transcript": "Hello."}}, {"content": "Hello."}),
        ({"audio": {"id": "audio_1"}, "content": "Hello."}, {"content": "Hello."}),
        ({"function_call": OLD_CALL}, {"content": "", "tool_calls": [A_CALL]}),
        (
            {"function_call": OLD_CALL, "tool_calls": [{"id": "c", "type": "function", "function": OLD_CALL}]},
            {"content": "", "tool_calls": [{**A_CALL, "id": "c"}]},
        ),
        (
            {"function_call": {"name": "f", "arguments": ""}},
            {"content": "", "tool_calls": [{**A_CALL, "arguments": {}}]},
        ),
    ],
)
def test_an_answer_is_read_in_each_form_that_it_has_had(
    server: HttpThread, given: dict[str, Any], read: dict[str, Any]
) -> None:
    answer = {"role": "assistant", "content": None, **given}
    result = {"role": "function", "name": "f", "content": "3"}
    told = server.ask("POST", PATH, {**HELLO, "messages": [*HELLO["messages"], answer, result]})
    assert told.status == 200
    assert told.headers.get("x-torpor-ignored") == ("content.audio" if read["content"] == LINE else None)
    *_, asked = asked_for(server, "converse")
    _, found, behind = asked["messages"]
    assert found == {"role": "assistant", **read}
    assert behind == {"role": "tool", "content": "3"}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_tells_the_seed_that_draws_it_again(server: HttpThread, streamed: bool) -> None:
    says(server, seed=7)
    told = server.ask("POST", PATH, {**HELLO, "stream": streamed})
    assert told.body.count(b'"seed":7') == 1


@pytest.mark.parametrize(
    ("named", "session"),
    [
        ({}, "chat"),
        ({"x_torpor_session": "mine", "x_session_id": "theirs"}, "mine"),
        ({"x_torpor_session": "team/mine"}, "team/mine"),
        ({"x_session_id": "ses_12ab"}, "ses_12ab"),
        ({"session_id": "3f0c-77"}, "3f0c-77"),
        ({"x_claude_code_session_id": "a-b", "x_claude_code_agent_id": "c"}, "a-b-c"),
        ({"authorization": "Bearer of-a-key"}, "chat"),
    ],
)
def test_a_conversation_begins_under_the_name_that_its_client_gives_it(
    server: HttpThread, named: dict[str, str], session: str
) -> None:
    """One that nobody named has a label, to be found and cleared by."""
    assert server.ask("POST", PATH, HELLO, **named).status == 200
    (given,) = asked_for(server, "converse")
    assert (given["session"], given.get("labels")) == (session, ("http",) if session == "chat" else None)


def test_the_header_of_an_older_codex_has_an_underscore(server: HttpThread) -> None:
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps(HELLO), {"session_id": "0199-ab"})
    assert connection.getresponse().status == 200
    connection.close()
    (given,) = asked_for(server, "converse")
    assert given["session"] == "0199-ab"


def test_ids_that_are_no_names_become_different_ones(server: HttpThread) -> None:
    """QX10."""
    long = "x" * 200
    for each in ("a/b", "a b", "--", "é", long + "1", long + "2"):
        answer = server.ask("POST", PATH, {**HELLO, "prompt_cache_key": each})
        assert answer.status == 200
    names = [given["session"] for given in asked_for(server, "converse")]
    assert len(set(names)) == 6


def test_an_unknown_model_is_a_404_and_no_model_is_the_default(server: HttpThread) -> None:
    assert server.ask("POST", PATH, {"messages": HELLO["messages"]}).json["model"] == "fake"
    measures(server, UnknownModel("No such model.", model="fake"))
    unknown = server.ask("POST", PATH, HELLO)
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_the_ceiling_of_an_answer_may_be_above_what_fits(server: HttpThread) -> None:
    holds(server, 200)
    for asked in (32_000, 3):
        assert server.ask("POST", PATH, {**HELLO, "max_tokens": asked}).status == 200
    assert [given["max_tokens"] for given in asked_for(server, "converse")] == [32_000, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_the_header_names_the_session_that_answers_and_not_the_name_that_was_wanted(
    server: HttpThread, stream: bool
) -> None:
    async def chat(request: ConverseRequest) -> GenerateResult:
        fork = f"{request.session}-0123abcd"
        request.emit(SessionEvent(fork))
        request.emit(TokenEvent(1, "hi"))
        return result(fork)

    chats(server, chat)
    answer = server.ask("POST", PATH, {**HELLO, "stream": stream}, x_torpor_session="mine")
    assert answer.headers["x-torpor-session"] == "mine-0123abcd"


def test_a_stream_whose_session_is_not_chosen_yet_begins_by_the_clock_and_names_none(begin: Begin) -> None:
    """A name that was only wanted would be another conversation's."""
    server = begin(first_event_s=0.01, silence_s=0.1)
    is_waiting = asyncio.Event()

    async def chat(request: ConverseRequest) -> GenerateResult:
        await is_waiting.wait()
        request.emit(SessionEvent(request.session))
        return result(request.session)

    chats(server, chat)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True}))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("x-torpor-session") is None
    server.do(is_waiting.set)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_wake_begins_no_stream_for_the_turn_may_still_not_fit(server: HttpThread) -> None:
    overflow = ContextOverflow("No.", token_count=50, wanted_tokens=70, context_tokens=100)
    says(server, ProgressEvent("wake", 1, 1), fails=overflow)
    assert server.ask("POST", PATH, {**HELLO, "stream": True}).status == 400


def test_a_stream_begins_once_its_request_fits_before_anything_is_read(begin: Begin) -> None:
    server = begin(first_event_s=0.01, silence_s=1000)
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True, "max_tokens": 1}))
    answer = connection.getresponse()
    assert json.loads(answer.readline()[6:])["choices"][0]["delta"]["role"] == "assistant"
    server.do(server.service.release)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_stream_whose_request_is_not_measured_yet_may_still_be_refused(begin: Begin) -> None:
    server = begin(first_event_s=0.01, silence_s=1000)

    async def measure(_request: MeasureRequest) -> MeasureResult:
        await asyncio.sleep(0.1)
        raise EngineBusy("Too many wait.")

    server.service.answers[MeasureRequest] = measure
    refused = server.ask("POST", PATH, {**HELLO, "stream": True})
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")


def held_stream(server: HttpThread) -> Any:
    """A stream that has begun, and whose next token does not come. Gives its connection and the answer."""
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True, "max_tokens": 1_000_000}))
    answer = connection.getresponse()
    assert b"assistant" in answer.readline()
    server.do(server.service.hold)
    return connection, answer


def test_a_client_that_leaves_in_the_middle_cancels_its_answer(server: HttpThread) -> None:
    """Threat 45, QX16."""
    connection, answer = held_stream(server)
    assert server.service.running == 1
    answer.close()
    connection.close()
    server.wait_until(lambda: server.service.running == 0)
    assert server.service.cancelled == 1
    assert server.server.works == 0


def test_a_client_that_leaves_before_the_answer_cancels_it(server: HttpThread) -> None:
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps(HELLO))
    server.wait_until(lambda: server.service.running == 1)
    connection.close()
    server.wait_until(lambda: server.server.works == 0)
    assert server.service.cancelled == 1


def test_a_stop_ends_a_stream_with_an_error_event(begin: Begin) -> None:
    server = begin()
    connection, answer = held_stream(server)
    server.do(server.server.quiesce)
    last = answer.read().decode().rstrip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "shutting_down"
    connection.close()


@pytest.mark.parametrize("limits", [{"stall_timeout_s": 0.05}, {"max_waiting_event_bytes": 1}])
def test_a_client_that_does_not_read_is_dropped_and_its_answer_cancelled_threat_44(
    begin: Begin, limits: dict[str, Any]
) -> None:
    """Threat 44."""
    server = begin(**limits)
    server.service.piece = "x" * 100_000
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with client:
        client.connect(str(server.socket_path))
        body = json.dumps({**HELLO, "stream": True, "max_tokens": 1_000_000}).encode()
        client.sendall(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(body)) + body)
        server.wait_until(lambda: server.service.cancelled == 1)
        server.wait_until(lambda: server.server.works == 0)


@pytest.mark.parametrize(
    ("wanted", "given"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3), ({"logprobs": False}, None)],
)
def test_the_logprobs_of_the_text_are_told_where_they_are_wanted(
    server: HttpThread, wanted: dict[str, Any], given: int | None
) -> None:
    says(server, *likelihoods())
    answer = server.ask("POST", PATH, {**HELLO, **wanted})
    assert "x-torpor-ignored" not in answer.headers
    told = answer.json["choices"][0]["logprobs"]
    assert told == (None if given is None else {"content": TOLD, "refusal": None})
    assert [each.get("logprobs") for each in asked_for(server, "converse")] == [given]
    *chunks, _ = events_of(server.ask("POST", PATH, {**HELLO, **wanted, "stream": True}))
    pieces = [each["choices"][0]["logprobs"] for each in chunks]
    if given is None:
        assert pieces == [None] * len(chunks)
    else:
        assert [each["content"] for each in pieces if each] == [TOLD[:1], TOLD[1:]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("wrong", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": 2}])
def test_wrong_logprobs_are_a_400_that_names_them(server: HttpThread, wrong: dict[str, Any]) -> None:
    answer = server.ask("POST", PATH, {**HELLO, **wrong})
    assert (answer.status, answer.json["error"]["param"]) == (400, list(wrong)[-1])
    assert not asked_for(server, "converse")
