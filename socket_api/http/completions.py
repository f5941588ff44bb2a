"""`/v1/completions`: OpenAI's older API, which continues a text.

With `x-torpor-session` the text goes on behind what that session holds. Without it a new session reads the text, and
takes over what another one has read of the same beginning; it is labeled `completion`, for `torpor clear`, and deleted
if there is no answer. A client renders the template itself, so the names of control tokens in a text are those tokens.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Send

from ...daemon.api.events import OnEvent, TokenEvent
from ...daemon.api.logprobs import TopLogprobs
from ...daemon.api.process import StatusRequest
from ...daemon.api.reading import GenerateRequest, GenerateResult, MaxTokens
from ...daemon.api.sampling import new_seed
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ..server.dispatch import Backend
from .access import Caller
from .answering import Order, answer
from .chat_completions import DONE, Sampled, told_seed, usage_of
from .errors import error_map
from .requests import fault_at, ignored_of, read_fields
from .routing import Posted, Sending
from .telling import Telling, columns_of, event_bytes
from .turns import Answered, Asking, SessionName, name_for, taken_back
from .work import desk_of

PATH: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16
"""As the API has it."""

LABEL: Final = "completion"


class CompletionBody(Sampled):
    """A request to continue a text."""

    prompt: str | list[str | int]
    model: str | None = None
    max_tokens: MaxTokens | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text or tokens to continue: behind what a session holds, if the client names one."""

    prompt: str | Sequence[int]
    model: str | None
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: int | None = None

    def asking(self, backend: Backend, caller: Caller, headers: Mapping[str, str], model: str, emit: OnEvent) -> Asking:
        """The requests that continue it."""
        name = name_for(headers, None)
        name = SessionName(f"{LABEL}-{secrets.token_hex(8)}") if name.unnamed else name
        return _Continuing(backend, caller, self, name, model, emit)


def routes() -> list[Posted]:
    """The one that answers."""
    return [Posted(PATH, Sending(completions), CompletionBody)]


async def completions(request: Request, send: Send) -> None:
    """Answer a request."""
    async with desk_of(request).bodies.made(request, _order) as order:
        await answer(request, send, order)


def _order(raw: Mapping[str, Any]) -> Order:
    body = read_fields(CompletionBody, raw)
    body.require_one()
    beyond = {"best_of": body.best_of not in (None, 1), "echo": body.echo, "suffix": body.suffix}
    for name, is_asked in beyond.items():
        if is_asked:
            raise fault_at(name, "this server does not have it; leave it out")
    continuation = Continuation(
        prompt=_prompt(body.prompt),
        model=body.model,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        sampling=body.sampling(),
        stop=body.stops(),
        logprobs=body.logprobs,
    )
    telling = _Texts(usage=body.wants_usage(), logprobs=body.logprobs is not None)
    return Order(continuation, telling, bool(body.stream), ignored_of(body))


def _prompt(prompt: str | list[str | int]) -> str | Sequence[int]:
    if not prompt:
        raise fault_at("prompt", "it is empty; give a text to continue")
    if isinstance(prompt, str):
        return prompt
    texts = [each for each in prompt if isinstance(each, str)]
    if not texts:
        return [each for each in prompt if isinstance(each, int)]
    if len(prompt) > 1:
        raise fault_at("prompt", "one text at a time is continued")
    return texts[0]


class _Continuing(Asking):
    def __init__(
        self, backend: Backend, caller: Caller, order: Continuation, name: SessionName, model: str, emit: OnEvent
    ) -> None:
        super().__init__(backend, caller, name, model, emit)
        self._order = order

    async def answer(self) -> Answered:
        """Raises as `show` and `generate` of the service."""
        order = self._order
        self.model = await self._own_model()
        text, tokens = (order.prompt, None) if isinstance(order.prompt, str) else (None, tuple(order.prompt))
        own_seed = {"seed": new_seed()} if order.sampling.get("temperature") and self.unnamed else {}
        params = {
            "session": self.session,
            "text": text,
            "raw": True,
            "tokens": tokens,
            "create": True,
            "model": self.model,
            "labels": (LABEL,) if self.unnamed else None,
            "unnamed": self.unnamed,
            "max_tokens": order.max_tokens,
            "sampling": {**own_seed, **order.sampling} or None,
            "stop": tuple(order.stop),
            "logprobs": order.logprobs,
        }
        request = await self.caller.request_of(VERBS["generate"], params)
        assert isinstance(request, GenerateRequest)
        self.session = self.chosen = request.session
        async with taken_back(self.backend, self.caller, self.session) if self.unnamed else nullcontext():
            return Answered(self.model, await self._generate(request))

    async def _own_model(self) -> str:
        """The name of the model: that of a session that is there to be continued, else that of a new one."""
        if self.unnamed:
            return await self._own_name(self.model)
        params = {"session": self.session}
        try:
            shown = await self.backend.ask(VERBS["show"], await self.caller.request_of(VERBS["show"], params))
        except TorporError as error:
            if error.code != "session_not_found":
                raise
            return await self._own_name(self.model)
        model: str = shown.info.model
        if self._order.model is not None and await self._own_name(self._order.model) != model:
            raise fault_at("model", f"{shown.info.session} is on model {model!r}; name that one, or another session")
        return model

    async def _own_name(self, named: str) -> str:
        """The name of a model that is perhaps named by an alias; the same for one that is not there."""
        status = await self.backend.ask(VERBS["status"], StatusRequest())
        model = status.model_named(named)
        return named if model is None else model.name

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """Ask for as many tokens as fit, if those that were asked for do not."""
        request, limit = request.told_to(self.emit), self._order.max_tokens
        try:
            return await self.backend.ask(VERBS["generate"], request)
        except TorporError as error:
            if error.code != "context_overflow" or error.details.get("at_least"):
                raise
            room = error.context_tokens - (error.token_count + error.wanted_tokens - limit)
            if room < 1:
                raise
        return await self.backend.ask(VERBS["generate"], replace(request, max_tokens=room))


class _Texts(Telling):
    def __init__(self, *, usage: bool, logprobs: bool) -> None:
        super().__init__()
        self._usage = usage
        self._has_logprobs = logprobs
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answered: Answered) -> Mapping[str, Any]:
        result = answered.result
        choice = self._text(result.text, result.finish_reason, self._logprobs())
        return {**choice, "usage": usage_of(answered, self.reasoning_tokens), **told_seed(result)}

    def opening(self) -> bytes:
        return b""

    def token(self, event: TokenEvent) -> bytes:
        self.untold.add(event)
        return event_bytes(self._text(event.text, logprobs=self._logprobs())) if event.text else b""

    def silence(self) -> bytes:
        return event_bytes(self._text(""))

    def closing(self, answered: Answered) -> bytes:
        result = answered.result
        events = event_bytes(self._text("", result.finish_reason, self._logprobs()) | told_seed(result))
        if self._usage:
            usage = usage_of(answered, self.reasoning_tokens)
            events += event_bytes({**self._text(""), "choices": [], "usage": usage})
        return events + DONE

    def failure(self, error: TorporError) -> bytes:
        return event_bytes(error_map(error, "openai"))

    def _logprobs(self) -> Mapping[str, Any] | None:
        """Those that were not told yet; None if they are not wanted."""
        return columns_of(self.untold.take()) if self._has_logprobs else None

    def _text(
        self, text: str, finish_reason: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": self.asking.model}
        return {**head, "choices": [choice]}
