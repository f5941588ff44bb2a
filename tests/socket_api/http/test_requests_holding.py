"""What a client holds an answer to reaches the service, in the shapes of both APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torpor.daemon.api.constraints import Constraint, ToolChoice
from torpor.daemon.api.conversing import ConverseRequest, MeasureResult
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.errors import InvalidConstraint
from torpor.socket_api.errors import InvalidRequest
from torpor.socket_api.http.requests import choice_of, constraint_of
from torpor.tests.socket_api.http.answers import measures
from torpor.tests.socket_api.http.http_rig import HttpThread

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OPENAI = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
ANTHROPIC = {**OPENAI, "max_tokens": 9}
FLAT_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA}
RESPONSES = {"model": "fake", "input": "hello"}
MESSAGES_TOOL = {"name": "add", "input_schema": SCHEMA}
HELLO: dict[str, dict[str, Any]] = {"chat/completions": OPENAI, "responses": RESPONSES, "messages": ANTHROPIC}
HELD = Constraint(json_schema=json.dumps(SCHEMA))


def asked_of(server: HttpThread) -> list[ConverseRequest]:
    """The requests that the service gets from now on; it answers each with "hi"."""
    seen: list[ConverseRequest] = []

    async def chat(request: ConverseRequest) -> GenerateResult:
        seen.append(request)
        facts = {"finish_reason": "stop", "token_count": 12, "prefilled_tokens": 3, "seconds": 0.1}
        return GenerateResult(request.session, "hi", (1, 2), time_to_first_token_s=0.1, **facts)  # type: ignore[arg-type]

    server.service.answers[ConverseRequest] = chat
    return seen


@pytest.mark.parametrize(
    ("path", "body", "constraint", "choice"),
    [
        ("chat/completions", {"response_format": {"type": "text"}}, None, None),
        ("chat/completions", {"response_format": {"type": "json_object"}}, Constraint('{"type": "object"}'), None),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            HELD,
            None,
        ),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "auto"}, None, None),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}, None, ToolChoice("none")),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, None, ToolChoice("required")),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            None,
            ToolChoice("required", ("add",)),
        ),
        (
            "chat/completions",
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
            },
            None,
            ToolChoice("required", ("add",)),
        ),
        (
            "chat/completions",
            {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
            None,
            ToolChoice(strict=("add",)),
        ),
        ("chat/completions", {"tools": [TOOL], "parallel_tool_calls": True}, None, None),
        ("chat/completions", {"tools": [TOOL], "parallel_tool_calls": False}, None, ToolChoice(parallel=False)),
        (
            "chat/completions",
            {"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "required"},
            None,
            ToolChoice("required"),
        ),
        ("responses", {"tools": [FLAT_TOOL], "parallel_tool_calls": False}, None, ToolChoice(parallel=False)),
        (
            "responses",
            {"tools": [{**FLAT_TOOL, "strict": True}], "parallel_tool_calls": False},
            None,
            ToolChoice(strict=("add",), parallel=False),
        ),
        (
            "messages",
            {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            None,
            ToolChoice(parallel=False),
        ),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, HELD, None),
        ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, HELD, None),
        ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "auto"}}, None, None),
        ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, None, ToolChoice("required")),
        ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}}, None, ToolChoice("none")),
        (
            "messages",
            {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "add"}},
            None,
            ToolChoice("required", ("add",)),
        ),
    ],
)
def test_it_reaches_the_service(
    server: HttpThread, path: str, body: dict[str, Any], constraint: Constraint | None, choice: ToolChoice | None
) -> None:
    seen = asked_of(server)
    answer = server.ask("POST", f"/v1/{path}", {**HELLO[path], **body})
    assert answer.status == 200, answer.json
    assert [(each.constraint, each.tool_choice) for each in seen] == [(constraint, choice)]
    assert "x-torpor-ignored" not in answer.headers


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_what_the_model_cannot_be_held_to_is_a_fault_of_the_request(server: HttpThread, path: str) -> None:
    async def chat(request: ConverseRequest) -> GenerateResult:
        raise InvalidConstraint("The answer cannot be held to what was asked: it is odd.", reason="it is odd")

    server.service.answers[ConverseRequest] = chat
    answer = server.ask("POST", f"/v1/{path}", ANTHROPIC)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert "it is odd" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    ["some", {}, {"type": 1}, {"type": "function"}, {"type": "tool", "name": ""}, {"type": "allowed_tools"}, 7],
)
def test_a_choice_of_no_known_form_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        choice_of(choice, strict=())


@pytest.mark.parametrize("form", [{"type": "yaml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": 1}, {}])
def test_a_format_of_no_known_form_is_refused(form: Any) -> None:
    with pytest.raises(InvalidRequest, match="format"):
        constraint_of(form, "format")


def test_a_strict_tool_that_cannot_be_held_is_offered_without_and_named(server: HttpThread) -> None:
    seen = asked_of(server)
    measures(server, MeasureResult(10, 0, 8192, "fake", ("add",)))
    strict, other = {**MESSAGES_TOOL, "strict": True}, {**MESSAGES_TOOL, "name": "sub", "strict": True}
    for streamed in (False, True):
        body = {**HELLO["messages"], "tools": [strict, other], "stream": streamed}
        answer = server.ask("POST", "/v1/messages", body)
        assert (answer.status, answer.headers["x-torpor-ignored"]) == (200, "tools.add.strict")
    assert [each.tool_choice for each in seen] == [ToolChoice(strict=("sub",))] * 2
