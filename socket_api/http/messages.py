"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as clients speak it.

Owns the shape of requests, answers and events, and what its dialogues are for the daemon:

- The results of tools that stand in a user's message are messages of their own, before its text.
- A result that is an error says so in its first word.
- A tool that is to be loaded later stands where a result refers to it, and not among the tools that the template
  shows; from there on it may be called. Where Anthropic is to search for it, which is not done here, it is a tool like
  the others.
- The signature of thinking names its answer. The daemon knows what was thought in it.
- Marks for a cache change no token (`requests.py`). Where a request has some, the tokens that were read for it count as
  written to the cache, and else as plain input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from ...daemon.api.dialogue import Channel, ToolCall
from ...daemon.api.events import TokenEvent
from ...daemon.api.reading import FinishReason, GenerateResult, MaxTokens
from ...daemon.api.sampling import Temperature, TopK, TopP
from ...errors import TorporError
from .answering import Order, answer, measured
from .errors import error_map
from .json_reading import InnerJson
from .requests import (
    Body,
    Marks,
    Stops,
    Words,
    call_id_of,
    choice_of,
    constraint_of,
    fault_at,
    ignored_of,
    read_fields,
    words_in,
)
from .routing import Posted, Sending
from .telling import Telling, event_bytes
from .turns import Answered, Turn, answer_in
from .work import desk_of

PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"
_SEARCH: Final = "tool_search_tool_"
_TOLD_APART: Final = ("tool_use", "thinking", "redacted_thinking")
"""Blocks of an answer that are no part of its text."""

_STOP_REASONS: Final[Mapping[FinishReason, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _as_blocks(content: object) -> object:
    """A text stands for one block of it."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[
    list["Block"],
    BeforeValidator(_as_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Block(Body):
    """A part of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: Any = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


class DialogueMessage(Body):
    """A message of a dialogue."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class OfferedTool(Body):
    """A tool that the model may call; one without a schema runs at Anthropic, and has no effect here."""

    name: str = ""
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool = False
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: str
    display: str | None = None


class Metadata(Body):
    """What a client tells of itself."""

    user_id: str | None = None


class OutputConfig(Body):
    """What an answer is like."""

    format: dict[str, Any] | None = None


class DialogueBody(Body):
    """A request to count the tokens of a dialogue."""

    messages: Annotated[list[DialogueMessage], Field(min_length=1)]
    model: str | None = None
    system: Blocks | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(DialogueBody):
    """A request for an answer to a dialogue."""

    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None

    def constraint(self) -> Mapping[str, str] | None:
        """What the answer's text must match. `output_format` is the older name of `output_config.format`. Raises
        InvalidRequest: as `constraint_of`."""
        form = self.output_config.format if self.output_config else None
        if form is None:
            return constraint_of(self.output_format, "output_format")
        return constraint_of(form, "output_config.format")


def routes() -> list[Posted]:
    """The one that answers, and the one that counts."""
    return [
        Posted(PATH, Sending(messages), MessagesBody, speaks="anthropic"),
        Posted(COUNT_PATH, count_tokens, DialogueBody, speaks="anthropic"),
    ]


async def messages(request: Request, send: Send) -> None:
    """Answer a request."""
    make = partial(_order, betas=request.headers.get("anthropic-beta", ""))
    async with desk_of(request).bodies.made(request, make) as order:
        await answer(request, send, order)


def _order(raw: Mapping[str, Any], *, betas: str) -> Order:
    body = read_fields(MessagesBody, raw)
    names, reader = ("temperature", "top_p", "top_k"), _Reader(body)
    turn = reader.turn(
        max_tokens=body.max_tokens,
        sampling={name: value for name in names if (value := getattr(body, name)) is not None},
        stop=tuple(body.stop_sequences or ()),
        constraint=body.constraint(),
        tool_choice=choice_of(
            body.tool_choice,
            strict=[tool.name for tool in body.tools or () if tool.strict],
            parallel=(body.tool_choice or {}).get("disable_parallel_tool_use") is not True,
        ),
    )
    hidden = body.thinking is not None and body.thinking.display == "omitted"
    telling = _Events(turn.answer_id, is_marked=reader.marks.are_given, hides_thinking=hidden)
    return Order(turn, telling, bool(body.stream), ignored_of(body, _also(body, betas, reader.words.left_out)))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a dialogue, and read nothing."""
    async with desk_of(request).bodies.made(request, _turn) as turn:
        return JSONResponse({"input_tokens": (await measured(request, turn)).tokens})


def _turn(raw: Mapping[str, Any]) -> Turn:
    return _Reader(read_fields(DialogueBody, raw)).turn()


def _also(body: MessagesBody, betas: str, left_out: Sequence[str]) -> Iterator[str]:
    yield from (f"content.{each}" for each in dict.fromkeys(left_out))
    for each in body.tools or ():
        if each.input_schema is None:
            yield f"tools.{each.type}"
    if body.thinking is not None and "budget_tokens" in (body.thinking.model_extra or {}):
        yield "thinking.budget_tokens"
    for beta in betas.split(","):
        yield f"beta.{beta.strip()}" if beta.strip() else ""


class _Reader:
    """Makes the dialogue of a request one for the daemon."""

    def __init__(self, body: DialogueBody) -> None:
        self._body = body
        self.marks = Marks()
        self.words = Words()
        self._inner = InnerJson()
        tools = [] if _searches(body) else [tool for tool in body.tools or () if tool.input_schema is not None]
        self._deferred = {tool.name: tool for tool in tools if tool.defer_loading}
        self._loaded: set[str] = set()  # the names of those that a result refers to

    def turn(self, **more: Any) -> Turn:
        """The turn of the request. Raises InvalidRequest: it has what this model cannot read."""
        body = self._body
        system = self._system(body.system or [])
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for each in (*(body.tools or ()), *(body.system or ())):
            self.marks.add(each.cache_control, len(messages))
        for at, message in enumerate(body.messages):
            messages += self._messages(message, f"messages.{at}", is_newest=at == len(body.messages) - 1)
            for block in message.content:
                self.marks.add(block.cache_control, len(messages))
        self.marks.add(body.cache_control, len(messages))
        for at, tool in enumerate(body.tools or ()):
            if not tool.name and tool.input_schema is not None:
                raise fault_at(f"tools.{at}.name", "it is missing; give it")
        tools = [tool for tool in body.tools or () if tool.input_schema is not None]
        offered = [tool for tool in tools if tool.name not in self._deferred.keys() - self._loaded]
        thinks = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
        return Turn(
            messages=messages,
            model=body.model,
            tools=[{**_tool(each), **({"deferred": True} if each.name in self._deferred else {})} for each in offered],
            template_arguments=thinks,
            named=_session_of(body.metadata),
            checkpoints=self.marks.checkpoints,
            keep_awake_s=self.marks.keep_awake_s,
            **more,
        )

    def _messages(self, message: DialogueMessage, place: str, *, is_newest: bool) -> Iterator[dict[str, Any]]:
        """One message, or, for a user's with results of tools, several."""
        texts: list[str] = []
        answer: dict[str, Any] = {}
        for at, block in enumerate(message.content):
            if block.type == "tool_result" and message.role == "user":
                yield {"role": "tool", "content": self._result(block), "tool_call_id": call_id_of(block.tool_use_id)}
            elif block.type == "tool_use" and message.role == "assistant" and block.name is not None:
                arguments = self._inner.arguments_of(block.input)
                call = {"name": block.name, "arguments": arguments, "id": call_id_of(block.id)}
                answer.setdefault("tool_calls", []).append(call)
            elif block.type == "thinking" and message.role == "assistant":
                answer["reasoning"] = answer.get("reasoning", "") + (block.thinking or "")
                answer["answer_id"] = answer_in(block.signature)
            elif block.type != "redacted_thinking":
                place_of_new = f"{place}.content.{at}" if is_newest and message.role == "user" else None
                text = self._plain(block, place_of_new)
                if texts and message.role == "assistant" and message.content[at - 1].type in _TOLD_APART:
                    texts[-1] += text  # what stands between them parted them, and they were one text before
                else:
                    texts.append(text)
        if message.role == "assistant":
            calls = {"tool_calls": tuple(answer.pop("tool_calls"))} if "tool_calls" in answer else {}
            thought = {name: text for name, text in answer.items() if text}
            yield {"role": "assistant", "content": "\n".join(texts), **thought, **calls}
        elif texts:
            yield {"role": message.role, "content": "\n".join(texts)}

    def _system(self, blocks: list[Block]) -> str:
        return "\n".join(self._plain(each, f"system.{at}") for at, each in enumerate(blocks))

    def _result(self, block: Block) -> str:
        """The text of a tool's result."""
        content = block.content
        if isinstance(content, list):
            content = [self._with_loaded(each) for each in content]
        text = self.words.of(content)
        return f"Error: {text}" if block.is_error else text

    def _with_loaded(self, part: object) -> object:
        """The tool that a result refers to, as a text; another part as it is."""
        if not isinstance(part, dict) or part.get("type") != "tool_reference":
            return part
        tool = self._deferred.get(str(part.get("tool_name")))
        if tool is None:
            return {"text": ""}
        self._loaded.add(tool.name)
        return {"text": json.dumps(_tool(tool), ensure_ascii=False)}

    def _plain(self, block: Block, place: str | None) -> str:
        """The text of a block; place: where it stands, if it is refused for having none."""
        text = block.text if block.type == "text" else words_in(block.model_dump())
        if text is None and place is not None:
            raise fault_at(place, f"a block of type {block.type!r:.64} cannot be read here; this model reads text")
        return self.words.line_for(block.model_dump()) if text is None else text


def _searches(body: DialogueBody) -> bool:
    """Whether Anthropic is to search for tools that are loaded later."""
    return any(tool.input_schema is None and tool.type.startswith(_SEARCH) for tool in body.tools or ())


def _tool(tool: OfferedTool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}


def _session_of(metadata: Metadata | None) -> str | None:
    """The conversation that Claude Code names within the id of its user."""
    user = metadata.user_id if metadata is not None else None
    facts = InnerJson().find(user) if user is not None and user.startswith("{") else None
    session = facts.get("session_id") if isinstance(facts, dict) else None
    return session if isinstance(session, str) else None


class _Events(Telling):
    """Tells an answer as a message of blocks. is_marked: whether the request has marks for a cache."""

    def __init__(self, answer_id: str, *, is_marked: bool, hides_thinking: bool) -> None:
        super().__init__()
        self._is_marked = is_marked
        self._hides_thinking = hides_thinking
        self._id = f"msg_{answer_id}"
        self._block: Channel | None = None
        self._blocks = 0

    def whole(self, answered: Answered) -> Mapping[str, Any]:
        result = answered.result
        content: list[dict[str, Any]] = []
        if result.reasoning:
            thought = "" if self._hides_thinking else result.reasoning
            content.append({"type": "thinking", "thinking": thought, "signature": self._id})
        if result.text:
            content.append({"type": "text", "text": result.text})
        content += [{**_opened_call(each), "input": each.arguments} for each in result.tool_calls]
        usage = {**self._input_of(answered), **self._output(answered)}
        return {**self._message(usage), "content": content, **_stop_of(result)}

    def opening(self) -> bytes:
        measured, again = self.asking.measured, self.asking.recomputed_tokens
        usage = self._input(0, 0, 0)
        if measured is not None:
            usage = self._input(measured.tokens, max(0, measured.cached_tokens - again), again)
        return _event("message_start", message=self._message({**usage, "output_tokens": 0})) + self.silence()

    def token(self, event: TokenEvent) -> bytes:
        if event.call is not None:
            return self._close() + self._call(event.call)
        if not event.text or event.channel == "call":
            return b""
        opening = b"" if self._block == event.channel else self._close() + self._open(event.channel)
        if event.channel == "text":
            return opening + self._delta("text_delta", text=event.text)
        return opening if self._hides_thinking else opening + self._delta("thinking_delta", thinking=event.text)

    def silence(self) -> bytes:
        return _event("ping")

    def closing(self, answered: Answered) -> bytes:
        usage = {**self._input_of(answered), **self._output(answered)}
        delta = _event("message_delta", delta=_stop_of(answered.result), usage=usage)
        return self._close() + delta + _event("message_stop")

    def failure(self, error: TorporError) -> bytes:
        return event_bytes(error_map(error, "anthropic"), "error")

    def _open(self, channel: Channel) -> bytes:
        self._block = channel
        thought = {"type": "thinking", "thinking": "", "signature": ""}
        block = {"type": "text", "text": ""} if channel == "text" else thought
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        if self._block is None:
            return b""
        signed = self._delta("signature_delta", signature=self._id) if self._block == "reasoning" else b""
        self._block = None
        self._blocks += 1
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _call(self, call: ToolCall) -> bytes:
        start = _event("content_block_start", index=self._blocks, content_block={**_opened_call(call), "input": {}})
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        events = start + self._delta("input_json_delta", partial_json=arguments)
        self._block = "call"
        return events + self._close()

    def _delta(self, kind: str, **said: str) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **said})

    def _message(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.asking.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _input_of(self, answered: Answered) -> dict[str, Any]:
        return {**self._input(answered.prompt_tokens, answered.cached_tokens, 0), **answered.recomputed}

    def _input(self, tokens: int, cached: int, recomputed: int) -> dict[str, int]:
        """The tokens before the answer. The first three add up. recomputed: those that the session had, of the ones
        that were computed."""
        computed = tokens - cached
        return {
            "input_tokens": 0 if self._is_marked else computed,
            "cache_creation_input_tokens": computed if self._is_marked else 0,
            "cache_read_input_tokens": cached,
            "recomputed_tokens": recomputed,
        }

    def _output(self, answered: Answered) -> dict[str, Any]:
        details = {"thinking_tokens": self.reasoning_tokens}
        return {"output_tokens": len(answered.result.tokens), "output_tokens_details": details}


def _stop_of(result: GenerateResult) -> dict[str, str | None]:
    """Why an answer ended."""
    reason = _STOP_REASONS[result.finish_reason]
    if reason == "end_turn" and result.stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": result.stopped_by}


def _opened_call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _event(kind: str, **data: Any) -> bytes:
    return event_bytes({"type": kind, **data}, kind)
