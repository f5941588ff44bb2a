"""Items: a dialogue as `/v1/responses` tells it, read into messages for the daemon and made of its answers.

An answer is several items: what was thought, a text, each call. They come back one by one, so items of the model that
stand together are one message again. Developer messages ahead of all others are one system text, for many templates
take no second one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, WithJsonSchema

from ...daemon.api.dialogue import ToolCall
from ...daemon.api.recalling import RecalledMessage
from ..errors import HttpRefused, PreviousResponseNotFound
from .json_reading import InnerJson, string_arguments
from .requests import CUSTOM, STRING_PARAMETERS, Body, Content, Marks, Words, call_id_of, fault_at, int_of
from .telling import string_of, takes_string
from .turns import answer_in, is_stored

_ROLES: Final = {"developer": "system"}
DEFAULT_ITEMS: Final = 20
MOST_ITEMS: Final = 100
"""Of one page."""

_APART: Final = "\n\n"
_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_ANSWERS: Final = _CALLS | {"reasoning"}
"""The types of items that an answer has, beside its messages."""
_READ: Final = "in"
"""What the ids of items begin with that the model has not written."""
_RESPONSE: Final = re.compile(r"resp_([0-9a-f]{32})")


class InputItem(Body):
    """A message, a thought, a call of a tool, or its result."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = ""
    summary: Content = ""
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Content = ""
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


def _as_items(value: object) -> object:
    """A text stands for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[InputItem],
    BeforeValidator(_as_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class OfferedTool(Body):
    """A tool that the model may call, or a namespace of them; those of other types have no effect."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[OfferedTool] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """A tool, and the namespace that it is in."""

    tool: OfferedTool
    namespace: str | None

    @property
    def flat_name(self) -> str:
        """Its name for the model, which knows no namespaces."""
        return _flat(self.namespace, self.tool.name)

    def to_map(self) -> dict[str, Any]:
        """The tool as a verb takes it, with what `call_item` tells calls of it by."""
        parameters = STRING_PARAMETERS if self.tool.type == CUSTOM else self.tool.parameters or {}
        tool = {"name": self.flat_name, "description": self.tool.description or "", "parameters": parameters}
        if self.tool.type != CUSTOM and self.namespace is None:
            return tool
        return {**tool, "told_as": f"{self.tool.type}:{self.namespace or ''}"}


class Toolbox:
    """The tools of one request. unknown: the types that have no effect."""

    def __init__(self, tools: Sequence[OfferedTool]) -> None:
        self.unknown: list[str] = []
        self._offers = list(self._offered(tools, None))

    def to_maps(self) -> list[dict[str, Any]]:
        """The tools as a verb takes them."""
        return [each.to_map() for each in self._offers]

    def strict(self) -> list[str]:
        """The names of those whose calls match their schemas."""
        return [each.flat_name for each in self._offers if each.tool.strict]

    def _offered(self, tools: Sequence[OfferedTool], namespace: str | None) -> Iterator[_Offer]:
        for tool in tools:
            if tool.type == "namespace" and namespace is None:
                yield from self._offered(tool.tools or (), tool.name)
            elif tool.type in ("function", CUSTOM):
                yield _Offer(tool, namespace)
            else:
                self.unknown.append(tool.type)


class Dialogue:
    """The messages of a request; references are filled in before (`references.py`). unknown: the types of items that
    have no effect. after: the id of the answer before the messages: items of it that come again say nothing new. marks:
    those of the items. raw: the items as they came, for their marks."""

    def __init__(
        self, instructions: str | None, items: Sequence[InputItem], after: str | None = None, raw: object = None
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        self.marks = Marks()
        parts = raw if isinstance(raw, list) else []
        self._after = after
        self._inner = InnerJson()
        self._words = Words()
        self._before = ""  # the type of the item before
        if instructions:
            self._add("system", instructions)
            self.messages[0]["instructed"] = len(instructions)
        for at, item in enumerate(items):
            self._read(item, f"input.{at}", is_newest=at == len(items) - 1)
            self.marks.add_of(parts[at].get("content") if parts else None, len(self.messages))
            self._before = item.type if item.role in (None, "assistant") else ""
        self.unknown += dict.fromkeys(self._words.left_out)

    def _read(self, item: InputItem, place: str, *, is_newest: bool) -> None:
        if self._is_of_answer(item):
            pass
        elif item.type == "message":
            if item.role is None:
                raise fault_at(f"{place}.role", "a message needs one; give user, assistant, system or developer")
            text = self._words.of(item.content, f"{place}.content", is_newest=is_newest and item.role == "user")
            self._say(item, text)
        elif item.type == "reasoning":
            own = self._own(item)
            own["reasoning"] = own.get("reasoning", "") + self._words.of(item.content or item.summary)
        elif item.type in _CALLS:
            own = self._own(item)
            own["tool_calls"] = (*own.get("tool_calls", ()), self._call(item, place))
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            output = self._words.of(item.output)
            self.messages.append({"role": "tool", "content": output, "tool_call_id": call_id_of(item.call_id)})
        else:
            self.unknown.append(item.type)

    def _is_of_answer(self, item: InputItem) -> bool:
        """Whether an item is one of the answer before, which comes again."""
        if self._after is None or answer_in(item.id) != self._after or is_read(item.id):
            return False
        return item.type in _ANSWERS if item.type != "message" else item.role == "assistant"

    def _say(self, item: InputItem, text: str) -> None:
        role = item.role or ""
        if role != "assistant":
            self._add(_ROLES.get(role, role), text)
            return
        own = self._own(item)
        # Two texts with a call between them were one text before.
        own["content"] += "\n" * (self._before == "message") + text

    def _add(self, role: str, text: str) -> None:
        if role == "system" and [each["role"] for each in self.messages] == ["system"]:
            self.messages[0]["content"] += _APART + text
        else:
            self.messages.append({"role": role, "content": text})

    def _own(self, item: InputItem) -> dict[str, Any]:
        """The message of the model that an item belongs to; it names the answer, if the item does."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        named = None if is_read(item.id) else item.id
        if (answer := answer_in(item.encrypted_content) or answer_in(named)) is not None:
            self.messages[-1].setdefault("answer_id", answer)
        return self.messages[-1]

    def _call(self, item: InputItem, place: str) -> dict[str, Any]:
        if not item.name:
            raise fault_at(f"{place}.name", "a call names its tool")
        if item.type == "custom_tool_call":
            arguments = string_arguments(item.input)
        else:
            arguments = self._inner.arguments_of(item.arguments)
        return {"name": _flat(item.namespace, item.name), "arguments": arguments, "id": call_id_of(item.call_id)}


def answer_of_response(response_id: str, field: str = "response_id") -> str:
    """The id of the answer that a response is. Raises PreviousResponseNotFound: no stored response has such an id."""
    match = _RESPONSE.fullmatch(response_id)
    if match is None or not is_stored(match[1]):
        raise not_found(response_id, field)
    return match[1]


def not_found(named: str, field: str) -> PreviousResponseNotFound:
    """The refusal of an id that no session has."""
    return PreviousResponseNotFound(
        f"There is no {named!r:.100}. It was never given or not stored, or it or its session was deleted; send the"
        " whole dialogue.",
        field=field,
    )


def answer_items(answer_id: str, message: RecalledMessage) -> list[dict[str, Any]]:
    """A whole answer as items, in the order in which it was told."""
    items: list[dict[str, Any]] = []
    for at, piece in enumerate(message.pieces):
        if piece.call is not None:
            items.append(call_item(piece.call, item_id("fc", answer_id, at)))
        elif piece.channel == "reasoning":
            items.append(reasoning_item(item_id("rs", answer_id, at), piece.text, answer_id))
        else:
            items.append(message_item(item_id("msg", answer_id, at), piece.text))
    items = items or [message_item(item_id("msg", answer_id, 0), "")]
    if not message.finished:
        cut_off(items)
    return items


def cut_off(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Say of the last item, and of the response, that the limit of tokens cut it off."""
    if items[-1]["type"] == "message":
        items[-1]["status"] = "incomplete"
    return {"incomplete_details": {"reason": "max_output_tokens"}}


def read_items(messages: Sequence[RecalledMessage], within: str) -> Iterator[dict[str, Any]]:
    """Messages as they are listed. within: what the ids of those that the model has not written are made of."""
    for message in messages:
        if message.answer_id is not None:
            yield from answer_items(message.answer_id, message)
            continue
        own = answer_items("", message) if message.pieces else ()  # the model's, and its id was taken away
        for at, item in enumerate(map(_without_id, own) if own else _read_items(message)):
            # By the message's place: an answer before it may lose its id.
            named = item_id(_READ, within, message.number)
            yield {"id": f"{named}_{at}" if at else named, "status": "completed", **item}


def is_read(minted: str | None) -> bool:
    """Whether an id is that of an item that the model has not written; what it is made of comes behind that."""
    return (minted or "").startswith(f"{_READ}_")


def require_certain(messages: Sequence[RecalledMessage]) -> None:
    """Refuse words that no digest proves. Raises HttpRefused."""
    if not all(each.certain for each in messages):
        raise HttpRefused(
            "Its words cannot be told: they stand in tokens that the model's tokenizer or template, as it is now, does"
            " not turn into the words that were said. Load the model as it was then. To go on with the tokens as they"
            " are, name its id.",
            status=404,
        )


def _read_items(message: RecalledMessage) -> Iterator[dict[str, Any]]:
    """A message that was read, without the ids of its items."""
    if message.role == "tool":
        yield {"type": f"{_called(message.told_as)}_output", "call_id": message.tool_call_id, "output": message.content}
    elif message.role != "assistant":
        # What a request had as fields is no item, and two line ends stand behind it.
        text = message.content[message.instructed :].removeprefix("\n\n" if message.instructed else "")
        if text or not message.instructed:
            content = [{"type": "input_text", "text": text}]
            yield {"type": "message", "role": message.role, "content": content}
    else:
        if message.reasoning:
            yield _without_id(reasoning_item("", message.reasoning, ""))
        if message.content:
            yield _without_id(message_item("", message.content))
        for call in message.tool_calls:
            yield _without_id(call_item(call, ""))


def _without_id(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list of items: the newest first, if the query does not say `asc`."""
    ordered = list(items if query.get("order") == "asc" else reversed(items))
    at = next((at for at, each in enumerate(ordered) if each["id"] == query.get("after")), -1) + 1
    limit = min(max(int_of(query.get("limit")), 1), MOST_ITEMS) if "limit" in query else DEFAULT_ITEMS
    page = ordered[at : at + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": at + limit < len(ordered), **ends}


def item_id(kind: str, answer_id: str, at: int) -> str:
    """The id of an item: it names the answer, and so the place in the ledger."""
    return f"{kind}_{answer_id}_{at}"


def call_item(call: ToolCall, item_id: str) -> dict[str, Any]:
    """A call as it is told: by what its tool was offered as, also when it is recalled."""
    namespace = call.told_as.partition(":")[2]
    name = call.name.removeprefix(_flat(namespace, ""))
    item = {"id": item_id, "type": _called(call.told_as), "status": "completed", "call_id": call.id, "name": name}
    if namespace:
        item["namespace"] = namespace
    if takes_string(call.told_as):
        return {**item, "input": string_of(call.arguments)}
    return {**item, "arguments": _json(call.arguments)}


def _called(told_as: str) -> str:
    """The type of the item that a call is."""
    return "custom_tool_call" if takes_string(told_as) else "function_call"


def reasoning_item(item_id: str, text: str, sealed: str) -> dict[str, Any]:
    """What was thought. sealed: what stands for it in its `encrypted_content`."""
    summary = [{"type": "summary_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "status": "completed", "summary": summary, "encrypted_content": sealed}


def message_item(item_id: str, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A text of the model."""
    item = {"id": item_id, "type": "message", "status": "completed", "role": "assistant"}
    return {**item, "content": [text_part(text, logprobs)]}


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The only part of a text of the model."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _flat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
