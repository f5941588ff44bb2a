"""Chat messages to text, only ever the new part.

The daemon keeps the sampled tokens in the ledger, so earlier turns are never rendered again. A new turn is rendered
behind a placeholder exchange, and the text after the placeholder is kept.

Messages are told as the template takes them (`turn_rules.py`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Protocol

from ..errors import TemplateUnusable
from .turn_rules import Tools, TurnRules, as_taken

Message = Mapping[str, Any]
"""role, content; an assistant's may have reasoning and tool_calls, a tool's its tool_call_id."""

# No template strips, quotes or moves these: only letters and digits, and no word of any language.
_USER = "torporuserplaceholder7f3a"
_ASSISTANT = "torporassistantplaceholder9c1d"
_TOOL = "torportoolplaceholder4e8b"
_TOLD_AS: Final = "told_as"


@dataclass(frozen=True, slots=True)
class Root:
    """All that stands before the messages of a conversation: its tools (maps of name, description and parameters), and
    the arguments of its template. A tool that is `deferred` stands in some message instead. False if it is empty."""

    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tools or self.arguments)

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Those of the tools that the template shows, with what it shows of them."""
        return tuple(
            {name: value for name, value in tool.items() if name != _TOLD_AS}
            for tool in self.tools
            if not tool.get("deferred")
        )

    @property
    def told_as(self) -> dict[str, str]:
        """What the caller tells calls of each tool by."""
        return {tool["name"]: tool.get(_TOLD_AS, "") for tool in self.tools}

    def to_text(self) -> str:
        """The root as JSON, for a session map."""
        return json.dumps({"tools": self.tools, "arguments": self.arguments}, ensure_ascii=False)

    @classmethod
    def from_text(cls, stored: object) -> Root:
        """Read the text of `to_text`; None gives an empty root. Raises ValueError: `to_text` does not make this."""
        if stored is None:
            return NO_ROOT
        try:
            document = json.loads(stored) if type(stored) is str else None
        except RecursionError as error:
            raise ValueError("a root is nested too deep") from error
        match document:
            case {"tools": list(tools), "arguments": dict(arguments)} if all(type(tool) is dict for tool in tools):
                return cls(tuple(tools), arguments)
        raise ValueError("a root has other fields than tools and arguments")


NO_ROOT: Final = Root()


class Render(Protocol):
    """From messages to the template's text."""

    def __call__(self, messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
        """The text; open_turn: with the start of the assistant's turn. Raises TemplateUnusable: the template is missing
        or refuses the messages."""


def renderer(tokenizer: Any, rules: TurnRules) -> Render:
    """The rendering by a model's own template. rules: of that template."""

    def render(messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnusable("This model has no chat template; use append and generate instead.")
        _require_free(tokenizer, root.arguments)
        dialogue, tools = as_taken(messages, root.shown_tools, rules)
        try:
            return _applied(tokenizer, dialogue, open_turn, tools, root.arguments)
        except Exception as error:
            raise TemplateUnusable(f"The model's chat template refused the message: {error}.") from error

    return render


def rules_of(tokenizer: Any) -> TurnRules:
    """The rules of a model's own template."""
    return TurnRules.of(lambda messages, tools: _applied(tokenizer, messages, True, tools, {}))


def _applied(
    tokenizer: Any, messages: Sequence[Message], open_turn: bool, tools: Tools, arguments: Mapping[str, Any]
) -> str:
    offered = [{"type": "function", "function": dict(tool)} for tool in tools]
    text = tokenizer.apply_chat_template(
        [_as_templates_take(message) for message in messages],
        tokenize=False,
        add_generation_prompt=open_turn,
        **({"tools": offered} if offered else {}),
        **arguments,
    )
    return str(text)


def _as_templates_take(message: Message) -> dict[str, Any]:
    """A message with the names of fields that templates know."""
    fields = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        fields["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.get("id", ""),
                "function": {key: call[key] for key in ("name", "arguments")},
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        fields["tool_call_id"] = message["tool_call_id"]
    return fields


def _require_free(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse template arguments that would change the daemon's own: the template itself above all."""
    if not arguments:
        return
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    reserved = {*inspect.signature(inner.apply_chat_template).parameters, "messages", "bos_token", "eos_token"}
    if refused := sorted(reserved & arguments.keys()):
        raise TemplateUnusable(
            f"The daemon sets {', '.join(refused)} itself. Give only arguments that the model's template reads, such "
            "as enable_thinking."
        )


def opening(render: Render, messages: Sequence[Message], root: Root = NO_ROOT) -> str:
    """The text of a conversation from its beginning to the start of the assistant's turn."""
    return render(messages, True, root)


def continuation(
    render: Render,
    messages: Sequence[Message],
    root: Root = NO_ROOT,
    *,
    turn_open: bool,
    end_text: str,
    called: bool = False,
) -> str:
    """The text of messages behind the ledger's end, to the start of the assistant's turn.

    turn_open: whether the ledger ends inside an assistant's turn, which has to be closed first. end_text: the text of
    the end token at the ledger's end; empty if there is none. called: whether the answer before is known to have calls.
    """
    user: Message = {"role": "user", "content": _USER}
    answer: Message = {"role": "assistant", "content": _ASSISTANT}
    calling: Message = {**answer, "tool_calls": [_call_of(message) for message in _leading_results(messages)]}
    # Some templates take a tool's result only behind a call.
    is_needed = called or root.shown_tools
    answers = [answer] if not calling["tool_calls"] else [calling] if is_needed else [answer, calling]
    plain, is_closed, rest, whole = _continued(render, user, answers, messages, root, end_text)
    if not turn_open:
        return whole
    if is_closed:
        return rest + whole
    behind = plain + whole
    if not end_text or behind.startswith(end_text):
        return behind[len(end_text) :]
    last = _closing(render, [user, answer], root, is_last=True)
    tail = last.removeprefix(end_text)  # behind the end token, which stands in place of another
    return tail + whole if tail != last and plain.endswith(tail) else behind


def _continued(
    render: Render, user: Message, answers: Sequence[Message], messages: Sequence[Message], root: Root, end_text: str
) -> tuple[str, str, str, str]:
    """The text of messages behind an exchange with the first of these answers that the template takes. Before it, the
    text that closes an answer, and of that the end token, if it has one, and what stands behind this. answers: with the
    same words."""
    refused = TemplateUnusable(
        "The model's chat template renders an earlier turn differently once another follows, so a conversation cannot "
        "be continued token by token; use append and generate instead."
    )
    for answer in answers:
        # A template may close the last turn otherwise than those before it.
        for is_last in (True, False):
            plain = _closing(render, [user, {**answer, "tool_calls": []}], root, is_last=is_last)
            try:
                closing = _closing(render, [user, answer], root, is_last=is_last) if "tool_calls" in answer else plain
                whole = _behind_answer(render, [user, answer], messages, closing, root)
            except TemplateUnusable as error:
                refused = error
                break
            # The model writes what closes its turn, up to its end token.
            _, is_closed, rest = plain.partition(end_text) if end_text else ("", "", "")
            if whole is not None and closing.endswith(rest if is_closed else plain):
                return plain, is_closed, rest, whole
    raise refused


def _behind_answer(
    render: Render, exchange: Sequence[Message], messages: Sequence[Message], closing: str, root: Root
) -> str | None:
    """The text of messages behind a closed exchange; None if that is not closed so."""
    nothing: Message = {"role": "user", "content": ""}  # else another answer is one turn with the one before it
    for between in ([], [nothing] if messages[0]["role"] == "assistant" else []):
        whole = _after_placeholder(render([*exchange, *between, *messages], True, root))
        if whole.startswith(closing):
            return whole[len(closing) :]
    return None


def _closing(render: Render, exchange: Sequence[Message], root: Root, *, is_last: bool) -> str:
    """The text behind the words of an answer: its calls, and what closes its turn. is_last: if no turn follows."""
    if is_last:
        return _after_placeholder(render(exchange, False, root))
    return _after_placeholder(render(exchange, True, root)).removesuffix(answer_opening(render, root))


def answer_closing(render: Render, root: Root = NO_ROOT) -> str:
    """The text that closes an answer which another turn follows."""
    return _closing(
        render, [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}], root, is_last=False
    )


def answer_opening(render: Render, root: Root = NO_ROOT) -> str:
    """The text that opens an answer behind a message of the user."""
    question: Message = {"role": "user", "content": _USER}
    return render([question], True, root).removeprefix(render([question], False, root))


def following(
    render: Render, asked: str, messages: Sequence[Message], names: re.Pattern[str], root: Root = NO_ROOT
) -> tuple[str, str]:
    """The text of messages where the ledger ends in a turn that was opened for an answer. They follow the message
    before it, with no answer between, or the first of them is that answer. Before it, the text to take back: what the
    template writes otherwise once they follow. asked: the role of the message before. names: of control tokens, which
    stay whole. Raises TemplateUnusable: the template shows that message in another way, too."""
    turns: list[Message] = [{"role": asked, "content": _USER}]
    if asked == "system":
        turns = [{"role": "user", "content": "?"}, *turns]
    elif asked == "tool":
        result: Message = {**turns[0], "tool_call_id": "placehold"}
        calls = [_call_of(each) for each in (result, *_leading_results(messages))]
        answer: Message = {"role": "assistant", "content": _ASSISTANT, "tool_calls": calls}
        turns = [{"role": "user", "content": "?"}, answer, result]
    opened, closed = (render(turns, opens, root).partition(_USER)[2] for opens in (True, False))
    _, is_shown, whole = render([*turns, *messages], messages[-1]["role"] != "assistant", root).partition(_USER)
    if not is_shown:
        raise TemplateUnusable("The model's chat template shows a message in another way once others follow.")
    # A template may join neighbors of one role: then they go on within the message before.
    beginnings = (each for each in (opened, closed) if whole.startswith(each) and opened.startswith(each))
    alike = len(next(beginnings, None) or _common(closed, whole))
    alike = next((each.start() for each in names.finditer(opened) if each.start() < alike < each.end()), alike)
    return opened[alike:], whole[alike:]


def _common(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return "".join(character for character, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _leading_results(messages: Sequence[Message]) -> list[Message]:
    end = next((at for at, message in enumerate(messages) if message["role"] != "tool"), len(messages))
    return list(messages[:end])


def _call_of(result: Message) -> dict[str, Any]:
    return {"name": _TOOL, "arguments": {}, "id": result.get("tool_call_id", "")}


def _after_placeholder(text: str) -> str:
    _, mark, rest = text.partition(_ASSISTANT)  # the first: a message may quote it
    if not mark:
        raise TemplateUnusable(
            "The model's chat template does not show the assistant's words; use append and generate."
        )
    return rest
