"""Sessions over HTTP: names in paths, and errors with the status of their code. That each row asks its verb is in
`tests/socket_api/fronts`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.tasks.pieces import NAMES_AT_ONCE, in_pieces
from torpor.socket_api.http import sessions
from torpor.socket_api.http.sessions import ROUTES
from torpor.socket_api.wire.common_store import without_others
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread


def test_a_name_in_a_path_may_have_an_encoded_slash(server: HttpThread) -> None:
    assert server.ask("POST", "/v1/sessions", {"session": "team/a"}).status == 200
    assert server.ask("GET", "/v1/sessions/team%2Fa").status == 200
    assert server.ask("GET", "/v1/sessions/team/a").status == 404
    assert server.ask("GET", "/v1/sessions/%00%ff").status == 404


def test_a_model_in_a_path_may_have_a_slash_and_any_other_character(server: HttpThread) -> None:
    """An SDK encodes what a listed name has in it."""
    names = ("org/Tiny", "org%2FTiny", "org%2FTiny%3A4b%20%C3%A9")
    server.service.also("status", aliases=(("org/Tiny", "fake"), ("org/Tiny:4b é", "fake")))
    for each in names:
        assert server.ask("GET", f"/v1/models/{each}").json["id"] == "fake", each
    refused = server.ask("GET", "/v1/models/org%2FOther").json["error"]["message"]
    assert "'org/Other'" in refused


@pytest.mark.parametrize("bound_to", [None, "team"])
@pytest.mark.parametrize("count", [0, 1, NAMES_AT_ONCE, 2 * NAMES_AT_ONCE + 1])
def test_a_long_list_is_written_in_pieces_and_is_what_it_would_be_at_once(bound_to: str | None, count: int) -> None:
    listed = [
        {"session": f"torpor://{'team' if number % 2 else 'other'}/a", "written_bytes": number, "note": "ä\u2028"}
        for number in range(count)
    ]
    values: dict[str, Any] = {"problems": listed, "sessions": tuple(listed), "é": 1.5, "none": None, "of": {"a": True}}
    told = json.loads(asyncio.run(in_pieces(sessions._json_of(values, bound_to))))
    whole = values if bound_to is None else without_others(values, bound_to)
    assert told == json.loads(json.dumps(whole))
    assert list(told) == list(whole)
    others = {"session": "torpor://other/a", "sessions": listed}
    assert json.loads(asyncio.run(in_pieces(sessions._json_of(others, "team")))) is None


def test_an_error_has_the_status_of_its_code(server: HttpThread) -> None:
    server.ask("POST", "/v1/sessions", {"session": "a"})
    again = server.ask("POST", "/v1/sessions", {"session": "a"})
    told = again.json["error"]
    assert (again.status, told["type"], told["code"]) == (409, "conflict_error", "session_exists")
    assert server.ask("GET", "/nowhere").json["error"]["code"] == "not_found"
    assert server.ask("PUT", "/v1/sessions/a").json["error"]["code"] == "method_not_allowed"


def test_a_fault_of_the_daemon_is_a_500_and_the_server_goes_on(server: HttpThread) -> None:
    server.service.answers.clear()
    answer = server.ask("GET", "/v1/sessions")
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
    assert server.ask("GET", "/healthz").status == 200


def test_each_answer_has_the_name_of_its_request(server: HttpThread) -> None:
    names = {server.ask("GET", path).headers["x-request-id"] for path in ("/healthz", "/nowhere", "/v1/sessions")}
    assert len(names) == 3


def test_the_models_are_told_in_both_shapes_with_their_context(server: HttpThread) -> None:
    (openai,) = server.ask("GET", "/v1/models").json["data"]
    assert (openai["id"], openai["object"], openai["context_length"]) == ("fake", "model", 8192)
    (anthropic,) = server.ask("GET", "/v1/models", anthropic_version="2023-06-01").json["data"]
    assert (anthropic["id"], anthropic["type"], anthropic["max_input_tokens"]) == ("fake", "model", 8192)
    assert server.ask("GET", "/v1/models/fake").json == openai
    assert server.ask("GET", "/v1/models/other").status == 404


def test_an_alias_is_told_with_its_model_and_answers_as_that(server: HttpThread) -> None:
    server.service.also("status", aliases=(("claude-*", "fake"),))
    (told,) = server.ask("GET", "/v1/models").json["data"]
    assert told["aliases"] == ["claude-*"]
    assert server.ask("GET", "/v1/models/claude-x").json == told
    prompt = {"prompt": "one", "max_tokens": 1}
    assert server.ask("POST", "/v1/completions", prompt, x_torpor_session="a").status == 200
    again = server.ask("POST", "/v1/completions", {**prompt, "model": "claude-x"}, x_torpor_session="a")
    assert (again.status, again.json["model"]) == (200, "fake")


def test_the_metrics_are_the_numbers_of_status_and_the_counts_of_answers(begin: Begin) -> None:
    server = begin()
    server.ask("GET", "/v1/models")
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    assert "torpor_queue_limit 512.0" in lines
    assert "# HELP torpor_queue_limit Requests that may wait before others are refused." in lines
    assert "A figure of the verb" not in "".join(lines)
    assert 'torpor_model_context_tokens{model="fake"} 8192.0' in lines
    assert 'torpor_http_requests_total{route="/v1/models",status="200"} 1.0' in lines


def test_the_description_has_every_route_with_the_fields_of_its_verb(server: HttpThread) -> None:
    document = server.ask("GET", "/openapi.json").json
    for each in ROUTES:
        assert each.method.lower() in document["paths"][each.path]
    wake = document["paths"]["/v1/sessions/{session}/wake"]["post"]
    taken = wake["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert taken.keys() == {"version", "at_token", "strict", "fork"}
    assert {each.verb.name for each in ROUTES} <= VERBS.keys()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"]
