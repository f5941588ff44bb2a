"""`/v1/responses`: OpenAI's API of items and typed events, as clients speak it.

Owns the shape of requests, answers and events. What a model thinks is told as the summary of a reasoning item.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Send

from ...daemon.api.dialogue import Channel, ToolCall
from ...daemon.api.events import TokenEvent
from ...errors import TorporError
from .answering import Telling, answer, event_bytes
from .chat_completions import Sampled
from .desk import desk_of
from .errors import error_map
from .fields import Body, ignored_of, read_fields
from .response_items import Dialogue, Items, OfferedTool, Toolbox, message_item, reasoning_item, text_part
from .turns import Answered, Turn

PATH: Final = "/v1/responses"
_SEALED: Final = "reasoning.encrypted_content"


class Thinking(Body):
    """How much the model thinks; `none` asks it not to."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Sampled):
    """A request for an answer to items."""

    input: Items
    model: str | None = None
    instructions: str | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: Thinking | None = None
    include: list[str] | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None


async def responses(request: Request, send: Send) -> None:
    """Answer a request."""
    async with desk_of(request).bodies.read(request) as raw:
        body = read_fields(ResponsesBody, raw)
        body.require_one()
        dialogue, tools = Dialogue(body.instructions, body.input), Toolbox(body.tools or ())
        thinks = {"enable_thinking": False} if body.reasoning and body.reasoning.effort == "none" else {}
        turn = Turn(
            model=body.model,
            messages=dialogue.messages,
            tools=tools.to_maps(),
            template_arguments=thinks,
            max_tokens=body.max_output_tokens,
            sampling=body.sampling(),
            stop=body.stops(),
            named=body.prompt_cache_key,
        )
        ignored = ignored_of(body, _also(body, [*tools.unknown], [*dialogue.unknown]))
        await answer(request, send, turn, _Events(body, tools), streamed=bool(body.stream), ignored=ignored)


def _also(body: ResponsesBody, tools: Sequence[str], items: Sequence[str]) -> Iterator[str]:
    if body.tool_choice not in (None, "auto"):
        yield "tool_choice"
    if body.text is not None and body.text.get("format", {"type": "text"}) != {"type": "text"}:
        yield "text.format"
    if body.reasoning is not None and body.reasoning.effort not in (None, "none"):
        yield "reasoning.effort"
    if body.truncation not in (None, "disabled"):
        yield "truncation"
    yield from (f"tools.{each}" for each in tools)
    yield from (f"input.{each}" for each in items)
    yield from (f"include.{each}" for each in body.include or () if each != _SEALED)


class _Events(Telling):
    """Tells an answer as a response of items."""

    def __init__(self, body: ResponsesBody, tools: Toolbox) -> None:
        self._body = body
        self._tools = tools
        self._told_tools = [each.model_dump(exclude_none=True) for each in body.tools or ()]
        self._name = uuid.uuid4().hex
        self._created = int(time.time())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: Channel | None = None
        self._text = ""  # of the open item

    def whole(self, answered: Answered) -> Mapping[str, Any]:
        result = answered.result
        if result.reasoning:
            self._items.append(self._reasoning(result.reasoning))
        if result.text or not (result.reasoning or result.tool_calls):
            self._items.append(self._message(result.text))
        for call in result.tool_calls:
            self._items.append(self._call_item(call))
        return self._ended(answered)

    def opening(self) -> bytes:
        told = self._response("in_progress")
        return self._event("response.created", response=told) + self._event("response.in_progress", response=told)

    def token(self, event: TokenEvent) -> bytes:
        if event.call is not None:
            return self._close() + self._call(event.call)
        if not event.text or event.channel == "call":
            return b""
        told = b"" if self._open == event.channel else self._close() + self._begin(event.channel)
        self._text += event.text
        if self._open == "text":
            return told + self._about("response.output_text.delta", content_index=0, delta=event.text, logprobs=[])
        return told + self._about("response.reasoning_summary_text.delta", summary_index=0, delta=event.text)

    def silence(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def closing(self, answered: Answered) -> bytes:
        told = b"" if self._items or self._open else self._begin("text")
        told += self._close()
        response = self._ended(answered)
        return told + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: TorporError) -> bytes:
        told = error_map(error, "openai")["error"]
        failed = self._response("failed", error={"code": told["code"], "message": told["message"]})
        return self._event("response.failed", response=failed)

    def _begin(self, channel: Channel) -> bytes:
        """Open an item."""
        self._open, self._text = channel, ""
        if channel == "text":
            told = self._added({**self._message(""), "content": []})
            return told + self._about("response.content_part.added", content_index=0, part=text_part(""))
        told = self._added({**self._reasoning(""), "summary": []})
        return told + self._about("response.reasoning_summary_part.added", summary_index=0, part=_summary(""))

    def _close(self) -> bytes:
        """End the open item, if there is one."""
        if self._open is None:
            return b""
        text = self._text
        if self._open == "text":
            told = self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
            told += self._about("response.content_part.done", content_index=0, part=text_part(text))
            told += self._done(self._message(text))
        else:
            told = self._about("response.reasoning_summary_text.done", summary_index=0, text=text)
            told += self._about("response.reasoning_summary_part.done", summary_index=0, part=_summary(text))
            told += self._done(self._reasoning(text))
        self._open = None
        return told

    def _call(self, call: ToolCall) -> bytes:
        item = self._call_item(call)
        field, kind = ("input", "custom_tool_call_input")
        if item["type"] == "function_call":
            field, kind = ("arguments", "function_call_arguments")
        told = self._added({**item, field: ""})
        told += self._about(f"response.{kind}.delta", delta=item[field])
        told += self._about(f"response.{kind}.done", **{field: item[field]})
        return told + self._done(item)

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
        return f"{kind}_{self._name}_{len(self._items)}"

    def _message(self, text: str) -> dict[str, Any]:
        return message_item(self._item_id("msg"), text)

    def _reasoning(self, text: str) -> dict[str, Any]:
        return reasoning_item(self._item_id("rs"), text, self._name)

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        return self._tools.call_item(call, self._item_id("fc"))

    def _ended(self, answered: Answered) -> dict[str, Any]:
        usage = {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answered.cached_tokens,
                "cache_write_tokens": answered.result.prefilled_tokens,
            },
            "output_tokens": len(answered.result.tokens),
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": answered.result.token_count,
        }
        if answered.result.finish_reason == "length":
            if self._items[-1]["type"] != "reasoning":
                self._items[-1]["status"] = "incomplete"
            return self._response("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, **facts: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.asking.model,
            "output": self._items,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": self._told_tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **facts,
        }


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
