"""OpenAI's older API, which continues a text, around a service without a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx2
from torpor.daemon.api.reading import GenerateRequest, GenerateResult
from torpor.daemon.errors import ContextOverflow
from torpor.tests.socket_api.http.answers import asked_for, events_of, likelihoods, result
from torpor.tests.socket_api.http.http_rig import HttpThread

if TYPE_CHECKING:
    from torpor.tests.socket_api.http.serving import Served

PATH = "/v1/completions"


def test_a_text_that_is_continued_at_random_has_a_seed_of_its_own(server: HttpThread) -> None:
    for more in ({}, {}, {"seed": 5}, {"temperature": 0}):
        server.ask("POST", PATH, {"prompt": "one", "max_tokens": 1, "temperature": 1, **more})
    first, second, named, greedy = [each["sampling"] for each in asked_for(server, "generate")]
    assert first["temperature"] == second["temperature"] == 1
    assert first["seed"] != second["seed"]
    assert (named["seed"], greedy) == (5, {"temperature": 0})
    server.ask("POST", PATH, {"prompt": "one", "max_tokens": 1, "temperature": 1}, x_torpor_session="mine")
    assert asked_for(server, "generate")[-1]["sampling"] == {"temperature": 1}, "it draws by its session's"


def test_a_refused_request_leaves_no_session_that_nobody_named(served: Served) -> None:
    with httpx2.Client(base_url=served.url, headers={"x-api-key": served.token}, timeout=60) as client:

        def left() -> set[str]:
            return {each["session"] for each in client.get("/v1/sessions").json()["sessions"]}

        before, long = left(), "word " * 9000
        for path, body, named in (
            (PATH, {"prompt": long}, {}),
            (PATH, {"prompt": [4097]}, {}),
            (PATH, {"prompt": [5] * 8192}, {}),
            (PATH, {"prompt": "a", "model": "nobody"}, {}),
            (PATH, {"prompt": [4097]}, {"x-torpor-session": "refused-prompt"}),
            ("/v1/conversations", {"items": [{"role": "user", "content": long}]}, {}),
        ):
            assert client.post(path, json=body, headers=named).status_code in (400, 404)
            assert left() == before, (path, str(body)[:40])


def test_a_client_that_leaves_leaves_no_session_that_nobody_named(server: HttpThread) -> None:
    for left, named in enumerate(({}, {"x-torpor-session": "mine"})):
        server.renew()
        server.do(server.service.hold)
        connection = server.on_unix()
        connection.request("POST", PATH, json.dumps({"prompt": "a b", "max_tokens": 2}), named)
        server.wait_until(lambda: bool(server.service.sessions))
        connection.close()
        server.wait_until(lambda: server.service.cancelled > 0)
        server.do(server.service.release)
        server.wait_until(lambda: server.server.works == 0)
        assert len(server.service.sessions) == left


def test_the_ceiling_may_be_above_what_fits(server: HttpThread) -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        assert request.max_tokens is not None
        if request.max_tokens > 92:
            wanted = 3 + request.max_tokens
            raise ContextOverflow("No.", token_count=5, wanted_tokens=wanted, context_tokens=100)
        return result(request.session)

    server.service.answers[GenerateRequest] = generate
    assert server.ask("POST", PATH, {"prompt": "a", "max_tokens": 32_000}).status == 200
    assert [given["max_tokens"] for given in asked_for(server, "generate")] == [32_000, 92]


def test_logprobs_are_lists_and_the_drawn_token_is_always_among_the_likeliest(server: HttpThread) -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        for event in likelihoods()[1:]:
            request.emit(event)
        return result(request.session, "héllo")

    server.service.answers[GenerateRequest] = generate
    asked = {"prompt": "a", "logprobs": 1}
    told = server.ask("POST", PATH, asked).json["choices"][0]["logprobs"]
    texts, logprobs = ["hé", "ll", "o"], [-0.5, -1.5, -2.0]
    assert told == {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [
            {text: logprob, r"bytes:\xf0\x9f": -0.25} for text, logprob in zip(texts, logprobs, strict=True)
        ],
        "text_offset": [0, 2, 4],
    }
    *pieces, _ = events_of(server.ask("POST", PATH, {**asked, "stream": True}))
    parts = [each["choices"][0]["logprobs"] for each in pieces]
    assert {name: [one for each in parts for one in each[name]] for name in told} == told
    assert [given["logprobs"] for given in asked_for(server, "generate")] == [1, 1]
    assert server.ask("POST", PATH, {"prompt": "a"}).json["choices"][0]["logprobs"] is None
    assert server.ask("POST", PATH, {"prompt": "a", "logprobs": 21}).json["error"]["param"] == "logprobs"
