"""What a model's template takes, and messages as it takes them.

Templates have rules about roles: turns that alternate, no system text, none behind the first message, no tools. Some
refuse what breaks a rule, others leave it out or move it. Each rule is found by rendering a dialogue of placeholders,
which must come out whole and in order. It holds for the template, not for a transcript: so a message is told in one way
wherever it stands, and what was read stays the beginning of what is rendered later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from .written_tools import written

Messages = Sequence[Mapping[str, Any]]
Tools = tuple[Mapping[str, Any], ...]
Show = Callable[[Messages, Tools], str]
"""The template's text of a dialogue, with the start of the assistant's turn. Raises any error: it refuses it."""

# No template strips, quotes or moves this: only letters and digits, and no word of any language.
_WORD: Final = "torporruleplaceholder6d2c"
_NAME: Final = f"{_WORD}9"
_TOOLS: Final[Tools] = ({"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}},)
_IN_A_ROW: Final = frozenset({("user", "user"), ("assistant", "assistant"), ("tool", "user")})
_IDS: Final = ("placehold", "placeheld")  # as the strictest template wants them: nine letters or digits


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What a template shows whole and in order. tools: tools, two calls at once and their results. system: a system
    text before the other messages; later_system: one behind them. answer_first: an answer that nothing stands before.
    result: a tool's result where no tools are offered. any_id: calls with ids of any form. in_a_row: pairs of roles
    that may stand next to each other, each a turn of its own; of two users, two answers, and a user behind a result.
    """

    tools: bool
    system: bool
    later_system: bool
    answer_first: bool
    result: bool
    any_id: bool
    in_a_row: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, show: Show) -> TurnRules:
        """The rules of a template."""

        def takes(*roles: str) -> bool:
            return _is_whole(show, _said(*roles))

        tools = _NAME in _shown(show, _said("user"), _TOOLS) and _is_whole(show, _called(*_IDS), _TOOLS)
        result = [*_called(*_IDS), *_said("user", at=5)] if tools else _said("user", "assistant", "tool", "user")
        rows = {
            ("user", "user"): takes("user", "user", "assistant", "user", "user"),
            ("assistant", "assistant"): takes("user", "assistant", "assistant", "user"),
            ("tool", "user"): _is_whole(show, result, _TOOLS if tools else ()),
        }
        return cls(
            tools=tools,
            system=takes("system", "user"),
            later_system=takes("user", "assistant", "system", "user"),
            answer_first=takes("assistant", "user"),
            result=takes("user", "assistant", "tool"),
            any_id=not tools or _is_whole(show, _called("call-1", "call-2"), _TOOLS),
            in_a_row=frozenset(pair for pair in _IN_A_ROW if rows[pair]),
        )


def as_taken(messages: Messages, tools: Tools, rules: TurnRules) -> tuple[list[dict[str, Any]], Tools]:
    """A dialogue and its tools as a template takes them. Tools that it does not know are told as texts. A system text
    where it takes none goes before the first user's, or is a marked text of the user behind that. What may not be two
    turns is one."""
    dialogue = [dict(message) for message in messages]
    roles = {message["role"] for message in messages}
    called = bool(tools) or any(message.get("tool_calls") for message in messages)
    if not rules.tools and (called or ("tool" in roles and not rules.result)):
        dialogue, tools = written(dialogue, tools), ()
    if not rules.later_system:
        dialogue[1:] = [_marked(message) for message in dialogue[1:]]
    if dialogue[0]["role"] == "system" and not rules.system:
        dialogue[:2] = _before_user(dialogue[0], dialogue[1:2])
    first = next((at for at, message in enumerate(dialogue) if message["role"] != "system"), None)
    if first is not None and dialogue[first]["role"] == "assistant" and not rules.answer_first:
        dialogue.insert(first, {"role": "user", "content": ""})
    if not rules.any_id:
        dialogue = [_with_short_ids(message) for message in dialogue]
    return _with_one_turn_each(dialogue, rules), tools


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "system":
        return message
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def _before_user(system: dict[str, Any], following: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A system text before the user's: in the same turn, if that follows."""
    opening = {"role": "user", "content": system["content"]}
    is_users = bool(following) and following[0]["role"] == "user"
    return [_joined(opening, following[0])] if is_users else [opening, *following]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message with ids of nine letters and digits: its own, or others that follow from them."""
    result = dict(message)
    if "tool_call_id" in result:
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    if result.get("tool_calls"):
        result["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in result["tool_calls"]]
    return result


def _short_id(own: str) -> str:
    is_short = len(own) == len(_IDS[0]) and own.isascii() and own.isalnum()
    return own if is_short else blake3(own.encode("utf-8", "surrogatepass")).hexdigest()[: len(_IDS[0])]


def _with_one_turn_each(messages: list[dict[str, Any]], rules: TurnRules) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        pair = (turns[-1]["role"] if turns else "", message["role"])
        if pair in _IN_A_ROW and pair not in rules.in_a_row:
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two messages as one of the first one's role: their words, a blank line between them, and their calls."""
    turn = {**one, "content": "\n\n".join(filter(None, (one["content"], other["content"])))}
    if thoughts := [each["reasoning"] for each in (one, other) if each.get("reasoning")]:
        turn["reasoning"] = "\n\n".join(thoughts)
    if calls := [call for each in (one, other) for call in each.get("tool_calls", ())]:
        turn["tool_calls"] = calls
    return turn


# --- dialogues of placeholders


def _said(*roles: str, at: int = 0) -> list[dict[str, Any]]:
    """A message of each role, with the placeholders from a number on."""
    return [{"role": role, "content": f"{_WORD}{number}"} for number, role in enumerate(roles, at)]


def _called(*ids: str) -> list[dict[str, Any]]:
    """A question, two calls with these ids, and their results, with the placeholders from 0 to 4."""
    calls = [{"name": f"{_WORD}{at}", "arguments": {}, "id": each} for at, each in enumerate(ids, 1)]
    results = [
        {**message, "tool_call_id": each} for message, each in zip(_said("tool", "tool", at=3), ids, strict=True)
    ]
    return [*_said("user"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _shown(show: Show, messages: Messages, tools: Tools = ()) -> str:
    """The template's text; empty if it refuses the messages."""
    try:
        return show(messages, tools)
    except Exception:  # noqa: BLE001 - a template may raise any error
        return ""


def _is_whole(show: Show, messages: Messages, tools: Tools = ()) -> bool:
    """Whether a template shows all placeholders of a dialogue, in order."""
    text, at = _shown(show, messages, tools), 0
    words: list[str] = []
    for message in messages:
        words += [message["content"], *(call["name"] for call in message.get("tool_calls", ()))]
    places = [at := text.find(word, at) for word in words]
    return min(places) >= 0
