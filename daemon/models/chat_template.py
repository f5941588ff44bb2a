"""Chat messages to text, only ever the new part.

The daemon keeps the sampled tokens in the ledger, so earlier turns are never rendered again. A new turn is rendered
behind a placeholder exchange, and the text after the placeholder is kept.

A template that does not know tools gets them as texts (`written_tools.py`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Protocol

from ..errors import TemplateUnusable
from .written_tools import written

Message = Mapping[str, Any]
"""role, content; an assistant's may have reasoning and tool_calls, a tool's its tool_call_id."""

# No template strips, quotes or moves these: only letters and digits, and no word of any language.
_USER = "torporuserplaceholder7f3a"
_ASSISTANT = "torporassistantplaceholder9c1d"
_TOOL = "torportoolplaceholder4e8b"


@dataclass(frozen=True, slots=True)
class Root:
    """All that stands before the messages of a conversation: its tools (maps of name, description and parameters), and
    the arguments of its template. False if it is empty."""

    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tools or self.arguments)

    def to_text(self) -> str:
        """The root as JSON, for a session map."""
        return json.dumps({"tools": self.tools, "arguments": self.arguments}, ensure_ascii=False)

    @classmethod
    def from_text(cls, stored: object) -> Root:
        """Read the text of `to_text`; None gives an empty root. Raises ValueError: `to_text` does not make this."""
        if stored is None:
            return NO_ROOT
        try:
            found = json.loads(stored) if type(stored) is str else None
        except RecursionError as error:
            raise ValueError("a root is nested too deep") from error
        match found:
            case {"tools": list(tools), "arguments": dict(arguments)} if all(type(tool) is dict for tool in tools):
                return cls(tuple(tools), arguments)
        raise ValueError("a root has other fields than tools and arguments")


NO_ROOT: Final = Root()


class Render(Protocol):
    """From messages to the template's text."""

    def __call__(self, messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
        """The text; open_turn: with the start of the assistant's turn. Raises TemplateUnusable: the template is missing
        or refuses the messages."""


def renderer(tokenizer: Any) -> Render:
    """The rendering by a model's own template."""

    @cache
    def knows_tools() -> bool:
        return _knows_tools(tokenizer)

    def render(messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnusable("This model has no chat template; use append and generate instead.")
        _require_free(tokenizer, root.arguments)
        has_tools = bool(root.tools) or any(message.get("tool_calls") for message in messages)
        if has_tools and not knows_tools():
            messages, root = written(messages, root.tools), replace(root, tools=())
        try:
            return _applied(tokenizer, messages, open_turn, root)
        except Exception as error:
            raise TemplateUnusable(f"The model's chat template refused the message: {error}.") from error

    return render


def _applied(tokenizer: Any, messages: Sequence[Message], open_turn: bool, root: Root) -> str:
    tools = [{"type": "function", "function": dict(tool)} for tool in root.tools]
    text = tokenizer.apply_chat_template(
        [_as_templates_take(message) for message in messages],
        tokenize=False,
        add_generation_prompt=open_turn,
        **({"tools": tools} if tools else {}),
        **root.arguments,
    )
    return str(text)


def _as_templates_take(message: Message) -> dict[str, Any]:
    """A message with the names of fields that templates know."""
    found = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        found["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call.get("id", ""),
                "function": {key: call[key] for key in ("name", "arguments")},
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _knows_tools(tokenizer: Any) -> bool:
    """Whether a template shows tools, calls of them, and their results."""
    root = Root(({"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}},))
    call = {"name": f"{_TOOL}1", "arguments": {}, "id": "placehold"}
    asked = {"role": "user", "content": _USER}
    talk: list[Message] = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{_TOOL}2", "tool_call_id": "placehold"},
    ]
    try:
        shown = _applied(tokenizer, [asked], True, root) + _applied(tokenizer, talk, True, root)
    except Exception:  # noqa: BLE001 - a template may raise any error
        return False
    return shown.count(_TOOL) >= 4 and f"{_TOOL}1" in shown and f"{_TOOL}2" in shown


def _require_free(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse template arguments that would change the daemon's own: the template itself above all."""
    if not arguments:
        return
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    taken = {*inspect.signature(inner.apply_chat_template).parameters, "messages", "bos_token", "eos_token"}
    if refused := sorted(taken & arguments.keys()):
        raise TemplateUnusable(
            f"The daemon sets {', '.join(refused)} itself. Give only arguments that the model's template reads, such "
            "as enable_thinking."
        )


def opening(render: Render, messages: Sequence[Message], root: Root = NO_ROOT) -> str:
    """The text of a conversation from its beginning to the start of the assistant's turn."""
    return render(messages, True, root)


def continuation(
    render: Render, messages: Sequence[Message], root: Root = NO_ROOT, *, turn_open: bool, end_text: str
) -> str:
    """The text of messages behind the ledger's end, to the start of the assistant's turn.

    turn_open: whether the ledger ends inside an assistant's turn, which has to be closed first. end_text: the text of
    the end token at the ledger's end; empty if there is none.
    """
    answer: Message = {"role": "assistant", "content": _ASSISTANT}
    exchange: list[Message] = [{"role": "user", "content": _USER}, answer]
    plain = closing = _after_placeholder(render(exchange, False, root))
    if root.tools and messages[0]["role"] == "tool":
        # Some templates take a tool's result only behind a call.
        exchange[1] = {**answer, "tool_calls": [_call_of(message) for message in _leading_results(messages)]}
        closing = _after_placeholder(render(exchange, False, root))
    whole = _after_placeholder(render([*exchange, *messages], True, root))
    if not whole.startswith(closing) or not closing.endswith(plain):
        raise TemplateUnusable(
            "The model's chat template renders an earlier turn differently once another follows, so a "
            "conversation cannot be continued token by token; use append and generate instead."
        )
    if not turn_open:
        return whole[len(closing) :]
    behind = whole[len(closing) - len(plain) :]
    return behind[len(end_text) :] if end_text and behind.startswith(end_text) else behind


def _leading_results(messages: Sequence[Message]) -> list[Message]:
    end = next((at for at, message in enumerate(messages) if message["role"] != "tool"), len(messages))
    return list(messages[:end])


def _call_of(result: Message) -> dict[str, Any]:
    return {"name": _TOOL, "arguments": {}, "id": result.get("tool_call_id", "")}


def _after_placeholder(text: str) -> str:
    _, found, rest = text.partition(_ASSISTANT)  # the first: a message may quote it
    if not found:
        raise TemplateUnusable(
            "The model's chat template does not show the assistant's words; use append and generate."
        )
    return rest
