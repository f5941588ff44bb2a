"""Requests of real clients, rebuilt from recorded shapes and asked anew, with the daemon's own answers in the history.

A shape is a recorded request whose long texts are told by length and digest, and whose ids are numbered. A rebuilt text
is the same for the same digest. A recorded answer was a script's; where a later request sends it back, the daemon's
answer stands in its place, in the form in which the client kept the script's: thinking kept or dropped, arguments
written anew, ids its own. So a replay shows what each client's way with its history costs.
"""

from __future__ import annotations

import copy
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx2

_LONG = re.compile(r"<text (\d+) chars, blake2 ([0-9a-f]+)> (.*)", re.DOTALL)
_OLD_ID = re.compile(r"uuid-\d+|ses_[0-9A-Za-z]{20,}|a[0-9a-f]{16}(?![0-9a-f])")
_NOT_SENT = ("host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key")
_WORDS = ("open", "read", "write", "close", "list", "file", "path", "line", "name", "value", "the", "of", "in", "is")

# Schemas were reduced to types. What a model is held to write for them is short.
_BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "string": {"maxLength": 12},
    "integer": {"minimum": 0, "maximum": 99},
    "number": {"minimum": 0, "maximum": 99, "multipleOf": 1},
    "array": {"maxItems": 0},
    "object": {"additionalProperties": False},
}


@dataclass(frozen=True)
class Shape:
    """A recorded request."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


def shapes_in(file: Path, *, scale: float = 1.0) -> list[Shape]:
    """The requests for answers in a recording that send their history, as another conversation. scale: of the length
    of rebuilt texts."""
    fresh, write = _Ids(), _Writer(scale, str(uuid.uuid4()))
    found = []
    for each in json.loads(file.read_text()):
        is_asked = each["method"] == "POST" and not each["path"].endswith("count_tokens")
        if is_asked and "previous_response_id" not in each["body"]:
            headers = {name.lower(): fresh.altered(value) for name, value in each["headers"]}
            sent = {name: value for name, value in headers.items() if name not in _NOT_SENT}
            found.append(Shape(each["path"], sent, fresh.altered(write.rebuilt(each["body"]))))
    return found


class _Ids:
    """Gives each recorded id of a conversation another one."""

    def __init__(self) -> None:
        self._new: dict[str, str] = {}

    def altered(self, value: Any) -> Any:
        if isinstance(value, str):
            return _OLD_ID.sub(lambda old: self._new.setdefault(old[0], str(uuid.uuid4())), value)
        if isinstance(value, dict):
            return {name: self.altered(each) for name, each in value.items()}
        return [self.altered(each) for each in value] if isinstance(value, list) else value


class _Writer:
    """Rebuilds the texts and schemas of a body. salt: makes another text of a digest."""

    def __init__(self, scale: float, salt: str) -> None:
        self._scale = scale
        self._salt = salt

    def rebuilt(self, value: Any) -> Any:
        if isinstance(value, str):
            long = _LONG.fullmatch(value)
            return self._text(long[3], round(int(long[1]) * self._scale), long[2]) if long else value
        if isinstance(value, list):
            return [self.rebuilt(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: self.rebuilt(each) for name, each in value.items()}
        if isinstance(value.get("properties"), dict):
            found["properties"] = {name: self._property(each) for name, each in value["properties"].items()}
            found["required"] = value.get("required") or []
        return found

    def _property(self, kind: Any) -> Any:
        if isinstance(kind, dict):
            return kind
        return {"type": kind or "string", **_BOUNDS.get(kind or "string", {})}

    def _text(self, start: str, chars: int, digest: str) -> str:
        draw = random.Random(self._salt + digest)
        text = start
        while len(text) < chars:
            text += " " + draw.choice(_WORDS)
        return text[: max(chars, 1)]


@dataclass
class Answer:
    """The daemon's answer to a shape. held: the session's tokens behind it; before: those that its history had left, 0
    if it is the first; again: whether the same was asked before."""

    shape: Shape
    session: str
    text: str
    calls: list[dict[str, Any]]
    cached: int
    read: int
    written: int
    id: str
    before: int
    again: bool
    hidden: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return self.cached + self.read + self.written


class Replay:
    """Asks shapes of a daemon. An answer calls the tool that the recorded one called."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self._answers: dict[str, Answer] = {}

    def ask(self, shapes: list[Shape], change: Callable[[int, dict[str, Any]], None] | None = None) -> Iterator[Answer]:
        """Ask them one after the other. change: what else is done to each request before it is sent."""
        for at, shape in enumerate(shapes):
            yield self._asked(at, shape, shapes, change)

    def _asked(
        self, at: int, shape: Shape, shapes: list[Shape], change: Callable[[int, dict[str, Any]], None] | None
    ) -> Answer:
        dialect = DIALECTS[shape.path.partition("?")[0]]
        body, before = self._with_own_answers(dialect, shape)
        called = _call_that_follows(dialect, shape, shapes[at + 1 :])
        body |= {dialect.ceiling: 160, "stream": False}
        body.pop("stream_options", None)
        body |= dialect.forced(called) if called else dialect.worded()
        if change is not None:
            change(at, body)
        answer = self._client.post(shape.path, json=body, headers=shape.headers)
        assert answer.status_code == 200, answer.text
        said = _said(dialect, shape.body)
        found = Answer(
            shape,
            answer.headers["x-torpor-session"],
            **dialect.read(answer.json()),
            before=before.held if before is not None else 0,
            again=said in self._answers,
        )
        assert [each["name"] for each in found.calls] == ([called] if called else []), answer.text
        self._answers[said] = found
        return found

    def _with_own_answers(self, dialect: Dialect, shape: Shape) -> tuple[dict[str, Any], Answer | None]:
        """A request whose recorded answers are the daemon's, and the last of them."""
        body, last, ids = copy.deepcopy(shape.body), None, {}
        items: list[Any] = []
        given: list[Any] = []
        for is_answer, run in groupby(dialect.items(body), dialect.is_answer):
            recorded = list(run)
            if is_answer:
                last = self._answers.get(_said(dialect, {**body, dialect.key: given})) or last
                assert last is not None, "an answer to a request that was not recorded"
                ids |= dict(zip(dialect.call_ids(recorded), [each["id"] for each in last.calls], strict=True))
                items += dialect.sent_back(recorded, last)
            else:
                items += [_with_ids(each, ids) for each in recorded]
            given = [*given, *recorded]
        return {**body, dialect.key: items}, last


def _said(dialect: Dialect, body: Mapping[str, Any]) -> str:
    """What a request says, without what changes on the way."""
    root = list(_texts(body.get("system") or []))[1:]
    messages = [[_role(each), *_texts(each)] for each in dialect.items(body)]
    return json.dumps([root, bool(body.get("tools")), messages])


def _role(item: Any) -> str:
    return str(item.get("role") or item.get("type"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict) and value.get("type") not in ("thinking", "reasoning"):
        for name in ("text", "content", "output", "arguments", "input"):
            if name in value:
                yield from _texts(json.dumps(value[name]) if name == "input" else value[name])
        for call in value.get("tool_calls") or ():
            yield call["function"]["arguments"]


def _with_ids(value: Any, ids: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        named = ("tool_use_id", "tool_call_id", "call_id")
        return {name: ids.get(each, each) if name in named else _with_ids(each, ids) for name, each in value.items()}
    return [_with_ids(each, ids) for each in value] if isinstance(value, list) else value


def _call_that_follows(dialect: Dialect, shape: Shape, later: list[Shape]) -> str | None:
    """The tool that the recorded answer to a request called, as a later request tells."""
    said, count = _said(dialect, shape.body), len(dialect.items(shape.body))
    for each in later:
        items = dialect.items(each.body) if each.path == shape.path else []
        if len(items) > count and _said(dialect, {**each.body, dialect.key: items[:count]}) == said:
            answer = []
            for item in items[count:]:
                if not dialect.is_answer(item):
                    break
                answer.append(item)
            return next(iter(dialect.call_names(answer)), None)
    return None


class Dialect:
    """How an API tells a dialogue: as OpenAI's chat."""

    key = "messages"
    ceiling = "max_tokens"

    def items(self, body: Mapping[str, Any]) -> list[Any]:
        return list(body[self.key])

    def is_answer(self, item: Any) -> bool:
        return item.get("role") == "assistant"

    def calls(self, items: list[Any]) -> list[Any]:
        return [call for each in items for call in each.get("tool_calls") or ()]

    def call_ids(self, items: list[Any]) -> list[str]:
        return [each["id"] for each in self.calls(items)]

    def call_names(self, items: list[Any]) -> list[str]:
        return [each["function"]["name"] for each in self.calls(items)]

    def forced(self, tool: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "function", "function": {"name": tool}}}

    def worded(self) -> dict[str, Any]:
        schema = {"name": "answer", "schema": ANSWER}
        return {"response_format": {"type": "json_schema", "json_schema": schema}, "tool_choice": "none"}

    def read(self, told: Any) -> dict[str, Any]:
        message, usage = told["choices"][0]["message"], told["usage"]
        calls = [
            {"id": each["id"], "name": each["function"]["name"], "arguments": json.loads(each["function"]["arguments"])}
            for each in message.get("tool_calls") or ()
        ]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "text": message["content"] or "",
            "calls": calls,
            "id": told["id"],
            "cached": cached,
            "read": usage["prompt_tokens"] - cached,
            "written": usage["completion_tokens"],
        }

    def sent_back(self, recorded: list[Any], answer: Answer) -> list[Any]:
        found = {**recorded[0], "content": answer.text or (None if answer.calls else "")}
        found.pop("reasoning_content", None)
        if answer.calls:
            old = recorded[0]["tool_calls"]
            found["tool_calls"] = [
                {**was, "id": call["id"], "function": {"name": call["name"], "arguments": _as_before(call, was)}}
                for was, call in zip(old, answer.calls, strict=True)
            ]
        return [found]


def _as_before(call: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """Arguments as the client wrote the recorded ones: with blanks or without."""
    old = recorded.get("arguments") or recorded["function"]["arguments"]
    return json.dumps(call["arguments"], separators=None if '": ' in old else (",", ":"))


class Messages(Dialect):
    """As Anthropic's messages."""

    def calls(self, items: list[Any]) -> list[Any]:
        return [block for each in items for block in each["content"] if _is(block, "tool_use")]

    def call_names(self, items: list[Any]) -> list[str]:
        return [each["name"] for each in self.calls(items)]

    def forced(self, tool: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "tool", "name": tool}}

    def worded(self) -> dict[str, Any]:
        return {
            "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
            "tool_choice": {"type": "none"},
        }

    def read(self, told: Any) -> dict[str, Any]:
        usage = told["usage"]
        calls = [each for each in told["content"] if each["type"] == "tool_use"]
        return {
            "text": "".join(each["text"] for each in told["content"] if each["type"] == "text"),
            "calls": [{"id": each["id"], "name": each["name"], "arguments": each["input"]} for each in calls],
            "id": told["id"],
            "cached": usage["cache_read_input_tokens"],
            "read": usage["input_tokens"] + usage["cache_creation_input_tokens"],
            "written": usage["output_tokens"],
        }

    def sent_back(self, recorded: list[Any], answer: Answer) -> list[Any]:
        (message,) = recorded
        if isinstance(message["content"], str):
            return [{**message, "content": answer.text}]
        marks = next((each["cache_control"] for each in message["content"] if "cache_control" in each), None)
        blocks: list[Any] = [{"type": "text", "text": answer.text}] * bool(answer.text) + [
            {"type": "tool_use", "id": each["id"], "name": each["name"], "input": each["arguments"]}
            for each in answer.calls
        ]
        if marks is not None:
            blocks[-1] = {**blocks[-1], "cache_control": marks}
        return [{**message, "content": blocks}]


class Responses(Dialect):
    """As OpenAI's responses."""

    key = "input"
    ceiling = "max_output_tokens"

    def items(self, body: Mapping[str, Any]) -> list[Any]:
        given = body[self.key]
        return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)

    def is_answer(self, item: Any) -> bool:
        return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")

    def calls(self, items: list[Any]) -> list[Any]:
        return [each for each in items if _is(each, "function_call")]

    def call_ids(self, items: list[Any]) -> list[str]:
        return [each["call_id"] for each in self.calls(items)]

    def call_names(self, items: list[Any]) -> list[str]:
        return [each["name"] for each in self.calls(items)]

    def forced(self, tool: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "function", "name": tool}}

    def worded(self) -> dict[str, Any]:
        wanted = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}
        return {"text": wanted, "tool_choice": "none"}

    def read(self, told: Any) -> dict[str, Any]:
        usage, items = told["usage"], told["output"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        calls = [each for each in items if each["type"] == "function_call"]
        parts = [part for each in items if each["type"] == "message" for part in each["content"]]
        return {
            "text": "".join(part["text"] for part in parts),
            "calls": [
                {"id": each["call_id"], "name": each["name"], "arguments": json.loads(each["arguments"])}
                for each in calls
            ],
            "id": told["id"],
            "cached": cached,
            "read": usage["input_tokens"] - cached,
            "written": usage["output_tokens"],
            "hidden": {each["type"]: each for each in items},
        }

    def sent_back(self, recorded: list[Any], answer: Answer) -> list[Any]:
        found, calls = [], iter(answer.calls)
        for each in recorded:
            own = answer.hidden.get(each.get("type") or "message", {})
            ids = {"id": own["id"]} if "id" in each and "id" in own else {}
            if _is(each, "function_call"):
                call = next(calls)
                more = {"call_id": call["id"], "arguments": _as_before(call, each)}
                found.append({**each, **ids, **more})
            elif _is(each, "reasoning"):
                if own:
                    found.append({**own, "content": None} if "content" in each else own)
            elif answer.text and "<think>" not in json.dumps(each):
                content = each["content"]
                said = answer.text if isinstance(content, str) else [{**content[0], "text": answer.text}]
                found.append({**each, **ids, "content": said})
        return found


def _is(item: Any, kind: str) -> bool:
    return isinstance(item, dict) and item.get("type") == kind


ANSWER = {"type": "string", "enum": ["Yes.", "No.", "It has twelve lines."]}
"""What an answer is held to, for the demo model goes on and on."""

DIALECTS = {"/v1/chat/completions": Dialect(), "/v1/messages": Messages(), "/v1/responses": Responses()}
