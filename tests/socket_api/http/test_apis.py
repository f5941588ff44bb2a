"""What the APIs do alike, each in its own words, around a service without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.errors import ContextOverflow, EngineBusy, GenerationFailed
from torpor.socket_api.http.app import DIALECTS
from torpor.socket_api.http.routing import Posted, Sending
from torpor.tests.socket_api.http.answers import ADD, asked_for, events_of, holds, measures, named_events_of, says
from torpor.tests.socket_api.http.http_rig import Answer, Begin, HttpThread


@dataclass(frozen=True)
class Api:
    """An API: its path, a request that it takes, how its events are read, and its words."""

    path: str
    hello: dict[str, Any]
    events_of: Callable[[Answer], list[Any]]
    overflow: str
    silences: list[str]
    last: bytes

    def failed(self, event: dict[str, Any]) -> tuple[str, str]:
        """The kind of the last event, and what it says of a failure."""
        return event["type"], event["error"]["type"]


class Chat(Api):
    def failed(self, event: dict[str, Any]) -> tuple[str, str]:
        return "", event["error"]["code"]


class Responses(Api):
    def failed(self, event: dict[str, Any]) -> tuple[str, str]:
        assert event["response"]["status"] == "failed"
        return event["type"], event["response"]["error"]["code"]


SAID = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
OPENAIS = "This model's maximum context length is 120 tokens. However, your messages have 120 tokens"
CHAT = Chat("/v1/chat/completions", SAID, events_of, OPENAIS, ["data: "] * 4, b"data: [DONE]\n\n")
RESPONSES = Responses(
    "/v1/responses",
    {"model": "fake", "input": "hello"},
    named_events_of,
    OPENAIS,
    ["event: response.created\n", *["event: response.in_progress\n"] * 3],
    b"event: response.incomplete",
)
MESSAGES = Api(
    "/v1/messages",
    {**SAID, "max_tokens": 9},
    named_events_of,
    "prompt is too long: 120 tokens > 120 maximum",
    ["event: message_start\n", *["event: ping\n"] * 3],
    b"message_stop",
)
APIS = (CHAT, RESPONSES, MESSAGES)
"""Those that take a whole dialogue."""

HELLO: dict[str, dict[str, Any]] = {
    **{each.path: each.hello for each in APIS},
    "/v1/completions": {"model": "fake", "prompt": "hello"},
    "/v1/conversations": {"items": [{"role": "user", "content": "hello"}]},
}
"""A request for each of them: the first path of its module, and a body that it takes."""

each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
each_way = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_each_answers_and_refuses_what_is_no_json(server: HttpThread, dialect: ModuleType) -> None:
    first = dialect.routes()[0]
    assert isinstance(first, Posted)
    assert first.path in HELLO, "give it a request in HELLO; and an Api of its own, if it takes a dialogue"
    assert server.ask("POST", first.path, HELLO[first.path]).status == 200
    if isinstance(first.endpoint, Sending):
        answer = server.ask("POST", first.path, {**HELLO[first.path], "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body.endswith(b"\n\n")
    refusal = server.ask("POST", first.path, b"{")
    assert (refusal.status, refusal.json["error"]["type"]) == (400, "invalid_request_error")


@each_api
@each_way
def test_overflow_is_a_400_that_clients_shorten_their_history_at(server: HttpThread, api: Api, stream: bool) -> None:
    """QC6, QX17: in both modes, before any part of an answer, and nothing is asked of the model."""
    holds(server, 120)
    for asked in (api.hello, {**api.hello, "max_tokens": 32_000}):
        answer = server.ask("POST", api.path, {**asked, "stream": stream})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(api.overflow)
        assert answer.json["error"].get("code") == (None if api is MESSAGES else "context_length_exceeded")
    assert not asked_for(server, "converse")


@each_api
@each_way
@pytest.mark.parametrize("asked", ["measure", "converse"])
def test_an_error_before_the_answer_has_its_own_status(server: HttpThread, api: Api, stream: bool, asked: str) -> None:
    """QX18: busy is 429, and says when to ask again."""
    busy = EngineBusy("Too many wait.")
    if asked == "measure":
        measures(server, busy)
    else:
        says(server, fails=busy)
    answer = server.ask("POST", api.path, {**api.hello, "stream": stream})
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert answer.json["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("api", "failure", "told"),
    [
        (CHAT, GenerationFailed("The model broke."), ("", "generation_failed")),
        (CHAT, RuntimeError("secret"), ("", "internal_error")),
        (RESPONSES, GenerationFailed("The model broke."), ("response.failed", "generation_failed")),
        (
            RESPONSES,
            ContextOverflow("No.", token_count=50, wanted_tokens=70, context_tokens=100),
            ("response.failed", "context_length_exceeded"),
        ),
        (RESPONSES, EngineBusy("Too many wait."), ("response.failed", "engine_busy")),
        (MESSAGES, GenerationFailed("The model broke."), ("error", "api_error")),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_an_event_and_no_end(
    server: HttpThread, api: Api, failure: Exception, told: tuple[str, str]
) -> None:
    """QC13."""
    says(server, TokenEvent(1, "hi"), fails=failure)
    answer = server.ask("POST", api.path, {**api.hello, "stream": True})
    *before, error = api.events_of(answer)
    assert "hi" in json.dumps(before[-1])
    assert api.failed(error) == told
    assert b"secret" not in answer.body


@each_api
def test_an_event_has_no_end_of_a_line_but_its_own(server: HttpThread, api: Api) -> None:
    """Many clients end a line at these, too; so does `str.splitlines`."""
    said = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1ee\r\n\u2028"
    says(server, TokenEvent(1, said), text=said)
    answer = server.ask("POST", api.path, {**api.hello, "stream": True})
    assert answer.body.decode().splitlines() == answer.body.decode().split("\n")[:-1]
    assert any(json.dumps(said)[1:-1] in json.dumps(each) for each in api.events_of(answer))


@each_api
def test_a_silent_stream_begins_and_goes_on_by_the_clock(begin: Begin, api: Api) -> None:
    server = begin(silence_s=0.01)
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", api.path, json.dumps({**api.hello, "stream": True, "max_tokens": 1}))
    answer = connection.getresponse()
    step = 2 if api is CHAT else 3
    lines = [answer.readline().decode() for _ in range(4 * step)][::step]
    assert [line.partition("{")[0] for line in lines] == api.silences
    if api is CHAT:
        assert [json.loads(line[6:])["choices"][0]["delta"] for line in lines[1:]] == [{}] * 3
    server.do(server.service.release)
    assert api.last in answer.read()
    connection.close()


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        ("/v1/messages/count_tokens", {**SAID, "system": "Be very brief."}, {"input_tokens": 4}),
        (
            "/v1/responses/input_tokens",
            {**RESPONSES.hello, "instructions": "Be very brief."},
            {"object": "response.input_tokens", "input_tokens": 4},
        ),
    ],
)
def test_tokens_are_counted_without_an_answer(
    server: HttpThread, path: str, asked: dict[str, Any], told: dict[str, Any]
) -> None:
    answer = server.ask("POST", path, asked)
    assert (answer.status, answer.json) == (200, told)
    assert not asked_for(server, "converse")


@pytest.mark.parametrize(
    ("api", "wrong", "field"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [3]}]}, "messages.0.content"),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 2**63}, "max_tokens"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 2}, "top_p"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"stop": [""]}, "stop.0"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": 3}}]}, "tools.0.function.name"),
        (RESPONSES, {"input": None}, "input"),
        (CHAT, {"stop": [1]}, "stop.0"),
        (CHAT, {"stop": 1}, "stop"),
        (CHAT, {"top_k": -1}, "top_k"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"frequency_penalty": "1"}, "frequency_penalty"),
        (CHAT, {"logit_bias": [5]}, "logit_bias"),
        (CHAT, {"logit_bias": {"the": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-5": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        (CHAT, {"logit_bias": {"5": True}}, "logit_bias.5"),
        (CHAT, {"logit_bias": {str(2**32): 1}}, "sampling.logit_bias.0.token"),
        (RESPONSES, {"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "strange"}]}, "input"),
        (RESPONSES, {"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        (RESPONSES, {"input": [{"content": "a"}]}, "input.0.role"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content",
        ),
        (RESPONSES, {"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0.name"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"temperature": "hot"}, "temperature"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools.0.name"),
        (RESPONSES, {"tools": [{"name": "a"}]}, "tools.0.type"),
        (RESPONSES, {"tools": [ADD, ADD]}, "params"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "a"}]}]},
            "messages.0.content.0",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"temperature": "hot"}, "temperature"),
        (MESSAGES, {"temperature": -1}, "temperature"),
        (MESSAGES, {"system": [{"type": "image"}]}, "system.0"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences.0"),
        (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it_and_makes_no_session(
    server: HttpThread, api: Api, wrong: dict[str, Any], field: str
) -> None:
    """Threat 48."""
    answer = server.ask("POST", api.path, {**api.hello, **wrong})
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert (error.get("param") or error["message"].partition(": ")[0]) == field
    assert not server.service.calls
