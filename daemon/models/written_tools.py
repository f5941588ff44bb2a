"""Tools, their calls and results as texts, for chat templates that do not know them.

A list of schemas in the system's text, and a call as JSON between two tags, are the form that most models with tools
have seen. A result is told in words: a small model that knows no tools repeats tags, and what stands between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"

CALL_AROUND: Final = ('{"name": "NAME", "arguments": ', "}")
"""What stands before and behind the arguments. NAME stands for the tool's name."""

_SHAPE: Final = f"{CALL_START}{CALL_AROUND[0]}{{...}}{CALL_AROUND[1]}{CALL_END}"
_OFFER: Final = "You may call tools. Their schemas are:\n<tools>\n{schemas}\n</tools>"
_HOW: Final = "\nTo call one, write: {shape}"

_RESULT: Final = "The tool says:\n"


def written(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with tools as texts: only roles that every template knows."""
    texts = [_plain(message) for message in messages]
    if not tools:
        return texts
    offer = offer_of(tools, _SHAPE)
    if texts and texts[0]["role"] == "system":
        texts[0]["content"] = f"{texts[0]['content']}\n\n{offer}"
        return texts
    return [{"role": "system", "content": offer}, *texts]


def offer_of(tools: Sequence[Mapping[str, Any]], shape: str) -> str:
    """The system text that offers tools, or none of them. shape: how a call of one is written; empty if that is not
    known."""
    if not tools:
        return "You may call no tools."
    schemas = "\n".join(_json({"type": "function", "function": dict(tool)}) for tool in tools)
    return _OFFER.format(schemas=schemas) + (_HOW.format(shape=shape) if shape else "")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"{_RESULT}{content}"}
    calls = [_json({"name": call["name"], "arguments": call["arguments"]}) for call in message.get("tool_calls", ())]
    texts = [content] * bool(content) + [f"{CALL_START}\n{call}\n{CALL_END}" for call in calls]
    return {"role": role, "content": "\n".join(texts)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
