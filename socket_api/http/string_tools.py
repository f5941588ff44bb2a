"""Tools that take a string, OpenAI's `custom` ones: for a model they take an object with that string."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

CUSTOM: Final = "custom"
"""Their type for a client: what calls of them are told as begins with it."""

PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The schema of their arguments."""


def arguments_of(text: str | None) -> dict[str, Any]:
    """The arguments of a call with this string."""
    return {"input": text or ""}


def is_one(told_as: str) -> bool:
    """Whether it is such a tool whose calls are told as this."""
    return told_as.partition(":")[0] == CUSTOM


def text_of(arguments: Mapping[str, Any]) -> str:
    """The string of a call; all of its arguments as JSON, where a model has given others."""
    given = arguments.get("input")
    is_alone = isinstance(given, str) and len(arguments) == 1
    return str(given) if is_alone else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
