"""What a model writes as a call is read back as it was meant, with the same types, or it is text; never a call with
less."""

from __future__ import annotations

import ast
import importlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from torpor.daemon.engine.channels import Channels
from torpor.daemon.models import call_reading
from torpor.daemon.models.call_reading import CallEnd, NoCall, read_calls
from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.marks import Marks

FORMS = sorted(path.stem for path in Path(importlib.import_module("mlx_lm.tool_parsers").__path__[0]).glob("[a-z]*.py"))
CONTROLS = (
    *("</tool_call>", "<tool_call>", "</longcat_tool_call>", "</function>", "</invoke>", "</minimax:tool_call>"),
    *(
        "<tool_call|>",
        "<end_function_call>",
        "<|tool_call_end|>",
        "</atem:function_calls>",
        "<|tool_calls_section_end|>",
    ),
    *("<|close|>tools<|sep|>", "[TOOL_CALLS]", "[ARGS]", "</arg_value>", "<arg_key>", "</parameter>", "<parameter=a>"),
    *('<|"|>', "<escape>", "</param>", "]]>", "</atem:parameter>", "<|close|>argument<|sep|>", "</longcat_arg_value>"),
)
TEXTS = (
    *("", " ", "\n", "plain", "    def f():\n        return 1\n", "\tindented \n\n", 'say "hi', "it's", "a\\", "\\n"),
    *(
        "a\n]]> b",
        "null",
        "None",
        "true",
        "1",
        "5.0",
        "[1]",
        '{"a": 1}',
        '"quoted"',
        "]})>",
        ", x: 1}",
        "é 中 😀 \u2028 \x00",
    ),
    *(f"before {mark} behind" for mark in CONTROLS),
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    "f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>\n<tool_call>f",
)
INTEGERS = (0, -1, 1, 175928847299117063, 2**63 - 1, -(2**63), 2**64 - 1)
NUMBERS = (0.5, -1.25, 1e300, 1.5e-7, 5.0, 3)
NULLABLE = [{"type": "string"}, {"type": "null"}]


def values() -> Iterator[tuple[dict[str, Any], Any]]:
    """Schemas of an argument, each with a value."""
    for text in TEXTS:
        yield {"type": "string"}, text
        yield {"anyOf": NULLABLE}, text
        yield {"type": "array", "items": {"type": "string"}}, [text, text]
        yield {"type": "object"}, {"in": {"deep": [text]}}
        yield {"enum": ["plain", text]}, text
    for number in INTEGERS:
        yield {"type": "integer"}, number
        yield {"anyOf": [{"type": "integer"}, {"type": "null"}]}, number
        yield {"type": ["integer", "string"]}, number
        yield {"const": number}, number
        yield {}, number
        yield {"$ref": "#/$defs/Whole"}, number
    for number in NUMBERS:
        yield {"type": "number"}, number
        yield {"type": "array"}, [number]
    for truth in (True, False):
        yield {"type": "boolean"}, truth
        yield {"oneOf": [{"type": "boolean"}, {"type": "string"}]}, truth
    yield from (({"anyOf": NULLABLE}, None), ({"type": "null"}, None), ({"type": "string", "nullable": True}, None))
    yield from (({"type": "array"}, []), ({"type": "object"}, {}), ({"type": "array"}, [[], {}, None, True, 1, "1"]))


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def each(arguments: dict[str, Any], form: str, said: Callable[[Any], str] = plain) -> str:
    """Each argument in a form with KEY and VALUE."""
    return "".join(form.replace("KEY", key, 1).replace("VALUE", said(value), 1) for key, value in arguments.items())


def bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(item, quote) for item in value) + "]"
    return dumped(value)


def section(value: Any) -> str:
    """As the template of MiniCPM 5 does it."""
    text = plain(value)
    return f"<![CDATA[{text}]]>" if any(mark in text for mark in "<&\n") else text


def k3(arguments: dict[str, Any]) -> str:
    form = '<|open|>argument key="KEY" type="{}"<|sep|>VALUE<|close|>argument<|sep|>'
    said = (
        each({key: value}, form.format("string" if isinstance(value, str) else "json"))
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="f" index="1"<|sep|>{"".join(said)}<|close|>call<|sep|>'


def python(arguments: dict[str, Any]) -> str:
    return f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


GLM = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
LONGCAT = "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>\n"
MINIMAX = '\n<invoke name="f">\n{}</invoke>\n'
MUSE = '<atem:parameter name="KEY">VALUE</atem:parameter>'
K2 = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"

WRITERS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "function_gemma": lambda a: f"call:f{bare(a, '<escape>')}",
    "gemma4": lambda a: "call:f" + bare(a, '<|"|>'),
    "glm47": lambda a: "f" + each(a, GLM),
    "json_tools": lambda a: "\n" + dumped({"name": "f", "arguments": a}) + "\n",
    "kimi_k2": lambda a: K2.format(dumped(a)),
    "kimi_k3": k3,
    "laguna": lambda a: "f\n" + each(a, GLM.replace("><", ">\n<") + "\n"),
    "longcat": lambda a: "f\n" + each(a, LONGCAT),
    "minicpm5": lambda a: '"f">' + each(a, '<param name="KEY">VALUE</param>', section),
    "minimax_m2": lambda a: MINIMAX.format(each(a, '<parameter name="KEY">VALUE</parameter>\n')),
    "mistral": lambda a: f"f[ARGS]{dumped(a)}",
    "muse_spark": lambda a: f'<atem:invoke name="f">{each(a, MUSE, dumped)}</atem:invoke>',
    "pythonic": python,
    "qwen3_coder": lambda a: f"\n<function=f>\n{each(a, '<parameter=KEY>@VALUE@</parameter>@')}</function>\n".replace(
        "@", "\n"
    ),
}
OWN_TAGS: Mapping[str, tuple[str, ...]] = {
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "glm47": ("<arg_value>", "</arg_value>", "<arg_key>"),
    "kimi_k3": ("<|close|>argument<|sep|>",),
    "laguna": ("<arg_value>", "</arg_value>", "<arg_key>"),
    "longcat": ("<longcat_arg_value>", "</longcat_arg_value>"),
    "minicpm5": ("]]>",),
    "minimax_m2": ("</parameter>",),
    "qwen3_coder": ("<parameter=", "</parameter>"),
}
"""With one of these in it, a text may not be told from what it would end."""
PLAIN_TEXTS = ("glm47", "laguna", "longcat", "minicpm5", "minimax_m2", "qwen3_coder")
"""Forms in which a text has no quotes, so that some values of two kinds are written alike."""


def marks_of(parser: str) -> Marks:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return Marks.of(
        SimpleNamespace(
            has_thinking=False,
            has_tool_calling=True,
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
            structural_markers=(),
            all_special_ids=[],
            get_vocab=dict,
        )
    )


def tool_of(**properties: Any) -> dict[str, Any]:
    known = {"Whole": {"type": "integer"}, "Few": {"enum": ["low", "high"]}}
    parameters = {"type": "object", "properties": properties, "$defs": known}
    return {"name": "f", "description": "", "parameters": parameters}


def told(marks: Marks, tool: dict[str, Any], said: str, *, is_cut: bool = False) -> tuple[str, list[Any]]:
    """The text of an answer, and the arguments of its calls."""
    channels = Channels(marks, Root((tool,)), "id{}".format)
    pieces = [*channels.push(said), *channels.finish(is_cut=is_cut)]
    return "".join(piece.text for piece in pieces), [piece.call.arguments for piece in pieces if piece.call]


def typed(value: Any) -> str:
    """A value with its types: 1, 1.0, True and "1" differ."""
    return repr(value)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def is_ambiguous(parser: str, schema: dict[str, Any], value: Any) -> bool:
    if parser not in PLAIN_TEXTS or not isinstance(value, str) or schema == {"type": "string"}:
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return "anyOf" in schema or "oneOf" in schema


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_is_read_as_it_was_written_or_is_text(parser: str) -> None:
    marks, has_texts = marks_of(parser), 0
    for schema, value in values():
        tool, arguments = tool_of(first={"type": "string"}, a=schema), {"first": "x", "a": value}
        said = marks.call[0] + WRITERS[parser](arguments) + marks.call[1]
        shown, calls = told(marks, tool, said)
        quotes_tags = any(mark in text for mark in OWN_TAGS.get(parser, ()) for text in texts_in(value))
        if is_ambiguous(parser, schema, value):
            continue
        if calls or not quotes_tags:
            assert [typed(each) for each in calls] == [typed(arguments)], (schema, said)
            assert shown == ""
        else:
            assert shown == said
            has_texts += 1
    assert has_texts > 0 or parser not in OWN_TAGS


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_that_breaks_off_is_text_or_nothing_and_never_less(parser: str) -> None:
    marks = marks_of(parser)
    arguments = {"first": "x = 1\n", "a": "  see </function> and\n"}
    tool, body = tool_of(first={"type": "string"}, a={"type": "string"}), WRITERS[parser](arguments)
    whole = marks.call[0] + body + marks.call[1]
    shorter = [WRITERS[parser](each).strip() for each in ({}, {"first": arguments["first"]})]
    for at in range(len(marks.call[0]), len(whole)):
        fewer = whole[len(marks.call[0]) : at].strip() in shorter  # a call with fewer arguments, each of them closed
        for said in {whole[:at], whole[:at] + marks.call[1] * (not fewer)}:
            shown, calls = told(marks, tool, said)
            # The mark behind it may be missing, where the form itself says that all has come.
            assert calls in ([], [arguments]), said
            assert shown == ("" if calls else said)
            assert told(marks, tool, said, is_cut=True) in (("", calls), (said, []))
    assert told(marks, tool, whole) == ("", [arguments])


@pytest.mark.parametrize("parser", FORMS)
def test_where_a_call_ends_does_not_hang_on_how_its_text_comes(parser: str) -> None:
    marks = marks_of(parser)
    arguments = {"first": f'{marks.call[1]} \\" {marks.call[1]}', "a": [f"{marks.call[0]}", "'"]}
    said = f"hm {marks.call[0]}{WRITERS[parser](arguments)}{marks.call[1]}"
    behind = f" so {marks.call[1]}" if marks.call[1] else ""
    channels = Channels(marks, Root((tool_of(first={"type": "string"}),)), str)
    pieces = [piece for letter in said + behind for piece in channels.push(letter)]
    pieces += channels.finish()
    assert [piece.call.arguments for piece in pieces if piece.call] == [arguments]
    assert "".join(piece.text for piece in pieces) == "hm" + behind.lstrip()


COMMON: Mapping[str, tuple[dict[str, Any], Any]] = {
    "text": ({"type": "string"}, "src/a b.py"),
    "whole": ({"type": "integer"}, 5),
    "part": ({"type": "number"}, 0.5),
    "truth": ({"type": "boolean"}, True),
    "list": ({"type": "array"}, [1, "two"]),
    "map": ({"type": "object"}, {"a": "b"}),
}


@pytest.mark.parametrize("parser", FORMS)
def test_a_common_call_is_read_as_mlx_lm_reads_it(parser: str) -> None:
    marks, flat = marks_of(parser), parser == "function_gemma"  # it has no lists and maps
    common = {key: each for key, each in COMMON.items() if not (flat and key in ("list", "map"))}
    tool = tool_of(**{key: schema for key, (schema, _) in common.items()})
    body = WRITERS[parser]({key: value for key, (_, value) in common.items()})
    parsed = marks.parse(body.strip(), [{"type": "function", "function": tool}])
    assert read_calls(marks, body, [tool], is_ended=True) == (parsed if isinstance(parsed, list) else [parsed])


def test_each_form_of_mlx_lm_has_its_reader() -> None:
    assert {marks_of(parser).parser for parser in FORMS} == call_reading._FORMS.keys() - {"marks"}


@pytest.mark.parametrize("parser", FORMS)
def test_several_calls_are_each_read(parser: str) -> None:
    marks, bodies = marks_of(parser), [WRITERS[parser]({"a": text}) for text in ("x", "y")]
    alone = ("glm47", "laguna", "longcat", "minicpm5", "json_tools")
    said = (marks.call[1] + marks.call[0]).join(bodies) if parser in alone else "".join(bodies)
    said = said.replace("][", ",").replace("}[TOOL_CALLS]", "}")
    assert told(marks, tool_of(a={"type": "string"}), marks.call[0] + said + marks.call[1]) == (
        "",
        [{"a": "x"}, {"a": "y"}],
    )


READ = (
    ("json_tools", '{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
    ("json_tools", '{"name": "f", "arguments": {"a": 1}, "thought": "x"}', None),
    ("json_tools", '{"name": "f", "arguments": {"a": 1, "a": 2}}', None),
    ("json_tools", '{"name": "f", "arguments": []}', None),
    ("json_tools", '{"name": "f"} and more', None),
    ("mistral", 'f[ARGS]{"a": 1} and more', None),
    ("mistral", 'see f[ARGS]{"a": 1}', None),
    ("pythonic", "[f('x')]", None),
    ("pythonic", "[]", None),
    ("pythonic", "[f(µm=3, ｎ=1)]", {"µm": 3, "ｎ": 1}),
    ("pythonic", '[f(a="ﬁ", μ=1)]', {"a": "ﬁ", "μ": 1}),
    ("pythonic", '[f(a=1, **{"ﬁ": 2})]', None),
    ("json_tools", "[]", None),
    ("mistral", "[]", None),
    ("pythonic", "[f(a=1, a=2)]", None),
    ("pythonic", "[f(a=x)]", None),
    ("pythonic", '[f(a={"b": 1, "b": 2})]', None),
    ("pythonic", '[f(a=[{"\\ud83d\\ude00": 1, "\U0001f600": 2}])]', None),
    ("mistral", 'f[ARGS]"{\\"a\\": 1, \\"a\\": 2}"', None),
    ("mistral", 'f[ARGS]"{\\"a\\": 1}"', {"a": 1}),
    ("kimi_k2", 'functions.f:0<|tool_call_argument_begin|>"{\\"a\\": 1, \\"a\\": 2}"', None),
    ("pythonic", "so [f(a=1)]", None),
    ("pythonic", "[f(a=1)] # then ask", None),
    ("pythonic", "[f(a=1) # if it is safe\n]", None),
    ("pythonic", '[f(a="# 1")]', {"a": "# 1"}),
    ("pythonic", '[f(a={"b": true, "c": null})]', {"a": {"b": True, "c": None}}),
    ("pythonic", '[f(a="\\ud83d\\ude00")]', {"a": "\U0001f600"}),
    ("function_gemma", "call:f{a:<escape>}<escape>}", {"a": "}"}),
    ("function_gemma", "call:f{a:{b:1}}", {"a": {"b": 1}}),
    ("gemma4", "call:f{a:1} and more", None),
    ("gemma4", 'call:f{a: <|"|>x<|"|>, b: [1, 2]}', {"a": "x", "b": [1, 2]}),
    ("glm47", "f a=1", None),
    ("glm47", "f and more", None),
    ("glm47", "f<arg_key>a</arg_key><arg_value>1</arg_value>more", None),
    ("glm47", '{"name": "f", "arguments": {"a": 1}}', {"a": 1}),
    ("glm47", "f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>", None),
    ("kimi_k2", "functions.f:0<|tool_call_argument_begin|>{'a': 1}", None),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}', None),
    ("muse_spark", '<atem:invoke name="f"><atem:parameter name="a">"x</atem:parameter></atem:invoke>', None),
    ("muse_spark", '<atem:invoke name="f"><atem:parameter name="a"> x </atem:parameter></atem:invoke>', {"a": " x "}),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></function><function=g></function>", None),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n{'b': None}\n</parameter>\n</function>", {"a": "{'b': None}"}),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter> <parameter=a>2</parameter></function>", None),
)


@pytest.mark.parametrize(("parser", "body", "arguments"), READ)
def test_what_else_stands_in_a_call_makes_it_text(parser: str, body: str, arguments: Any) -> None:
    marks = marks_of(parser)
    said = marks.call[0] + body + marks.call[1]
    assert told(marks, tool_of(), said) == ((said, []) if arguments is None else ("", [arguments]))


TYPED = (
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "5", "5"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", ...),
    ({"type": "boolean"}, "yes", ...),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "1.75928847299117063e17", 175928847299117063),
    ({"type": "integer"}, "5.5", ...),
    ({"type": "integer"}, "5 # at most", ...),
    ({"type": "array"}, "['a#'] # and more", ...),
    ({"type": "array"}, "['a#']", ["a#"]),
    ({"type": "integer"}, "five", ...),
    ({"type": "integer"}, str(2**64), ...),
    ({"type": "number"}, "1e300", 1e300),
    ({"type": "number"}, "175928847299117063", 175928847299117063),
    ({"type": "number"}, "1e999", ...),
    ({"type": "number"}, "NaN", ...),
    ({"type": "array"}, "['a', None]", ["a", None]),
    ({"type": "array"}, "(1, 2)", ...),
    ({"type": "object"}, "{1: 2}", ...),
    ({"type": "object"}, '{"a": "one\ntwo"}', {"a": "one\ntwo"}),
    ({"allOf": [{"$ref": "#/$defs/Whole"}], "description": "x"}, "7", 7),
    ({"anyOf": [{"$ref": "#/$defs/Whole"}, {"$ref": "#/$defs/Self"}]}, "7", 7),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "nil", "nil"),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "1.0", "1.0"),
    ({"type": ["string", "integer"]}, "1.5", "1.5"),
    ({"type": ["string", "integer"]}, "12345678901234567890123", "12345678901234567890123"),
    ({"type": ["string", "integer"]}, "1e999", "1e999"),
    ({"type": ["string", "number"]}, "1.5", 1.5),
    ({"type": ["string", "number"]}, "1e5", "1e5"),
    ({"type": ["string", "number"]}, "1.50", "1.50"),
    ({"type": "object"}, "{'a': 1, 'a': 2}", ...),
    ({"enum": ["auto", 100000]}, "1e5", 100000),
    ({"enum": ["auto", 1.5]}, "1.50", 1.5),
    ({"enum": ["1e5", 100000]}, "1e5", "1e5"),
    ({"enum": ["auto", 100000]}, "other", "other"),
    ({"title": "A", "anyOf": [{"const": "auto", "title": "B"}, {"type": "number"}]}, "1e5", 1e5),
    ({"anyOf": [{"enum": ["low", "high"]}, {"type": "integer"}]}, "2.0", 2),
    ({"anyOf": [{"$ref": "#/$defs/Few"}, {"type": "number"}]}, "1e5", 1e5),
    ({"anyOf": [{"$ref": "#/$defs/Few"}, {"type": "string"}, {"type": "number"}]}, "1e5", "1e5"),
    ({"type": ["string", "number"], "enum": 5}, "1e5", "1e5"),
)


@pytest.mark.parametrize("parser", ["glm47", "minimax_m2", "minicpm5", "qwen3_coder"])
def test_a_value_between_tags_has_the_type_of_its_schema_or_the_call_is_text(parser: str) -> None:
    marks = marks_of(parser)
    for schema, text, value in TYPED:
        said = marks.call[0] + WRITERS[parser]({"a": text}) + marks.call[1]
        shown, calls = told(marks, tool_of(a=schema), said)
        expected = (said, []) if value is ... else ("", [typed({"a": value})])
        assert (shown, [typed(each) for each in calls]) == expected, (schema, text)


V: Final = {"type": "object", "properties": {"v": {"type": "string"}}}
WITHIN: Final[dict[str, dict[str, Any]]] = {
    "a reference": {"$ref": "#/definitions/A", "definitions": {"A": V}},
    "a reference to a reference": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": V}},
    "a reference to itself": {"$ref": "#", **V},
    "allOf": {"type": "object", "allOf": [{"required": ["v"]}, V]},
    "allOf of all": {"properties": {"v": {"type": ["string", "null"]}}, "allOf": [V]},
    "anyOf": {
        "anyOf": [{**V, "additionalProperties": False}, {"properties": {"w": {}}, "additionalProperties": False}]
    },
    "oneOf": {"oneOf": [{"properties": {"w": {"type": "integer"}}}, V]},
    "additionalProperties": {"additionalProperties": {"type": "string"}},
    "patternProperties": {"patternProperties": {"^v": {"type": "string"}}, "additionalProperties": False},
}


@pytest.mark.parametrize("parser", ["glm47", "minimax_m2", "minicpm5", "qwen3_coder"])
@pytest.mark.parametrize("where", WITHIN)
def test_a_value_between_tags_has_the_type_that_any_part_of_its_schema_says(parser: str, where: str) -> None:
    marks = marks_of(parser)
    tool = {"name": "f", "description": "", "parameters": WITHIN[where]}
    for text in ("12345", "true", "null", '{"a": 1}'):
        said = marks.call[0] + WRITERS[parser]({"v": text}) + marks.call[1]
        shown, calls = told(marks, tool, said)
        assert (shown, [typed(each) for each in calls]) == ("", [typed({"v": text})])


@pytest.mark.parametrize(
    "value", ['"half \\ud83d."', str(2**64), "1e999", "[" * 40 + "]" * 40, "NaN", '{"\\udc00": 1}']
)
def test_what_no_transport_carries_is_text(value: str) -> None:
    marks = marks_of("json_tools")
    said = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    assert told(marks, tool_of(), said) == (said, [])


def end_of(marks: Marks, said: str) -> int:
    """Where a call ends, as it comes letter by letter, and at once."""
    end = CallEnd(marks)
    found = next((at for upto in range(len(said) + 1) if (at := end.find(said[:upto])) >= 0), -1)
    assert CallEnd(marks).find(said) == found
    return found


PYTHON_TEXTS = (
    *('"""5" wide"""', "'''it's'''", "'''it's\n@ x'''", '""""@"""', '"" "@"', "''''''", '"""a ""@"" c\\""""'),
    *("r'\\'@'", 'r"""a\\"@"""', 'R"\\\\"', "u'''#'''", '"#\'@"', "'''\\\\@'''", "r'@\\\\'", "'a\\\n@'"),
)


@pytest.mark.parametrize("text", PYTHON_TEXTS)
def test_a_text_of_python_is_read_whole_whatever_its_quotes(text: str) -> None:
    marks = marks_of("pythonic")
    literal = text.replace("@", marks.call[1])
    said = f"[f(b='', a={literal})]{marks.call[1]}"
    assert end_of(marks, said + " done") == len(said) - len(marks.call[1])
    arguments = {"b": "", "a": ast.literal_eval(literal)}
    assert told(marks, tool_of(), f"{marks.call[0]}{said} done") == ("done", [arguments])


def test_a_call_of_python_ends_where_python_reads_its_last_text() -> None:
    marks, chance, read = marks_of("pythonic"), random.Random(0), 0
    letters = ('"', "'", '"""', "'''", "\\", "\n", "#", "r", " ", "x", marks.call[1])
    for _ in range(4000):
        quote = chance.choice(('"', "'", '"""', "'''"))
        literal = chance.choice(("", "r")) + quote + "".join(chance.choices(letters, k=chance.randrange(8))) + quote
        body = f"[f(a={literal})]"
        try:
            read_calls(marks, body, [tool_of()], is_ended=True)
        except Exception:  # it raises any error for what is no call
            continue
        assert end_of(marks, body + marks.call[1]) == len(body), body
        read += 1
    assert read > 500


@pytest.mark.parametrize("comment", ["it's", '5" wide', "''' and"])
def test_a_quote_in_a_comment_hides_no_end_of_a_call(comment: str) -> None:
    marks = marks_of("pythonic")
    begins, ends = marks.call
    said = f"{begins}[f(a=1)] # {comment}{ends}"
    assert told(marks, tool_of(), f"{said} so {begins}[f(a='# {ends}')]{ends}") == (f"{said} so", [{"a": f"# {ends}"}])


@pytest.mark.parametrize("parser", ["glm47", "laguna", "longcat", "json_tools"])
@pytest.mark.parametrize("blanks", ["", "\n "])
def test_a_mark_in_a_call_that_is_written_as_json_ends_nothing(parser: str, blanks: str) -> None:
    marks = marks_of(parser)
    for text in (f"see {marks.call[1]} there", f'say \\" {marks.call[1]}', "<arg_key>a</arg_key><arg_value>x"):
        body = blanks + dumped({"name": "f", "arguments": {"a": text, "b": [text]}}) + blanks
        whole = marks.call[0] + body + marks.call[1]
        assert end_of(marks, body + marks.call[1]) == len(body)
        assert told(marks, tool_of(), whole + " done") == ("done", [{"a": text, "b": [text]}])
        assert told(marks, tool_of(), marks.call[0] + body) == ("", [{"a": text, "b": [text]}])
        assert told(marks, tool_of(), marks.call[0] + body.rstrip()[:-1]) == (marks.call[0] + body.rstrip()[:-1], [])


@pytest.mark.parametrize("blanks", ["", " "])
def test_a_plain_text_of_muse_may_begin_with_the_mark(blanks: str) -> None:
    marks = marks_of("muse_spark")
    text = f"{blanks}{marks.call[1]} x"
    said = f'<atem:invoke name="f">{each({"a": text}, MUSE)}</atem:invoke>'
    assert told(marks, tool_of(a={"type": "string"}), marks.call[0] + said + marks.call[1]) == ("", [{"a": text}])


@pytest.mark.one_in(1)
@pytest.mark.parametrize("parser", ["json_tools", "glm47", "muse_spark", "pythonic"])
def test_the_end_of_a_call_that_quotes_many_is_found_in_time_that_its_length_bounds(parser: str) -> None:
    marks = marks_of(parser)
    arguments = {"a": [marks.call[1]] * 50_000, "b": [marks.call[1] * 50_000]}
    bodies = [WRITERS[parser](arguments)]
    bodies += [dumped({"name": "f", "arguments": arguments})] if parser == "glm47" else []
    bodies += [f"[f(a='''{marks.call[1] * 50_000}''')]"] if parser == "pythonic" else []
    for body in bodies:
        begun = time.process_time()
        assert CallEnd(marks).find(body + marks.call[1]) == len(body)
        assert time.process_time() - begun < 5, "it was looked at anew for each mark"


def test_sections_that_are_not_closed_are_told_in_time_that_their_length_bounds() -> None:
    marks = marks_of("minicpm5")
    for argument in ('<param name="a{}"><![CDATA[x</param>', '<param name="a{}"> <![CDATA[]]</param>'):
        body = '"f">' + "".join(map(argument.format, range(10_000)))
        begun = time.process_time()
        with pytest.raises(NoCall, match="not closed"):
            read_calls(marks, body, [tool_of()], is_ended=True)
        assert time.process_time() - begun < 2, "each was looked for up to the end"
    closed = '"f"><param name="a"> <![CDATA[<![CDATA[x]] </param>]]> </param>'
    (call,) = read_calls(marks, closed, [tool_of()], is_ended=True)
    assert call["arguments"] == {"a": "<![CDATA[x]] </param>"}


BROKEN_OFF = (
    ("qwen3_coder", "<function=f>\n<parameter={}"),
    ("minimax_m2", '<invoke name="f">\n<parameter name="{}'),
    ("glm47", "f<arg_key>{}</arg_value>"),
    ("longcat", "f<longcat_arg_key>{}</longcat_arg_value>"),
    ("minicpm5", '"f"><param name="{}</param>'),
    ("muse_spark", '<atem:invoke name="f"><atem:parameter name="{}'),
)


@pytest.mark.parametrize(("parser", "body"), BROKEN_OFF)
def test_a_tag_that_breaks_off_in_a_name_with_many_blanks_is_text_at_once(parser: str, body: str) -> None:
    # Read with steps back over the blanks, it would take longer than any test may.
    marks = marks_of(parser)
    said = marks.call[0] + body.format("\n" * 10_000) + marks.call[1]
    assert told(marks, tool_of(), said) == (said, [])


def test_calls_of_one_answer_have_ids_of_their_own() -> None:
    said = '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>' * 3
    channels = Channels(marks_of("json_tools"), Root((tool_of(),)), "id{}".format)
    ids = [piece.call.id for piece in [*channels.push(said), *channels.finish()] if piece.call]
    assert ids == ["x", "id2", "id3"]
