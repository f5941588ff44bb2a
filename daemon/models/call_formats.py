"""The calls of tools that a model may be held to, as rules of a grammar: one form for each parser of mlx-lm. Each form
has a shape, too, in which a model is told how to write a call.

What a rule allows, `call_reading.py` reads as a call of an offered tool with arguments of its schema. A form that has
no quotes for texts cannot hold them to every keyword; what it cannot is refused by name.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from . import call_tags
from .call_reading import INTEGERS
from .call_tags import Tags
from .marks import Marks
from .rules import Literal, Rules, quoted, text_with
from .schemas import NotForcible, Schema, alternatives, binding, joined, kinds_of, reference_of, resolved, values_of
from .written_tools import CALL_AROUND

_PYTHON_ESCAPES: Final = '"\\bfnrt'
"""The escapes of JSON that mean the same in Python."""

_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
_KEY: Final = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules of a call. body: what stands between the marks, and the second mark, as pieces of a rule. guards: texts
    that the arguments must not have in them, as no call could be read from them. parts: the schemas that are compiled,
    each with its place."""

    body: str
    rules: str
    guards: tuple[str, ...]
    parts: Sequence[tuple[str, Schema]]


def call_rules(marks: Marks, tools: Sequence[Schema], literal: Literal, loose: Collection[str]) -> CallRules:
    """The rules for one call of one of the tools. loose: the names of those whose arguments are free. Raises
    NotForcible."""
    form = _FORMS.get(marks.parser)
    if form is None:
        raise NotForcible(f"the form of its calls ({marks.parser}) is not known")
    rules, bodies, end = Rules(literal, "call", INTEGERS, is_closed=True), [], literal(marks.call[1])
    for tool in tools:
        name = tool["name"]
        with rules.at(f"tool {name!r:.80}"):
            if name in loose and form.loose is not None:
                bodies.append(form.loose(rules, name, marks))
            else:
                rules.begin(_ANY_ARGUMENTS if name in loose else _parameters(tool))
                bodies.append(f"{rules.add(form.write(rules, name, rules.root, marks))} {end}")
    return CallRules(f"({' | '.join(bodies)})", rules.text(), form.guards, rules.parts)


_ANY_ARGUMENTS: Final[Schema] = {"type": "object"}


def call_shape(marks: Marks) -> str:
    """How a model writes a call, with its marks: NAME stands for the tool's name, KEY for that of an argument, VALUE
    and TEXT for what it is. Empty if the form is not known."""
    form = _FORMS.get(marks.parser)
    return "" if form is None else f"{marks.call[0]}{form.shape(marks)}{marks.call[1]}"


# --- schemas


def _parameters(tool: Schema) -> Schema:
    schema = binding(tool.get("parameters") or {"properties": {}})
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    schema = joined(schema, schema)
    named = resolved(reference_of(schema), schema)
    if isinstance(named, Mapping):
        schema = {**definitions, **named}
    return schema if {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {"type": "object", **schema}


def _properties(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """The properties of a schema of an object, and whether each is required. Raises NotForcible: it has more."""
    words = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    if more := sorted(schema.keys() - words):
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
    return {key: (value, key in required) for key, value in named.items()}


def _texts_of(schema: Schema) -> list[str] | None:
    """The texts that a schema of a text allows; None if any. Raises NotForcible: it has keywords beside."""
    if {"const", "enum"} & schema.keys():
        return values_of(schema)
    if more := sorted(schema.keys() - {"type"}):
        raise NotForcible(f"this model's form of calls cannot be held to {more[0]!r} of a text")
    return None


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise NotForcible("this model's form of calls has no place for such a name")


# --- the forms


def _write_json(rules: Rules, name: str, schema: Schema, _: Marks) -> str:
    head, tail = CALL_AROUND
    head = rules.literal("\n" + head.replace('"NAME"', quoted(name)))
    return f"{head} {rules.json(schema)} {rules.literal(tail + chr(10))}"


Around = tuple[str, str]
"""What stands before and behind arguments in JSON. NAME stands for the tool's name."""

_KIMI_K2: Final = ("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_K3: Final = (
    '<|open|>call tool="NAME" index="1"<|sep|><|open|>json type="object"<|sep|>',
    "<|close|>json<|sep|><|close|>call<|sep|>",
)


def _mistral(marks: Marks) -> Around:
    if "[ARGS]" in marks.special.values():
        return "NAME[ARGS]", ""
    return f"[{CALL_AROUND[0]}", f"{CALL_AROUND[1]}]"


def _write_around(around: Callable[[Marks], Around], rules: Rules, name: str, schema: Schema, marks: Marks) -> str:
    _require_name(name)
    head, tail = around(marks)
    return f"{rules.literal(head.replace('NAME', name))} {rules.json(schema)} {rules.literal(tail)}"


def _write_pythonic(rules: Rules, name: str, schema: Schema, _: Marks) -> str:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise NotForcible("its name is none of Python, in which this model writes calls")
    items = []
    for key, (value, required) in _properties(schema).items():
        if keyword.iskeyword(key) or not key.isidentifier():
            raise NotForcible(f"{key!r} is no name of Python, in which this model writes calls")
        with rules.at(f"property {key!r:.80}"):
            text = rules.json(value, json_allowed_escapes=_PYTHON_ESCAPES)
        items.append((f"{rules.literal(f'{key}=')} {text}", required))
    return f"{rules.literal(f'[{name}(')} {rules.listed(items, rules.literal(','))} {rules.literal(')]')}"


def _write_tagged(tags: Tags, rules: Rules, name: str, schema: Schema, _: Marks) -> str:
    _require_name(name)
    properties, arguments = _properties(schema), []
    if tags.empty is not None and not any(required for _, required in properties.values()):
        if properties:
            raise NotForcible("this model's form of calls needs an argument, and none is required")
        return rules.literal(tags.empty.replace("NAME", name))
    for key, (value, required) in properties.items():
        with rules.at(f"property {key!r:.80}"):
            argument = (
                f"({rules.literal(tags.opens.replace('KEY', key) + tags.before)} {_tagged_value(tags, rules, value)})"
            )
        arguments.append(argument if required else f"{argument}?")
    head, tail = (rules.literal(each.replace("NAME", name)) for each in (tags.head, tags.tail))
    return " ".join([head, *arguments, tail])


def _tagged_value(tags: Tags, rules: Rules, schema: Schema) -> str:
    """The value of an argument, and the tag behind it."""
    close = rules.literal(tags.before + tags.closes + tags.behind)
    kinds, options = kinds_of(schema, rules.root), alternatives(schema, rules.root)
    if "string" not in kinds or tags.quoted == "always":
        return f"{rules.json(schema)} {close}"
    if any(len(kinds_of(each, rules.root) - {"integer"}) > 1 for each in options):
        raise NotForcible("this model's form of calls cannot be held to a value that may be any")
    others = [each for each in options if kinds_of(each, rules.root) != {"string"}]
    unlike = [_LIKE[kind] for kind in sorted(kinds & _LIKE.keys())] if len(kinds) > 1 else []
    unlike += [_CDATA] if tags.cdata else []
    forms = [f"{rules.json(each)} {close}" for each in others]
    forms += [_tagged_text(tags, rules, each, unlike, close) for each in options if each not in others]
    return f"({' | '.join(forms)})"


def _tagged_text(tags: Tags, rules: Rules, schema: Schema, unlike: Sequence[str], close: str) -> str:
    """A text between tags, and the tag behind it. unlike: expressions of the texts that stand for another value."""
    texts = _texts_of(schema)
    if texts is None:
        return f"{rules.raw(tags.before + tags.closes, unlike)} {rules.literal(tags.behind)}"
    for text in texts:
        if tags.closes in text or tags.begins in text or any(re.fullmatch(each, text) for each in unlike):
            raise NotForcible(f"this model's form of calls cannot say {text!r:.80}")
    return f"({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {close}"


_CDATA: Final = r"(?s:\s*<!\[CDATA\[.*)"
_LIKE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "null": r"\s*null\s*",
        "boolean": r"\s*(true|false)\s*",
        "integer": r"\s*-?[0-9][0-9.eE+-]*\s*",
        "number": r"\s*-?[0-9][0-9.eE+-]*\s*",
        "array": r"(?s:\s*\[.*)",
        "object": r"(?s:\s*\{.*)",
        "string": r'(?s:\s*".*)',
    }
)
"""The texts that may be read as a value of a kind, where a schema allows it beside a text."""


def _loose_tagged(tags: Tags, rules: Rules, name: str, marks: Marks) -> str:
    blanks, key = rules.terminal(r"/\s+/"), rules.terminal("/[^<>\"'\\s]+/")
    before, behind = (rules.literal(each) for each in tags.opens.split("KEY"))
    argument = rules.add(f"{before} {key} {behind} {rules.raw(tags.closes)} {blanks}?")
    head, tail = (rules.literal(each.replace("NAME", name)) for each in (tags.head, tags.tail))
    return f"{head} {blanks}? {argument}* {tail} {rules.literal(marks.call[1])}"


def _loose(head: str, quote: str, rules: Rules, name: str, marks: Marks) -> str:
    """quote: what stands around texts. A control token is no part of a text, so the rule has to name it."""
    begins, close = rules.literal(head.replace("NAME", name)), marks.call[1]
    is_control = rules.literal(quote).startswith("<[")
    texts = f"({rules.raw(quote, (text_with(close),))})*" if is_control else ""
    return f"{begins} {texts} {rules.raw(close)}"


def _write_bare(quote: str, rules: Rules, name: str, schema: Schema, _: Marks) -> str:
    """A call with bare keys, and texts between marks of their own."""
    _require_name(name)
    return f"{rules.literal(f'call:{name}')} {_bare_value(quote, rules, schema)}"


def _bare_value(quote: str, rules: Rules, schema: Schema) -> str:
    reference = reference_of(schema)
    if reference is not None and resolved(reference, rules.root) is not None:
        return rules.named(reference, partial(_bare_value, quote, rules))
    options = alternatives(schema)
    if len(options) > 1 or options[0] is not schema:
        return f"({' | '.join(_bare_value(quote, rules, each) for each in options)})"
    kinds = kinds_of(schema, rules.root)
    if kinds == {"string"}:
        texts, mark = _texts_of(schema), rules.literal(quote)
        if texts is None:
            return f"{mark} {rules.raw(quote)}"
        if any(quote in text for text in texts):
            raise NotForcible("this model's form of calls cannot say one of its values")
        return f"{mark} ({' | '.join(rules.literal(text) or quoted('') for text in texts)}) {mark}"
    if not kinds & {"string", "object", "array"}:
        return rules.json(schema)
    if kinds == {"object"}:
        items = []
        for key, (value, required) in _properties(schema).items():
            with rules.at(f"property {key!r:.80}"):
                items.append((f"{rules.literal(f'{key}:')} {_bare_value(quote, rules, value)}", required))
        return f"{rules.literal('{')} {rules.listed(items, rules.literal(','))} {rules.literal('}')}"
    if kinds == {"array"} and isinstance(schema.get("items"), Mapping) and not schema.keys() - {"items", "type"}:
        with rules.at("its items"):
            item = rules.add(_bare_value(quote, rules, schema["items"]))
        return f"{rules.literal('[')} ({item} ({rules.literal(',')} {item})*)? {rules.literal(']')}"
    raise NotForcible("this model's form of calls cannot be held to such a value")


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of calls. shape: as of `call_shape`, without the marks. loose: writes a call of a tool with free
    arguments, and its end mark; None if they are JSON. guards: the texts within an argument with which a call cannot be
    read."""

    write: Callable[[Rules, str, Schema, Marks], str]
    shape: Callable[[Marks], str]
    loose: Callable[[Rules, str, Marks], str] | None = None
    guards: tuple[str, ...] = ()


def _json(around: Callable[[Marks], Around]) -> _Form:
    return _Form(partial(_write_around, around), lambda marks: "{...}".join(around(marks)))


def _tagged(tags: Tags) -> _Form:
    shape = f"{tags.head}{tags.opens}{tags.before}VALUE{tags.before}{tags.closes}{tags.behind}{tags.tail}"
    return _Form(
        partial(_write_tagged, tags), lambda _: shape, partial(_loose_tagged, tags), (tags.begins, tags.closes)
    )


def _bare(quote: str) -> _Form:
    shape = f"call:NAME{{KEY:{quote}TEXT{quote},KEY:VALUE}}"
    return _Form(partial(_write_bare, quote), lambda _: shape, partial(_loose, "call:NAME{", quote))


_OWN: Final = _Form(_write_json, lambda _: "{...}".join(CALL_AROUND))
_PYTHONIC: Final = _Form(_write_pythonic, lambda _: '[NAME(KEY="TEXT", KEY=VALUE)]', partial(_loose, "[NAME(", '"'))

# By the last part of the parser's module; `marks` is our own form, for models without one.
_FORMS: Final[Mapping[str, _Form]] = MappingProxyType(
    {
        "function_gemma": _bare(call_tags.FUNCTION_GEMMA_QUOTE),
        "gemma4": _bare(call_tags.GEMMA_4_QUOTE),
        "glm47": _tagged(call_tags.GLM),
        "json_tools": _OWN,
        "kimi_k2": _json(lambda _: _KIMI_K2),
        "kimi_k3": _json(lambda _: _KIMI_K3),
        "longcat": _tagged(call_tags.LONGCAT),
        "marks": _OWN,
        "minicpm5": _tagged(call_tags.MINICPM),
        "minimax_m2": _tagged(call_tags.MINIMAX),
        "mistral": _json(_mistral),
        "muse_spark": _tagged(call_tags.MUSE),
        "pythonic": _PYTHONIC,
        "qwen3_coder": _tagged(call_tags.QWEN_CODER),
    }
)
