"""Whether a call that was shown is the one that a model meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator

_UNCLEAR: Final[Mapping[str, tuple[str, ...]]] = {
    "function_gemma": ("<escape>", "<end_function_call>"),
    "gemma4": ('<|"|>', "<tool_call|>"),
    "glm47": ("<arg_", "</arg_", "</tool_call>"),
    "kimi_k3": ("<|open|>", "<|close|>"),
    "longcat": ("<longcat_arg_", "</longcat_arg_", "</longcat_tool_call>"),
    "minicpm5": ("<param", "</param>", "</function>", "]]>", "<![CDATA["),
    "minimax_m2": ("<parameter", "</parameter>", "</invoke>", "</minimax:tool_call>"),
    "qwen3_coder": ("<parameter", "</parameter>", "</function>", "</tool_call>"),
}
"""Texts with which a value cannot be told from what follows it, in the forms that have no quotes."""

_BARE_TEXTS: Final = ("glm47", "longcat", "minicpm5", "minimax_m2", "qwen3_coder")
"""The forms in which a text may stand as it is, and other values as JSON."""


def is_clear(parser: str, call: Mapping[str, Any]) -> bool:
    """Whether a form says a call so that it can be read in one way only."""
    said = json.dumps(call["arguments"], ensure_ascii=False)
    return not any(json.dumps(mark)[1:-1] in said for mark in _UNCLEAR.get(parser, ()))


def is_meant(
    parser: str, meant: Mapping[str, Any], shown: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether a call is the one that the model meant, to the types of its values. A text and another value that stand
    alike in a form may be taken for each other where the schema allows both. schemas: of the tools' arguments."""
    one, other = meant["arguments"], shown["arguments"]
    if meant["name"] != shown["name"] or list(one) != list(other):
        return False
    properties = schemas[meant["name"]]["properties"]
    return all(
        json.dumps(one[key]) == json.dumps(other[key])
        or (parser in _BARE_TEXTS and _stands_alike(one[key], other[key], properties[key]))
        for key in one
    )


def _stands_alike(one: Any, other: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(one, str) == isinstance(other, str):
        return False
    spelled = [(each if isinstance(each, str) else json.dumps(each)).strip() for each in (one, other)]
    allows = Draft202012Validator(schema).is_valid
    return spelled[0] == spelled[1] and allows(one) and allows(other)
