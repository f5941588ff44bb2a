"""The calls of tools that a model may be held to, as rules of a grammar: one form for each parser of mlx-lm.

What a rule allows, the parser reads as a call of an offered tool with arguments of its schema. A form that has no
quotes for texts cannot hold them to every keyword; what it cannot is refused by name.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from . import call_tags
from .call_tags import Tags
from .marks import Marks

JSON_FORM: Final[Mapping[str, Any]] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
"""The one form of JSON: as most models have learned it. Free blanks would let a model write them without end."""

_PYTHON_ESCAPES: Final = '"\\bfnrt'
"""The escapes of JSON that mean the same in Python."""

_LARGEST: Final = 10**15
"""Of a number without bounds: some parsers read numbers as floats, and 1e999 is none."""

_TELLING: Final = frozenset({"type", "description", "title", "default", "examples", "$comment", "deprecated"})
"""Keywords that allow a plain text all it is."""

_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
_KEY: Final = re.compile(r"\w+", re.ASCII)

Schema = Mapping[str, Any]
Literal = Callable[[str], str]
"""From a text, which may hold special tokens, to the pieces of a rule."""


class NotForcible(Exception):
    """A tool cannot be forced in this form. Its text says why."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules of a call. body: what stands between the marks, as pieces of a rule. guards: texts that the arguments
    must not have in them, as no call could be read from them."""

    body: str
    rules: str
    guards: tuple[str, ...]


def call_rules(marks: Marks, tools: Sequence[Schema], literal: Literal) -> CallRules:
    """The rules for one call of one of the tools. Raises NotForcible."""
    write, guards = _FORMS.get(marks.parser, (None, ()))
    if write is None:
        raise NotForcible(f"the form of its calls ({marks.parser}) is not known")
    rules = _Rules(literal)
    bodies = []
    for tool in tools:
        try:
            bodies.append(rules.add(write(rules, tool["name"], _closed(_parameters(tool)), marks)))
        except NotForcible as error:
            raise NotForcible(f"tool {tool['name']!r:.80}: {error}") from None
    return CallRules(f"({' | '.join(bodies)})", rules.text(), guards)


class _Rules:
    """Collects rules, and names them."""

    def __init__(self, literal: Literal) -> None:
        self.literal = literal
        self._lines: list[str] = []

    def add(self, body: str, *, head: str = "") -> str:
        """A rule of that body; gives its name."""
        name = f"call_{len(self._lines)}"
        self._lines.append(f"{name}{head}: {body}")
        return name

    def json(self, schema: Schema, **form: Any) -> str:
        """A rule for JSON of a schema."""
        return self.add("%json " + json.dumps({**schema, "x-guidance": {**JSON_FORM, **form}}))

    def raw(self, close: str, unlike: Sequence[str] = ()) -> str:
        """A rule for any text up to `close`, and that. unlike: regular expressions of whole texts that it is not."""
        pieces = [each for each in self.literal(close).split(" ") if each]
        text = f"CALL_{len(self._lines)}"
        self._lines.append(f"{text}: {text_without(close, unlike)}")
        if pieces[0].startswith("<["):  # a special token ends the text by itself
            return self.add(f"{text} {self.literal(close)}")
        return self.add(text, head=f"[suffix={quoted(close)}]")

    def text(self) -> str:
        """All of them."""
        return "\n".join(self._lines)


def quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_without(mark: str, unlike: Sequence[str] = ()) -> str:
    """The expression of any text that has no `mark` in it. unlike: regular expressions of whole texts that it is
    not."""
    spelled = "".join(f"\\x{{{ord(each):x}}}" for each in mark)
    return "/(?s:.*)/" + "".join(f" & ~/{each}/" for each in (f"(?s:.*){spelled}(?s:.*)", *unlike))


# --- schemas


def _parameters(tool: Schema) -> Schema:
    schema = tool.get("parameters") or {"properties": {}}
    return schema if {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {"type": "object", **schema}


def _closed(schema: Any) -> Any:
    """A schema that allows less: objects have no properties beyond those named, and numbers are within bounds. Without
    texts for people."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            found[key] = {name: _closed(each) for name, each in value.items()}
        elif key in ("enum", "const", "required"):
            found[key] = value
        elif key not in ("description", "title", "default", "examples", "$comment", "deprecated", "$schema"):
            found[key] = _closed(value)
    kinds = found.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds and "properties" in found and "allOf" not in found:
        found.setdefault("additionalProperties", False)
    if {"number", "integer"} & set(map(str, kinds)) and not {"enum", "const"} & found.keys():
        if not {"minimum", "exclusiveMinimum"} & found.keys():
            found["minimum"] = -_LARGEST
        if not {"maximum", "exclusiveMaximum"} & found.keys():
            found["maximum"] = _LARGEST
    return found


def _properties(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """The properties of a schema of an object, and whether each is required. Raises NotForcible: it has more."""
    if more := sorted(schema.keys() - {"type", "properties", "required", "additionalProperties"}):
        raise NotForcible(f"this model's form of calls cannot be held to {more[0]!r} of an object")
    if schema.get("type") != "object":
        raise NotForcible("its parameters are not of one type 'object'")
    named = schema.get("properties", {})
    wrong = next((key for key in named if not _KEY.fullmatch(key)), None)
    if wrong is not None:
        raise NotForcible(f"this model's form of calls has no place for a property of the name {wrong!r:.80}")
    required = schema.get("required", ())
    if missing := [key for key in required if key not in named]:
        raise NotForcible(f"it requires {missing[0]!r:.80}, and has no such property")
    return {key: (value if isinstance(value, Mapping) else {}, key in required) for key, value in named.items()}


def _texts_of(schema: Schema) -> list[str] | None:
    """The texts that a schema of a text allows; None if any. Raises NotForcible: it has keywords beside."""
    if "const" in schema:
        found = [schema["const"]]
    elif "enum" in schema:
        found = list(schema["enum"])
    else:
        if more := sorted(schema.keys() - _TELLING):
            raise NotForcible(f"this model's form of calls cannot be held to {more[0]!r} of a text")
        return None
    if not found or not all(isinstance(each, str) for each in found):
        raise NotForcible("the values of a text are not all texts")
    return found


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise NotForcible("this model's form of calls has no place for such a name")


def _listed(rules: _Rules, items: Sequence[tuple[str, bool]]) -> str:
    """Pieces for items in their order with commas between them; the optional ones may be left out."""
    comma = rules.literal(",")
    # From the last to the first: behind an item that stands (more), and where none stands yet (first).
    more, first = "", ""
    for item, required in reversed(items):
        with_comma, alone = f"{comma} {item} {more}", f"{item} {more}"
        if not required:
            with_comma, alone = f"({with_comma} | {more})", f"({alone} | {first})"
        more, first = (rules.add(each) if each.strip() else "" for each in (with_comma, alone))
    return first


# --- the forms


def _write_json(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    head = rules.literal(f'\n{{"name": {quoted(name)}, "arguments": ')
    return f"{head} {rules.json(schema)} {rules.literal(chr(125) + chr(10))}"


def _write_mistral(rules: _Rules, name: str, schema: Schema, marks: Marks) -> str:
    _require_name(name)
    if "[ARGS]" in marks.special.values():
        return f"{rules.literal(f'{name}[ARGS]')} {rules.json(schema)}"
    head = rules.literal(f'[{{"name": {quoted(name)}, "arguments": ')
    return f"{head} {rules.json(schema)} {rules.literal('}]')}"


def _write_kimi_k2(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    _require_name(name)
    head = rules.literal(f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>")
    return f"{head} {rules.json(schema)} {rules.literal('<|tool_call_end|>')}"


def _write_kimi_k3(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    _require_name(name)
    head = f'<|open|>call tool="{name}" index="1"<|sep|><|open|>json type="object"<|sep|>'
    tail = "<|close|>json<|sep|><|close|>call<|sep|>"
    return f"{rules.literal(head)} {rules.json(schema)} {rules.literal(tail)}"


def _write_pythonic(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise NotForcible("its name is none of Python, in which this model writes calls")
    items = []
    for key, (value, required) in _properties(schema).items():
        if keyword.iskeyword(key) or not key.isidentifier():
            raise NotForcible(f"{key!r} is no name of Python, in which this model writes calls")
        items.append(
            (f"{rules.literal(f'{key}=')} {rules.json(value, json_allowed_escapes=_PYTHON_ESCAPES)}", required)
        )
    return f"{rules.literal(f'[{name}(')} {_listed(rules, items)} {rules.literal(')]')}"


def _write_tagged(tags: Tags, rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    _require_name(name)
    properties = _properties(schema)
    if tags.empty is not None and not any(required for _, required in properties.values()):
        if properties:
            raise NotForcible("this model's form of calls needs an argument, and none is required")
        return rules.literal(tags.empty.replace("NAME", name))
    arguments = [
        f"({rules.literal(tags.opens.replace('KEY', key) + tags.before)} {_tagged_value(tags, rules, value)})"
        f"{'' if required else '?'}"
        for key, (value, required) in properties.items()
    ]
    head, tail = (rules.literal(each.replace("NAME", name)) for each in (tags.head, tags.tail))
    return " ".join([head, *arguments, tail])


def _tagged_value(tags: Tags, rules: _Rules, schema: Schema) -> str:
    """The value of an argument, and the tag behind it."""
    close = rules.literal(tags.before + tags.closes + tags.behind)
    if schema.get("type") == "string" and tags.quoted != "always":
        texts = _texts_of(schema)
        if texts is None:
            unlike = [_CDATA] if tags.cdata else []
            return f"{rules.raw(tags.before + tags.closes, unlike)} {rules.literal(tags.behind)}"
        for text in texts:
            if tags.closes in text or tags.begins in text or (tags.cdata and re.fullmatch(_CDATA, text)):
                raise NotForcible(f"this model's form of calls cannot say {text!r:.80}")
        return f"({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {close}"
    if tags.quoted != "never" or schema.get("type") in ("integer", "number", "boolean", "array", "object"):
        return f"{rules.json(schema)} {close}"
    raise NotForcible("this model's form of calls cannot be held to a value of several types")


_CDATA: Final = r"(?s:\s*<!\[CDATA\[.*)"


def _write_bare(quote: str, rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    """A call with bare keys, and texts between marks of their own."""
    _require_name(name)
    return f"{rules.literal(f'call:{name}')} {_bare_value(quote, rules, {'type': 'object', **schema})}"


def _bare_value(quote: str, rules: _Rules, schema: Schema) -> str:
    kind, options = schema.get("type"), schema.get("anyOf")
    if isinstance(options, list) and not schema.keys() - {"anyOf"} - _TELLING:
        return f"({' | '.join(_bare_value(quote, rules, each) for each in options)})"
    if kind == "string":
        texts, mark = _texts_of(schema), rules.literal(quote)
        if texts is None:
            return f"{mark} {rules.raw(quote)}"
        if any(quote in text for text in texts):
            raise NotForcible("this model's form of calls cannot say one of its values")
        return f"{mark} ({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {mark}"
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json(schema)
    if kind == "object":
        items = [
            (f"{rules.literal(f'{key}:')} {_bare_value(quote, rules, value)}", required)
            for key, (value, required) in _properties(schema).items()
        ]
        return f"{rules.literal('{')} {_listed(rules, items)} {rules.literal('}')}"
    if kind == "array" and isinstance(schema.get("items"), Mapping) and not schema.keys() - {"items", "type"}:
        item = rules.add(_bare_value(quote, rules, schema["items"]))
        return f"{rules.literal('[')} ({item} ({rules.literal(',')} {item})*)? {rules.literal(']')}"
    raise NotForcible(f"this model's form of calls cannot be held to a value of the type {kind!r:.40}")


_Form = Callable[[_Rules, str, Schema, Marks], str]


def _tagged(tags: Tags) -> tuple[_Form, tuple[str, ...]]:
    return partial(_write_tagged, tags), (tags.begins, tags.closes)


# By the last part of the parser's module; `marks` is our own form, for models without one. Beside each the texts within
# an argument with which a call cannot be read.
_FORMS: Final[Mapping[str, tuple[_Form, tuple[str, ...]]]] = MappingProxyType(
    {
        "function_gemma": (partial(_write_bare, call_tags.FUNCTION_GEMMA_QUOTE), ()),
        "gemma4": (partial(_write_bare, call_tags.GEMMA_4_QUOTE), ()),
        "glm47": _tagged(call_tags.GLM),
        "json_tools": (_write_json, ()),
        "kimi_k2": (_write_kimi_k2, ()),
        "kimi_k3": (_write_kimi_k3, ()),
        "longcat": _tagged(call_tags.LONGCAT),
        "marks": (_write_json, ()),
        "minicpm5": _tagged(call_tags.MINICPM),
        "minimax_m2": _tagged(call_tags.MINIMAX),
        "mistral": (_write_mistral, ()),
        "muse_spark": _tagged(call_tags.MUSE),
        "pythonic": (_write_pythonic, ()),
        "qwen3_coder": _tagged(call_tags.QWEN_CODER),
    }
)
