"""A dialogue as requests and answers have it: messages with what was thought, calls of tools and their results, and the
root that stands before them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    TypeAdapter,
    ValidationError,
)

from ...records import Listed, Record, Result
from .limits import (
    MAX_ARGUMENTS_CHARS,
    MAX_CALL_ID_CHARS,
    MAX_CALLS,
    MAX_JSON_DEPTH,
    MAX_MESSAGES,
    MAX_ROOT_CHARS,
    MAX_TEXT_CHARS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
)


def canonical(value: object) -> str:
    """A JSON value as one text, the same for equal values: keys sorted, no blanks, 1.0 as 1. Raises ValueError: it is
    no JSON value."""
    return _CANONICAL.encode(_plain(value))


_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    # Clients in JavaScript write a whole number without its point.
    if isinstance(value, str):  # most are, and the looks below are slow
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _shallow(value: object, depth: int = 0) -> object:
    """Refuse values that are nested too deep, before anything walks them. A list is a tuple on the wire, and a list
    behind this."""
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} deep; make it flatter")
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _shallow(item, depth + 1) for key, item in value.items()}
    return [_shallow(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _chars_of(value: object) -> int:
    """The characters of a value as JSON. Not of its canonical text: a large schema would hold the loop for that."""
    return len(_WRITTEN.encode(value))


_WRITTEN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _short(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if (length := _chars_of(value)) > MAX_ARGUMENTS_CHARS:
        raise ValueError(f"it has {length} characters as JSON; give at most {MAX_ARGUMENTS_CHARS}")
    return value


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_shallow), AfterValidator(_short)]


def are_arguments(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is an object that a call may have."""
    try:
        _arguments().validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@cache
def _arguments() -> TypeAdapter[dict[str, Any]]:
    # At its first use: the first of all takes pydantic 60 ms, and each client and command imports this module.
    return TypeAdapter(JsonObject)


Role = Literal["system", "user", "assistant", "tool"]
Channel = Literal["text", "reasoning", "call"]
"""What the model is saying: to the user, to itself, or to a tool."""

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
AnswerId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""Names an answer: 16 bytes in hex, which a client makes up."""

Content = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
ToldAs = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
"""What a caller keeps with a tool to tell its calls by. No model sees it."""


class ToolCall(Result):
    """A call of a tool. id: names the call for its result; empty without one. told_as: that of the tool; empty for one
    that is not offered, and without effect in a request."""

    name: ToolName
    arguments: JsonObject
    id: CallId = ""
    told_as: ToldAs = ""


class Tool(Record):
    """A tool that the model may call. parameters: a JSON schema. deferred: whether some message describes it, and the
    template does not show it: so what was read before that message stays. told_as: comes back with each call of it, in
    answers and when they are recalled."""

    name: ToolName
    description: Content = ""
    parameters: JsonObject | None = None
    deferred: bool = False
    told_as: ToldAs = ""


class Message(Record):
    """The fields of a message, which is given and handled as a map of them. reasoning, tool_calls: an assistant's.
    tool_call_id: of the call that a tool's message answers. answer_id: of the answer that an assistant's message is: a
    hint for `converse`, which believes it where the words are those of the answer. instructed: of a system's message,
    how many of its first characters are instructions, which a later request may have again."""

    role: Role
    content: Content
    reasoning: Content = ""
    tool_calls: Annotated[Sequence[ToolCall], Listed(), Field(max_length=MAX_CALLS)] = ()
    tool_call_id: CallId = ""
    answer_id: AnswerId | None = None
    instructed: Annotated[int, Field(ge=0, le=MAX_TEXT_CHARS)] = 0

    def __post_init__(self) -> None:
        """Raises ValueError: a field is of another role."""
        if self.role != "assistant" and (self.reasoning or self.tool_calls or self.answer_id):
            raise ValueError(
                "reasoning, tool_calls and answer_id are the assistant's; leave them out of other messages"
            )
        if self.role != "tool" and self.tool_call_id:
            raise ValueError("tool_call_id is for a tool's message; leave it out of others")
        if self.instructed > (len(self.content) if self.role == "system" else 0):
            raise ValueError("instructed is for a system's message, and at most its length; leave it out of others")


class _AsMap:
    """A map that is checked as a `Message` or a `Tool`, and stays a map."""

    def __init__(self, kind: type[Record]) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[self._kind, AfterValidator(map_of)])


def map_of(record: Message | Tool) -> dict[str, Any]:
    """The map of a message or a tool, without its empty fields."""
    # There may be thousands, and `asdict` of each would take the loop several times as long.
    if isinstance(record, Tool):
        told = {"name": record.name, "description": record.description, "parameters": record.parameters or {}}
        deferred = {"deferred": True} if record.deferred else {}
        return {**told, **deferred, **({"told_as": record.told_as} if record.told_as else {})}
    found: dict[str, Any] = {"role": record.role, "content": record.content}
    if record.reasoning:
        found["reasoning"] = record.reasoning
    if record.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in record.tool_calls]
        found["tool_calls"] = calls
    if record.tool_call_id:
        found["tool_call_id"] = record.tool_call_id
    if record.answer_id is not None:
        found["answer_id"] = record.answer_id
    if record.instructed:
        found["instructed"] = record.instructed
    return found


Messages = Annotated[
    Sequence[Annotated[Mapping[str, Any], _AsMap(Message)]],
    Listed(at_once=128),
    Field(min_length=1, max_length=MAX_MESSAGES),
]
Tools = Annotated[Sequence[Annotated[Mapping[str, Any], _AsMap(Tool)]], Listed(at_once=8), Field(max_length=MAX_TOOLS)]


def require_root(tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any] | None) -> None:
    """Refuse a root that no session keeps. Raises ValueError: it is too long, or names a tool twice."""
    names = [tool["name"] for tool in tools or ()]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ValueError("two of tools have one name; give each its own")
    if (length := _chars_of([list(tools or ()), arguments or {}])) > MAX_ROOT_CHARS:
        raise ValueError(
            f"tools and template_arguments have {length} characters as JSON; give at most {MAX_ROOT_CHARS}"
        )
