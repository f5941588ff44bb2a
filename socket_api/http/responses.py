"""`/v1/responses`: OpenAI's API of items and typed events, as clients speak it.

Owns the shape of requests, answers and events. What a model thinks is told as the summary of a reasoning item.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from ...daemon.api.dialogue import Channel, ToolCall
from ...daemon.api.events import TokenEvent
from ...daemon.api.logprobs import TopLogprobs
from ...daemon.api.reading import MaxTokens
from ...daemon.api.recalling import RecallResult
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ..errors import HttpRefused, PreviousResponseNotFound
from .answering import Order, answer, measured
from .chat_completions import CacheOptions, Sampled
from .conversations import Metadata, no_conversation, session_of
from .errors import error_map
from .references import filled, said_behind_stored
from .requests import Body, choice_of, constraint_of, fault_at, has_no_effect, ignored_of, in_path, read_fields
from .response_items import (
    Dialogue,
    Items,
    OfferedTool,
    Toolbox,
    answer_items,
    answer_of_response,
    call_item,
    cut_off,
    item_id,
    message_item,
    not_found,
    page_of,
    read_items,
    reasoning_item,
    require_certain,
    text_part,
)
from .routing import Posted, Sending
from .telling import Telling, each_of, event_bytes
from .turns import Answered, SessionName, Turn, new_answer_id, time_of, unstored_answer_id
from .work import desk_of

PATH: Final = "/v1/responses"
COUNT_PATH: Final = "/v1/responses/input_tokens"
_FILL: Final = partial(filled, field="input")
_SEALED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_MOST_REPEATED_CHARS: Final = 256 * 1024
"""Of a field of a request, in its response."""


class Thinking(Body):
    """How much the model thinks; `none` asks it not to."""

    effort: str | None = None
    summary: str | None = None


class ConversationName(Body):
    """The conversation that a response goes on with."""

    id: str


class Wording(Body):
    """What the text of an answer is like."""

    format: dict[str, Any] | None = None


class ResponsesBody(Sampled):
    """A request for an answer to items."""

    input: Items
    model: str | None = None
    instructions: str | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MaxTokens | None = None
    reasoning: Thinking | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    text: Wording | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    def told_logprobs(self) -> int | None:
        """As a verb takes it. Raises InvalidRequest: the likeliest tokens alone are asked for."""
        is_wanted = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not is_wanted:
            raise fault_at("top_logprobs", f"it goes with include; give {_LOGPROBS} there")
        return (self.top_logprobs or 0) if is_wanted else None


async def responses(request: Request, send: Send) -> None:
    """Answer a request."""
    async with desk_of(request).bodies.made(request, _made, _FILL) as (order, _, place):
        try:
            await answer(request, send, order)
        except TorporError as error:
            raise place.refusal(error) from error


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a request's input, and read nothing."""
    async with desk_of(request).bodies.made(request, _made, _FILL) as (_, turn, place):
        try:
            tokens = (await measured(request, turn)).tokens
        except TorporError as error:
            raise place.refusal(error) from error
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


def _made(raw: Mapping[str, Any]) -> tuple[Order, Turn, _Place]:
    body = read_fields(ResponsesBody, raw)
    body.require_one()
    turn, tools, dialogue = _turn(body, raw["input"])
    telling = _Events(body, turn)
    ignored = ignored_of(body, _also(body, tools.unknown, dialogue.unknown))
    return Order(turn, telling, bool(body.stream), ignored, telling.asked), turn, _Place.of(body)


async def retrieve(request: Request) -> Response:
    """A response, told from its tokens. They do not tell which of them were cached, nor what else the request had."""
    recall, answer_id = await _recalled(request)
    last = recall.messages[-1]
    require_certain([last])
    facts: dict[str, Any] = {"previous_response_id": f"resp_{recall.after}" if recall.after else None}
    facts["usage"] = {
        "input_tokens": last.start,
        "output_tokens": last.end - last.start,
        "total_tokens": last.end,
    }
    output = answer_items(answer_id, last)
    if not last.finished:
        facts |= cut_off(output)
    status = "completed" if last.finished else "incomplete"
    return JSONResponse(response_map(answer_id, status, recall.model, output, **facts))


async def input_items(request: Request) -> Response:
    """The messages since the response before, told from their tokens."""
    recall, answer_id = await _recalled(request)
    require_certain(recall.messages[:-1])
    items = list(read_items(recall.messages[:-1], answer_id))
    return JSONResponse(page_of(items, request.query_params))


async def delete(request: Request) -> Response:
    """Take the id from an answer: nothing finds it any more, and its words stay in the ledger that goes on from it."""
    answer_id = _answer_in_path(request)
    await desk_of(request).ask(request, VERBS["disown"], {"answer_id": answer_id})
    return JSONResponse({"id": f"resp_{answer_id}", "object": "response", "deleted": True})


def routes() -> list[Route]:
    """All of them."""
    return [
        Posted(PATH, Sending(responses), ResponsesBody),
        Posted(COUNT_PATH, count_tokens, ResponsesBody),
        Route(f"{PATH}/{{response_id}}", retrieve, methods=["GET"]),
        Route(f"{PATH}/{{response_id}}", delete, methods=["DELETE"]),
        Route(f"{PATH}/{{response_id}}/input_items", input_items, methods=["GET"]),
    ]


def _answer_in_path(request: Request) -> str:
    named = in_path(request, "response_id")
    try:
        return answer_of_response(named)
    except PreviousResponseNotFound as error:
        raise HttpRefused(f"There is no response {named!r:.100}.", status=404) from error


async def _recalled(request: Request) -> tuple[RecallResult, str]:
    answer_id = _answer_in_path(request)
    return await said_behind_stored(request, answer_id), answer_id


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request goes on: the id of a conversation, or that of a response."""

    conversation: str | None
    response: str = ""

    @classmethod
    def of(cls, body: ResponsesBody) -> _Place:
        """That of a request; without either, it goes on nowhere."""
        conversation = _id_of(body.conversation) if body.conversation is not None else None
        return cls(conversation, body.previous_response_id or "")

    def refusal(self, error: TorporError) -> TorporError:
        """The error of a request that goes on where no session does."""
        if error.code == "session_not_found" and self.conversation is not None:
            return no_conversation(self.conversation)
        return not_found(self.response, "previous_response_id") if error.code == "answer_not_found" else error


def _id_of(conversation: str | ConversationName) -> str:
    return conversation if isinstance(conversation, str) else conversation.id


def _turn(body: ResponsesBody, raw_items: object) -> tuple[Turn, Toolbox, Dialogue]:
    after = body.previous_response_id
    conversation = _id_of(body.conversation) if body.conversation is not None else None
    if after and conversation:
        raise fault_at("previous_response_id", "conversation names the place, too; give one of them")
    answer_id = answer_of_response(after, "previous_response_id") if after else None
    goes_on = bool(after or conversation)
    dialogue = Dialogue(None if goes_on else body.instructions, body.input, answer_id, raw_items)
    if not dialogue.messages:
        raise fault_at("input", "it has no message; give at least one")
    dialogue.marks.keep(body.prompt_cache_options.ttl if body.prompt_cache_options else None)
    tools = Toolbox(body.tools or ())
    thinks = {"enable_thinking": False} if body.reasoning and body.reasoning.effort == "none" else {}
    turn = Turn(
        model=body.model,
        messages=dialogue.messages,
        tools=None if body.tools is None else tools.to_maps(),
        template_arguments=thinks,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(),
        stop=body.stops(),
        constraint=constraint_of(body.text.format if body.text else None, "text.format"),
        tool_choice=choice_of(
            body.tool_choice,
            strict=tools.strict(),
            parallel=body.parallel_tool_calls,
        ),
        logprobs=body.told_logprobs(),
        named=body.prompt_cache_key,
        answer_id=unstored_answer_id() if body.store is False else new_answer_id(),
        after=answer_id,
        instructions=(body.instructions or None) if goes_on else None,
        session=SessionName(session_of(conversation)) if conversation else None,
        durable=body.store is not False,
        checkpoints=dialogue.marks.checkpoints,
        keep_awake_s=dialogue.marks.keep_awake_s,
    )
    return turn, tools, dialogue


def _also(body: ResponsesBody, tools: Sequence[str], items: Sequence[str]) -> Iterator[str]:
    if has_no_effect(body.tool_choice):
        yield "tool_choice"
    if body.reasoning is not None and body.reasoning.effort not in (None, "none"):
        yield "reasoning.effort"
    if body.truncation not in (None, "disabled"):
        yield "truncation"
    if body.text is not None:
        yield from (f"text.{each}" for each in body.text.model_extra or {})
    yield from (f"tools.{each}" for each in tools)
    yield from (f"input.{each}" for each in items)
    yield from (f"include.{each}" for each in body.include or () if each not in (_SEALED, _LOGPROBS))


class _Events(Telling):
    """Tells an answer as a response of items."""

    def __init__(self, body: ResponsesBody, turn: Turn) -> None:
        super().__init__()
        self._answer_id = turn.answer_id
        self.asked = _echo(body, None if turn.session is None else turn.session.text)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: Channel | None = None
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of its text

    def note(self, event: TokenEvent) -> None:
        self.token(event)  # an answer has the items of a stream

    def whole(self, answered: Answered) -> Mapping[str, Any]:
        self._end(answered)
        return self._ended(answered)

    def opening(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def token(self, event: TokenEvent) -> bytes:
        self.untold.add(event)
        if event.call is not None:
            return self._close() + self._call(event.call)
        if not event.text or event.channel == "call":
            return b""
        opening = b"" if self._open == event.channel else self._close() + self._begin(event.channel)
        self._text += event.text
        if self._open == "text":
            return opening + self._delta(event.text)
        return opening + self._about("response.reasoning_summary_text.delta", summary_index=0, delta=event.text)

    def silence(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def closing(self, answered: Answered) -> bytes:
        events = self._end(answered)
        response = self._ended(answered)
        return events + self._event(f"response.{response['status']}", response=response)

    def _end(self, answered: Answered) -> bytes:
        """End the last item; an answer that says nothing has an empty text."""
        events = b"" if self._items or self._open else self._begin("text")
        return events + self._close(is_cut=answered.result.finish_reason == "length")

    def failure(self, error: TorporError) -> bytes:
        facts = error_map(error, "openai")["error"]
        failed = self._response("failed", error={"code": facts["code"], "message": facts["message"]})
        return self._event("response.failed", response=failed)

    def _delta(self, text: str) -> bytes:
        """More of the open text, with the log-probabilities that were not told yet."""
        logprobs = each_of(self.untold.take())
        self._logprobs += logprobs
        return self._about("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, channel: Channel) -> bytes:
        """Open an item."""
        self._open, self._text, self._logprobs = channel, "", []
        if channel == "text":
            events = self._added({**self._message(""), "content": []})
            return events + self._about("response.content_part.added", content_index=0, part=text_part(""))
        events = self._added({**self._reasoning(""), "summary": []})
        return events + self._about("response.reasoning_summary_part.added", summary_index=0, part=_summary(""))

    def _close(self, *, is_cut: bool = False) -> bytes:
        """End the open item, if there is one. is_cut: whether the limit of tokens cut it off."""
        if self._open is None:
            return b""
        text = self._text
        if self._open == "text":
            events = self._about("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            part = text_part(text, self._logprobs)
            events += self._about("response.content_part.done", content_index=0, part=part)
            events += self._done({**self._message(text), **({"status": "incomplete"} if is_cut else {})})
        else:
            events = self._about("response.reasoning_summary_text.done", summary_index=0, text=text)
            events += self._about("response.reasoning_summary_part.done", summary_index=0, part=_summary(text))
            events += self._done(self._reasoning(text))
        self._open = None
        return events

    def _call(self, call: ToolCall) -> bytes:
        item = call_item(call, self._item_id("fc"))
        field, kind = ("input", "custom_tool_call_input")
        if item["type"] == "function_call":
            field, kind = ("arguments", "function_call_arguments")
        events = self._added({**item, field: ""})
        events += self._about(f"response.{kind}.delta", delta=item[field])
        events += self._about(f"response.{kind}.done", **{field: item[field]})
        return events + self._done(item)

    def _added(self, item: Mapping[str, Any]) -> bytes:
        item = {**item, "status": "in_progress"}
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _about(self, kind: str, **facts: Any) -> bytes:
        """An event about the open item."""
        item = self._item_id({"text": "msg", "reasoning": "rs"}.get(self._open or "", "fc"))
        return self._event(kind, item_id=item, output_index=len(self._items), **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        self._number += 1
        return event_bytes({"type": kind, "sequence_number": self._number - 1, **facts}, kind)

    def _item_id(self, kind: str) -> str:
        """The id of the next item."""
        return item_id(kind, self._answer_id, len(self._items))

    def _message(self, text: str) -> dict[str, Any]:
        return message_item(self._item_id("msg"), text, self._logprobs)

    def _reasoning(self, text: str) -> dict[str, Any]:
        return reasoning_item(self._item_id("rs"), text, self._answer_id)

    def _ended(self, answered: Answered) -> dict[str, Any]:
        usage = {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answered.cached_tokens,
                "cache_write_tokens": answered.computed_tokens,
                **answered.recomputed,
            },
            "output_tokens": len(answered.result.tokens),
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": answered.result.token_count,
        }
        if answered.result.finish_reason == "length":
            return self._response("incomplete", usage=usage, **cut_off(self._items))
        return self._response("completed", usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, **facts: Any) -> dict[str, Any]:
        return response_map(self._answer_id, status, self.asking.model, self._items, **self.asked, **facts)


def _echo(body: ResponsesBody, conversation: str | None) -> dict[str, Any]:
    """The fields of a request that its response repeats, in each of several events; those that are long are left
    out."""
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "conversation": {"id": conversation} if conversation else None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **_given(body.reasoning)},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **_given(body.text)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [each.model_dump(exclude_none=True) for each in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
    }
    return {name: value for name, value in fields.items() if _is_short(value)}


def _is_short(value: object) -> bool:
    """Whether a value has few characters as JSON. One that has more is looked at no further."""
    room, waiting = _MOST_REPEATED_CHARS, [value]
    while waiting:
        each = waiting.pop()
        room -= len(each) if isinstance(each, str | list | Mapping) else 1
        if room < 0:
            return False
        if isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return True


def response_map(named: str, status: str, model: str, output: Sequence[Any], **facts: Any) -> dict[str, Any]:
    """A response, with the fields that clients look for. named: what its id is made of."""
    return {
        "id": f"resp_{named}",
        "object": "response",
        "created_at": time_of(named),
        "status": status,
        "model": model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "conversation": None,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        **facts,
    }


def _given(body: Body | None) -> dict[str, Any]:
    return body.model_dump(exclude_none=True) if body is not None else {}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
