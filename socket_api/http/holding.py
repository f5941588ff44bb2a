"""What a client holds an answer to, in the shapes of OpenAI's and Anthropic's APIs, as the fields of `converse`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .fields import fault_at

_ANY_OBJECT: Final = {"json_schema": '{"type": "object"}'}
_MODES: Final = {"auto": "auto", "any": "required", "required": "required", "none": "none"}


def constraint_of(form: Mapping[str, Any] | None, field: str) -> Mapping[str, str] | None:
    """The constraint of a format of answers. field: its name, for a refusal. Raises InvalidRequest: its type is not
    known, or its schema is missing."""
    kind = form.get("type") if form is not None else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise fault_at(f"{field}.type", "give text, json_object or json_schema")
    outer = form.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else form.get("schema")
    if not isinstance(schema, dict):
        raise fault_at(field, "it has no schema; give one, a JSON object")
    return {"json_schema": json.dumps(schema, ensure_ascii=False)}


def choice_of(choice: object, *, strict: Sequence[str], parallel: bool | None = None) -> Mapping[str, Any] | None:
    """The choice of tools of a `tool_choice`. strict: the names of the tools whose calls are to match their schemas.
    parallel: False if an answer may have one call alone. Raises InvalidRequest: it has no such form."""
    found = _choice_of(choice, strict=strict)
    if parallel is not False or (found or {}).get("mode", "auto") != "auto":  # elsewhere there is one, or none
        return found
    return {"mode": "auto", **(found or {}), "parallel": False}


def _choice_of(choice: object, *, strict: Sequence[str]) -> Mapping[str, Any] | None:
    if isinstance(choice, str) or choice is None:
        return _of_mode(choice or "auto", (), strict=strict)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str):
        raise _unknown()
    if kind in _MODES:
        return _of_mode(kind, (), strict=strict)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or allowed.get("mode") not in ("auto", "required"):
            raise _unknown()
        names = tuple(_name_in(each) for each in tools)
        return _of_mode(allowed["mode"], names if allowed["mode"] == "required" else (), strict=strict)
    return _of_mode("required", (_name_in(choice),), strict=strict)


def has_no_effect(choice: object) -> bool:
    """Whether a choice allows some tools only, and leaves it to the model: then it may call the others, too."""
    allowed = choice.get("allowed_tools", choice) if isinstance(choice, dict) else None
    return isinstance(allowed, dict) and allowed.get("mode") == "auto"


def _of_mode(mode: str, names: tuple[str, ...], *, strict: Sequence[str]) -> Mapping[str, Any] | None:
    if mode not in _MODES:
        raise _unknown()
    found: dict[str, Any] = {"mode": _MODES[mode], "names": names}
    if found["mode"] == "auto":
        return {"mode": "auto", "strict": tuple(strict)} if strict else None
    return found


def _name_in(choice: object) -> str:
    """The name of a tool, on its own or within its function."""
    inner = choice.get("function", choice.get("custom", choice)) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise fault_at("tool_choice", "it names no tool; give the name of one")
    return name


def _unknown() -> Exception:
    return fault_at("tool_choice", "give auto, none, required, or the name of a tool, in the form of this API")
