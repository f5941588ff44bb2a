"""What a service without a model answers to a request, and what a client is told of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from torpor.daemon.api.conversing import ConverseRequest, MeasureRequest, MeasureResult
from torpor.daemon.api.events import TokenEvent, WorkEvent
from torpor.daemon.api.logprobs import Likelihood, TokenLogprobs
from torpor.daemon.api.reading import GenerateResult
from torpor.tests.socket_api.http.http_rig import Answer, HttpThread

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}

Chat = Callable[[ConverseRequest], Awaitable[GenerateResult]]


def result(session: str, text: str = "hi", **more: Any) -> GenerateResult:
    """An answer of two tokens to a dialogue of ten, of which three were read for it."""
    facts = {"finish_reason": "stop", "token_count": 12, "prefilled_tokens": 3, "seconds": 0.1, **more}
    return GenerateResult(session, text, (1, 2), time_to_first_token_s=0.1, **facts)


def chats(server: HttpThread, chat: Chat) -> None:
    """Let the service answer each chat so."""
    server.service.answers[ConverseRequest] = chat


def says(server: HttpThread, *events: WorkEvent, fails: Exception | None = None, **facts: Any) -> None:
    """Let the service answer each chat with these events, and an end with these facts, or a failure."""

    async def chat(request: ConverseRequest) -> GenerateResult:
        for event in events:
            request.emit(event)
        if fails is not None:
            raise fails
        return result(**{"session": request.session, **facts})

    chats(server, chat)


def measures(server: HttpThread, found: MeasureResult | Exception) -> None:
    """Let each dialogue be measured so, or the measuring fail."""

    async def measure(request: MeasureRequest) -> MeasureResult:
        if isinstance(found, Exception):
            raise found
        return found

    server.service.answers[MeasureRequest] = measure


def holds(server: HttpThread, context_tokens: int) -> None:
    """Let each dialogue have 120 tokens, before a context of so many."""

    measures(server, MeasureResult(120, 0, context_tokens, "fake"))


def asked_for(server: HttpThread, verb: str) -> list[dict[str, Any]]:
    return [given for name, given in server.service.calls if name == verb]


def events_of(answer: Answer) -> list[Any]:
    """The data of the events; the last may be [DONE]."""
    parts = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def named_events_of(answer: Answer) -> list[Any]:
    """The data of the events, each of which is named by its type."""
    found = []
    for part in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def likelihoods() -> list[TokenEvent]:
    """Thinking, a text whose second token is held back, a stop string, and its end: each token with what is likely
    there."""

    def told(token: int, text: str, logprob: float) -> TokenLogprobs:
        other = Likelihood(9, "\N{REPLACEMENT CHARACTER}", -0.25, b"\xf0\x9f")
        return TokenLogprobs(token, text, logprob, top=(other,))

    return [
        TokenEvent(1, "so", "reasoning", None, told(1, "so", -1.0)),
        TokenEvent(2, "hé", "text", None, told(2, "hé", -0.5)),
        TokenEvent(3, "", "text", None, told(3, "ll", -1.5)),
        TokenEvent(4, "llo", "text", None, told(4, "o", -2.0)),
        TokenEvent(5, "", "text", None, told(5, "!", -3.0)),
        TokenEvent(6, "", "text", None, told(6, "", -4.0)),
    ]
