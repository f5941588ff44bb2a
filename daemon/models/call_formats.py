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
from types import MappingProxyType
from typing import Any, Final

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
    must not have in them, as they would end the call."""

    body: str
    rules: str
    guards: tuple[str, ...]


def call_rules(marks: Marks, tools: Sequence[Schema], literal: Literal) -> CallRules:
    """The rules for one call of one of the tools. Raises NotForcible."""
    write, inner = _FORMS.get(marks.parser, (None, ()))
    if write is None:
        raise NotForcible(f"the form of its calls ({marks.parser}) is not known")
    rules = _Rules(literal)
    bodies = []
    for tool in tools:
        try:
            bodies.append(rules.add(write(rules, tool["name"], _closed(_parameters(tool)), marks)))
        except NotForcible as error:
            raise NotForcible(f"tool {tool['name']!r:.80}: {error}") from None
    guards = tuple(each for each in (*inner, marks.call[1]) if each)
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


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A form with a tag around each argument, in which a text stands as it is. NAME and KEY stand for the names.
    before, behind: what stands around the closing tag.

    quotes: whether what is not of the one type `string` is read as JSON. null: whether a text "null" is read as none.
    """

    head: str
    opens: str
    closes: str
    tail: str
    quotes: bool
    null: bool
    before: str = ""
    behind: str = ""
    empty: str | None = None

    def __call__(self, rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
        _require_name(name)
        arguments = [
            f"({rules.literal(self.opens.replace('KEY', key))} {self._value(rules, value)}){'' if required else '?'}"
            for key, (value, required) in _properties(schema).items()
        ]
        if self.empty is not None and not any(required for _, required in _properties(schema).values()):
            if arguments:
                raise NotForcible("this model's form of calls needs an argument, and none is required")
            return rules.literal(self.empty.replace("NAME", name))
        head, tail = (rules.literal(each.replace("NAME", name)) for each in (self.head, self.tail))
        return " ".join([head, *arguments, tail])

    def _value(self, rules: _Rules, schema: Schema) -> str:
        """The value of an argument, and the tag behind it."""
        close = rules.literal(self.before + self.closes + self.behind)
        if schema.get("type") == "string":
            texts = _texts_of(schema)
            if texts is None:
                unlike = [r"(?is:\s*null\s*)"] if self.null else []
                return f"{rules.raw(self.closes, unlike)} {rules.literal(self.behind)}"
            for text in texts:
                if text != text.strip() or self.closes in text or (self.null and text.lower() == "null"):
                    raise NotForcible(f"this model's form of calls cannot say {text!r:.80}")
            return f"({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {close}"
        if self.quotes or schema.get("type") in ("integer", "number", "boolean", "array", "object"):
            return f"{rules.json(schema)} {close}"
        raise NotForcible("this model's form of calls cannot be held to a value of several types")


def _write_muse(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    _require_name(name)
    close = rules.literal("</atem:parameter>")
    arguments = []
    for key, (value, required) in _properties(schema).items():
        argument = f"{rules.literal(f'<atem:parameter name={quoted(key)}>')} {rules.json(value)} {close}"
        arguments.append(argument if required else f"({argument})?")
    head = rules.literal(f"<atem:invoke name={quoted(name)}>")
    return " ".join([head, *arguments, rules.literal("</atem:invoke>")])


def _write_gemma4(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        raise NotForcible("this model's form of calls has no place for such a name")
    return f"{rules.literal(f'call:{name}')} {_gemma_value(rules, schema, _GEMMA_QUOTE, nested=True)}"


def _write_function_gemma(rules: _Rules, name: str, schema: Schema, _: Marks) -> str:
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise NotForcible("this model's form of calls has no place for such a name")
    items = [
        (f"{rules.literal(f'{key}:')} {_gemma_value(rules, value, '<escape>', nested=False)}", required)
        for key, (value, required) in _properties(schema).items()
    ]
    return f"{rules.literal(f'call:{name}{{')} {_listed(rules, items)} {rules.literal('}')}"


def _gemma_value(rules: _Rules, schema: Schema, quote: str, *, nested: bool) -> str:
    """A value with bare keys, and texts between marks of their own. nested: whether it may have others in it."""
    kind, options = schema.get("type"), schema.get("anyOf")
    if isinstance(options, list) and not schema.keys() - {"anyOf"} - _TELLING:
        return f"({' | '.join(_gemma_value(rules, each, quote, nested=nested) for each in options)})"
    if kind == "string":
        texts, mark = _texts_of(schema), rules.literal(quote)
        if texts is None:
            return f"{mark} {rules.raw(quote, [_WITHOUT_NUL if nested else _WITHOUT_BRACE])}"
        if any(quote in text or (not nested and "}" in text) or "\0" in text for text in texts):
            raise NotForcible("this model's form of calls cannot say one of its values")
        return f"{mark} ({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {mark}"
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json(schema)
    if nested and kind == "object":
        items = [
            (f"{rules.literal(f'{key}:')} {_gemma_value(rules, value, quote, nested=True)}", required)
            for key, (value, required) in _properties(schema).items()
        ]
        return f"{rules.literal('{')} {_listed(rules, items)} {rules.literal('}')}"
    if (
        nested
        and kind == "array"
        and isinstance(schema.get("items"), Mapping)
        and not schema.keys() - {"items", "type"}
    ):
        item = rules.add(_gemma_value(rules, schema["items"], quote, nested=True))
        return f"{rules.literal('[')} ({item} ({rules.literal(',')} {item})*)? {rules.literal(']')}"
    raise NotForcible(f"this model's form of calls cannot be held to a value of the type {kind!r:.40}")


_GEMMA_QUOTE: Final = '<|"|>'
_WITHOUT_NUL: Final = r"(?s:.*\x00.*)"
_WITHOUT_BRACE: Final = r"(?s:.*[\x00\}].*)"

_Form = Callable[[_Rules, str, Schema, Marks], str]

_GLM: Final = _Tagged("NAME", "<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "", quotes=True, null=False)
_LONGCAT: Final = _Tagged(
    "NAME",
    "<longcat_arg_key>KEY</longcat_arg_key><longcat_arg_value>",
    "</longcat_arg_value>",
    "",
    quotes=True,
    null=False,
    empty='{"name": "NAME", "arguments": {}}',
)
_QWEN_CODER: Final = _Tagged(
    "\n<function=NAME>\n",
    "<parameter=KEY>\n",
    "</parameter>",
    "</function>\n",
    quotes=False,
    null=True,
    before="\n",
    behind="\n",
)
_MINIMAX: Final = _Tagged(
    '\n<invoke name="NAME">\n',
    '<parameter name="KEY">',
    "</parameter>",
    "</invoke>\n",
    quotes=False,
    null=True,
    behind="\n",
)
_MINICPM: Final = _Tagged('"NAME">', '<param name="KEY">', "</param>", "", quotes=False, null=True)

# By the last part of the parser's module; `marks` is our own form, for models without one. Beside each the texts within
# a call that would end an argument too early.
_FORMS: Final[Mapping[str, tuple[_Form, tuple[str, ...]]]] = MappingProxyType(
    {
        "function_gemma": (_write_function_gemma, ()),
        "gemma4": (_write_gemma4, ()),
        "glm47": (_GLM, ("<arg_key>", "</arg_value>")),
        "json_tools": (_write_json, ()),
        "kimi_k2": (_write_kimi_k2, ("<|tool_call_begin|>", "<|tool_call_end|>")),
        "kimi_k3": (_write_kimi_k3, ("<|close|>json<|sep|>", "<|close|>call<|sep|>")),
        "longcat": (_LONGCAT, ("<longcat_arg_key>", "</longcat_arg_value>")),
        "marks": (_write_json, ()),
        "minicpm5": (_MINICPM, ("</param>",)),
        "minimax_m2": (_MINIMAX, ("</parameter>", "</invoke>")),
        "mistral": (_write_mistral, ()),
        "muse_spark": (_write_muse, ("</atem:parameter>", "</atem:invoke>")),
        "pythonic": (_write_pythonic, ()),
        "qwen3_coder": (_QWEN_CODER, ("</parameter>", "</function>")),
    }
)
