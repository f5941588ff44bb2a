"""`/v1/chat/completions`: OpenAI's chat, as clients speak it.

Owns the shape of requests, answers and chunks. What a model thinks is `reasoning_content`, as other local servers tell
it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.types import Send

from ...daemon.api.dialogue import ToolCall
from ...daemon.api.events import ProgressEvent, TokenEvent
from ...daemon.api.limits import MAX_LOGIT_BIASES
from ...daemon.api.logprobs import TopLogprobs
from ...daemon.api.reading import GenerateResult, MaxTokens
from ...daemon.api.sampling import MinP, Penalty, RepetitionPenalty, Sampling, Temperature, TopK, TopP
from ...errors import TorporError
from .answering import Order, answer
from .errors import error_map
from .json_reading import InnerJson, string_arguments
from .requests import (
    CUSTOM,
    STRING_PARAMETERS,
    Body,
    Content,
    Marks,
    Stops,
    Words,
    call_id_of,
    choice_of,
    constraint_of,
    fault_at,
    has_no_effect,
    ignored_of,
    read_fields,
)
from .routing import Posted, Sending
from .telling import Telling, each_of, event_bytes, string_of, takes_string
from .turns import Answered, Turn
from .work import desk_of

PATH = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
"""The end of a stream."""

_ROLES = {"developer": "system", "function": "tool"}


class CalledFunction(Body):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: Any = ""


class CalledCustom(Body):
    """A call of a tool that takes a string."""

    name: str
    input: str = ""


class CalledTool(Body):
    """A call that an assistant made."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None


class SaidAudio(Body):
    """An answer that was spoken."""

    transcript: str | None = None


class ChatMessage(Body):
    """A message of a dialogue. An assistant's that says no is a `refusal`. `function_call` is how a call stood before
    `tool_calls`, and its result has the role `function`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""
    refusal: str | None = None
    audio: SaidAudio | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None


class OfferedFunction(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedCustom(Body):
    """A tool that takes a string."""

    name: str
    description: str | None = None


class OfferedTool(Body):
    """A tool; those of other types have no effect."""

    type: str = "function"
    function: OfferedFunction | None = None
    custom: OfferedCustom | None = None


class StreamOptions(Body):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None


class CacheOptions(Body):
    """How a client wants its prompts kept."""

    ttl: str | None = None


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)]
"""By the ids of tokens."""

_TOKEN: Final = re.compile("0|[1-9][0-9]{0,9}")


class Sampled(Body):
    """The fields by which tokens are drawn."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self) -> dict[str, Any]:
        """As a verb takes it. OpenAI's seeds may be negative. Raises InvalidRequest: a key is no id of a token."""
        parameters = {each.name: value for each in fields(Sampling) if (value := getattr(self, each.name)) is not None}
        if self.seed is not None:
            parameters["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            if (odd := next((key for key in self.logit_bias if not _TOKEN.fullmatch(key)), None)) is not None:
                raise fault_at("logit_bias", f'{odd!r:.64} is no token; its keys are ids of tokens, such as "15496"')
            parameters["logit_bias"] = [{"token": int(key), "bias": bias} for key, bias in self.logit_bias.items()]
        return parameters

    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return tuple(self.stop or ())

    def wants_usage(self) -> bool:
        """Whether a stream ends with the tokens of the answer."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def require_one(self) -> None:
        """Raises InvalidRequest: several answers are asked for."""
        if self.n not in (None, 1):
            raise fault_at("n", "one answer at a time is written; ask again for another")


class ChatBody(Sampled):
    """A request for an answer to a dialogue."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[OfferedTool] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    return_progress: bool | None = None

    def told_logprobs(self) -> int | None:
        """As a verb takes it. Raises InvalidRequest: the likeliest tokens alone are asked for."""
        if self.top_logprobs and not self.logprobs:
            raise fault_at("top_logprobs", "it goes with logprobs; give logprobs true, too")
        return (self.top_logprobs or 0) if self.logprobs else None


def routes() -> list[Posted]:
    """The one that answers."""
    return [Posted(PATH, Sending(chat_completions), ChatBody)]


async def chat_completions(request: Request, send: Send) -> None:
    """Answer a request."""
    async with desk_of(request).bodies.made(request, _order) as order:
        await answer(request, send, order)


def _order(raw: Mapping[str, Any]) -> Order:
    body = read_fields(ChatBody, raw)
    body.require_one()
    inner, words, marks = InnerJson(), Words(), _marks(raw, body)
    turn = Turn(
        model=body.model,
        messages=_messages(body.messages, inner, words),
        tools=[tool for each in body.tools or () if (tool := _tool(each)) is not None],
        template_arguments=body.chat_template_kwargs or {},
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        sampling=body.sampling(),
        stop=body.stops(),
        constraint=constraint_of(body.response_format, "response_format"),
        tool_choice=choice_of(body.tool_choice, strict=_strict(body), parallel=body.parallel_tool_calls),
        logprobs=body.told_logprobs(),
        named=body.prompt_cache_key,
        checkpoints=marks.checkpoints,
        keep_awake_s=marks.keep_awake_s,
    )
    telling = _Chunks(turn, usage=body.wants_usage(), progress=bool(body.return_progress))
    return Order(turn, telling, bool(body.stream), ignored_of(body, _also(body, words.left_out)))


def _also(body: ChatBody, left_out: Sequence[str]) -> Iterator[str]:
    yield from (f"content.{each}" for each in dict.fromkeys(left_out))
    if has_no_effect(body.tool_choice):
        yield "tool_choice"
    for each in body.tools or ():
        if _tool(each) is None:
            yield f"tools.{each.type}"


def _marks(raw: Mapping[str, Any], body: ChatBody) -> Marks:
    """The marks of a request that has been checked."""
    marks = Marks()
    for count, message in enumerate(raw["messages"], 1):
        marks.add_of(message.get("content"), count)
    marks.keep(body.prompt_cache_options.ttl if body.prompt_cache_options else None)
    return marks


def _strict(body: ChatBody) -> list[str]:
    """The names of the tools whose calls match their schemas."""
    functions = [each.function for each in body.tools or () if each.function is not None]
    return [each.name for each in functions if each.strict]


def _messages(dialogue: Sequence[ChatMessage], inner: InnerJson, words: Words) -> list[dict[str, Any]]:
    """Messages as a verb takes them, without their empty fields."""
    messages = []
    for at, message in enumerate(dialogue):
        is_newest = message.role == "user" and at == len(dialogue) - 1
        text = words.of(message.content, f"messages.{at}.content", is_newest=is_newest)
        values: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": text}
        if message.role == "assistant":
            values["content"] = "\n".join(filter(None, (text, message.refusal, _spoken(message, words))))
            values["reasoning"] = message.reasoning_content or message.reasoning
            values["tool_calls"] = tuple(_call(at, each, inner) for each in _calls_of(message))
        if message.role == "tool":
            values["tool_call_id"] = call_id_of(message.tool_call_id)
        messages.append({name: value for name, value in values.items() if value or name == "content"})
    return messages


def _spoken(message: ChatMessage, words: Words) -> str:
    """The words of an answer that was spoken, or a line in their place. Its content, if it has one, says the same."""
    if message.audio is None or message.content:
        return ""
    return message.audio.transcript or words.line_for({"type": "audio"})


def _calls_of(message: ChatMessage) -> Sequence[CalledTool]:
    """The calls of an answer, in the older form, too: some gateways tell one in both."""
    if message.tool_calls or message.function_call is None:
        return message.tool_calls or ()
    return [CalledTool(function=message.function_call)]


def _call(at: int, call: CalledTool, inner: InnerJson) -> dict[str, Any]:
    if call.custom is not None:
        name, arguments = call.custom.name, string_arguments(call.custom.input)
    elif call.function is not None:
        name, arguments = call.function.name, inner.arguments_of(call.function.arguments)
    else:
        raise fault_at(f"messages.{at}.tool_calls", "a call has neither a function nor a custom tool; give one")
    return {"name": name, "arguments": arguments, "id": call_id_of(call.id)}


def _tool(tool: OfferedTool) -> dict[str, Any] | None:
    """A tool as a verb takes it; None if it has no effect."""
    if tool.custom is not None:
        return {
            "name": tool.custom.name,
            "description": tool.custom.description or "",
            "parameters": STRING_PARAMETERS,
            "told_as": CUSTOM,
        }
    if tool.function is None:
        return None
    return {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": tool.function.parameters or {},
    }


def usage_of(answered: Answered, reasoning_tokens: int) -> dict[str, Any]:
    """The tokens of an answer: those that were cached and those that were computed (`cache_write_tokens`) add up to
    the prompt's. `recomputed_tokens` are those of the latter that the session had before; `recomputed_because` says
    why."""
    prompt, completion = answered.prompt_tokens, len(answered.result.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": answered.cached_tokens,
            "cache_write_tokens": answered.computed_tokens,
            **answered.recomputed,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def told_seed(result: GenerateResult) -> dict[str, Any]:
    """The seed that an answer was drawn by, if it has its own: with it, a client can ask for the same again."""
    return {} if result.seed is None else {"seed": result.seed}


class _Chunks(Telling):
    def __init__(self, turn: Turn, *, usage: bool, progress: bool) -> None:
        super().__init__()
        self._has_logprobs = turn.logprobs is not None
        self._usage = usage
        self._progress = progress
        self._begun = time.monotonic()
        self._id = f"chatcmpl-{turn.answer_id}"
        self._created = int(time.time())
        self._calls = 0

    def whole(self, answered: Answered) -> Mapping[str, Any]:
        result = answered.result
        message: dict[str, Any] = {"role": "assistant", "content": result.text or None, "refusal": None}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["tool_calls"] = [self._told_call(each) for each in result.tool_calls]
        elif not result.text:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(), "finish_reason": result.finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(answered, self.reasoning_tokens),
            **told_seed(result),
        }

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def token(self, event: TokenEvent) -> bytes:
        self.untold.add(event)
        if event.call is not None:
            call = {"index": self._calls, **self._told_call(event.call)}
            self._calls += 1
            return self._chunk({"tool_calls": [call]})
        if not event.text:
            return b""
        if event.channel == "reasoning":
            return self._chunk({"reasoning_content": event.text})
        return self._chunk({"content": event.text}, logprobs=self._logprobs())

    def progress(self, event: ProgressEvent) -> bytes:
        """As llama.cpp's server tells it: of all tokens of the dialogue, those that the session had count as
        processed."""
        measured = self.asking.measured
        if not self._progress or measured is None:
            return b""
        before = max(0, measured.tokens - event.total)
        counts = {
            "total": before + event.total,
            "cache": max(0, before - self.asking.recomputed_tokens),
            "processed": before + event.done,
            "time_ms": round(1000 * (time.monotonic() - self._begun)),
        }
        return self._chunk({}, prompt_progress=counts)

    def silence(self) -> bytes:
        return self._chunk({})

    def closing(self, answered: Answered) -> bytes:
        events = self._chunk({}, answered.result.finish_reason, **told_seed(answered.result))
        if self._usage:
            usage = usage_of(answered, self.reasoning_tokens)
            events += event_bytes({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})
        return events + DONE

    def failure(self, error: TorporError) -> bytes:
        return event_bytes(error_map(error, "openai"))

    def _logprobs(self) -> dict[str, Any] | None:
        """Those that were not told yet; None if they are not wanted."""
        return {"content": each_of(self.untold.take()), "refusal": None} if self._has_logprobs else None

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        **also: Any,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        more = {"usage": None} if self._usage else {}
        return event_bytes({**self._head("chat.completion.chunk"), "choices": [choice], **more, **also})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.asking.model}

    def _told_call(self, call: ToolCall) -> dict[str, Any]:
        if takes_string(call.told_as):
            custom = {"name": call.name, "input": string_of(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
