"""A model that is held to a call writes one that the parser of its own form reads, with arguments of the schema.

Random tokens stand for a model: whatever the grammar allows must come out right.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from torpor.daemon.api.constraints import Constraint, ToolChoice
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.engine.channels import Channels
from torpor.daemon.engine.constrained import Constrained
from torpor.daemon.errors import InvalidConstraint
from torpor.daemon.models import grammars
from torpor.daemon.models.call_formats import call_shape
from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.control_tokens import ControlTokens
from torpor.daemon.models.grammars import AnswerForm, Grammars, Matcher
from torpor.daemon.models.marks import Marks
from torpor.daemon.models.written_tools import offer_of

FORMS = sorted(path.stem for path in Path(importlib.import_module("mlx_lm.tool_parsers").__path__[0]).glob("[a-z]*.py"))
REQUIRED = ToolChoice("required")
VOCABULARY = 320


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": "", "parameters": parameters}


FLAT = (
    tool("look_up", ("word", "times"), word={"type": "string"}, times={"type": "integer"}, exact={"type": "boolean"}),
    tool("pay", ("unit", "sum"), unit={"type": "string", "enum": ["dollar", "euro"]}, sum={"type": "number"}),
)
NESTED = tool(
    "plan",
    ("steps",),
    steps={"type": "array", "items": {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}},
    deep={"type": "object", "properties": {"on": {"type": "boolean"}}},
)
NO_OWN_CALLS = {"has_thinking": False, "has_tool_calling": False, "structural_markers": ()}
END = 258
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {byte: chr(byte) for byte in range(0x21, 0x7F)} | {0x20: "\u0120", 0x0A: "\u010a"}
ENDING = {ALPHABET.index(each) for each in '"<}]>'}
CLOSING = (
    *("</arg_value>", "</longcat_arg_value>", "</parameter>", "\n</parameter>", "</param>", "</function>", "null"),
    *('<|"|>', "<escape>", "<|tool_call_end|>", "<|close|>json<|sep|>", "</atem:parameter>", "<arg_key>", "</invoke>"),
)


def end_of(steps: Generator[None, None, Any]) -> Any:
    """What work gives at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Form:
    """A tokenizer with the marks of one form: as special tokens, or spelled in plain ones."""

    def __init__(self, folder: Path, parser: str, *, special: bool) -> None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        marks = [module.tool_call_start, module.tool_call_end]
        if special:
            whole = [mark for mark in marks if mark and not mark.startswith("<|open|>") and mark[-1] != "="]
            known = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[ARGS]", '<|"|>']
            backend.add_special_tokens([AddedToken(each, special=True) for each in [*known, *whole]])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        known_special = {each.content for each in backend.get_added_tokens_decoder().values() if each.special}
        self.backend = backend
        self.marks = Marks.of(
            SimpleNamespace(
                has_thinking=False,
                has_tool_calling=True,
                tool_call_start=marks[0],
                tool_call_end=marks[1],
                tool_parser=module.parse_tool_call,
                structural_markers=(),
            ),
            ControlTokens({vocabulary[each]: each for each in known_special}, frozenset()),
        )
        self.grammars = Grammars(SimpleNamespace(backend_tokenizer=backend), VOCABULARY, [END])
        self.grammars.describe()

    def closing(self) -> list[list[int]]:
        """The marks of this form and of others, token by token in their plain spelling."""
        texts = [*CLOSING, *(mark for mark in self.marks.call if mark)]
        return [self.tokens(text) for text in texts]

    def matcher(self, tools: tuple[dict[str, Any], ...], choice: ToolChoice = REQUIRED, **constraint: str) -> Matcher:
        held = Constraint(**constraint) if constraint else None
        return end_of(self.grammars.matcher(AnswerForm(held, choice, tools), self.marks))

    def tokens(self, text: str) -> list[int]:
        return [ALPHABET.index(BYTES[byte]) for byte in text.encode()]

    def text(self, tokens: list[int]) -> str:
        return str(self.backend.decode(tokens, skip_special_tokens=False))

    def calls(self, said: str, tools: tuple[dict[str, Any], ...]) -> tuple[str, list[ToolCall]]:
        channels = Channels(self.marks, Root(tools), str)
        pieces = [*channels.push(said), *channels.finish()]
        return "".join(each.text for each in pieces), [each.call for each in pieces if each.call is not None]


def walked(matcher: Matcher, chance: random.Random, marks: list[list[int]], most: int = 4000) -> list[int]:
    """Tokens that a matcher allows, drawn at random. Those that end something come more often, and marks are begun and
    spelled out on purpose, within texts too."""
    tokens: list[int] = []
    spelled: list[int] = []
    while not matcher.is_at_end:
        assert len(tokens) < most
        allowed = matcher.allowed()
        if not spelled and chance.random() < 0.1:
            spelled = list(chance.choice(marks))
        if spelled and allowed[spelled[0]]:
            token = spelled.pop(0)
        else:
            spelled = []
            choices = [int(token) for token in allowed.nonzero()[0]]
            ending = [token for token in choices if token in ENDING or token > END]
            token = chance.choice(ending if ending and chance.random() < 0.3 else choices)
        if token == END:
            return tokens
        if matcher.accept(token):
            tokens.append(token)
        else:
            spelled = []
    return tokens


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a schema, as far as the schemas of these tests go."""
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    if not isinstance(value, kinds[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if schema["type"] == "array":
        return all(fits(each, schema["items"]) for each in value)
    if schema["type"] == "object":
        named = schema["properties"]
        return set(schema.get("required", ())) <= value.keys() <= named.keys() and all(
            fits(each, named[key]) for key, each in value.items()
        )
    return "enum" not in schema or value in schema["enum"]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("parser", FORMS)
def test_what_a_form_allows_its_parser_reads(tiny_model: Path, parser: str, special: bool) -> None:
    form, chance = Form(tiny_model, parser, special=special), random.Random(parser)
    tools = (*FLAT, NESTED)
    schemas = {each["name"]: each["parameters"] for each in tools}
    matcher = form.matcher(tools)
    called = set()
    for _ in range(25):
        said = form.text(walked(matcher.copy(), chance, form.closing()))
        text, calls = form.calls(said, tools)
        assert (text, len(calls)) == ("", 1), said
        assert fits(calls[0].arguments, schemas[calls[0].name]), said
        called.add(calls[0].name)
    assert called == set(schemas)


LARGE = 175928847299117063
UNION = {"anyOf": [{"type": "string"}, {"type": "null"}]}
AT, NODE = {"$ref": "#/$defs/At"}, {"$ref": "#/$defs/Node"}
MODELS = tool("a", ("id", "note", "at"), id={"const": LARGE}, note=UNION, at=AT, of={"enum": [1, "b"]}, on=NODE)
MODELS["parameters"]["$defs"] = {
    "At": {"title": "At", "oneOf": [{"type": "integer", "minimum": 10**17}, {"const": "sea"}]},
    "Node": {"type": "object", "properties": {"left": NODE, "right": NODE}},
}
"""A tool as pydantic 2 describes one."""

OTHER = {**tool("b"), "parameters": {"type": "object", "propertyNames": {"pattern": "^h"}}}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("parser", FORMS)
def test_a_call_is_of_references_unions_and_large_integers(tiny_model: Path, parser: str) -> None:
    form, chance = Form(tiny_model, parser, special=False), random.Random(parser)
    matcher = form.matcher((MODELS,))
    for _ in range(4):
        said = form.text(walked(matcher.copy(), chance, form.closing()))
        text, calls = form.calls(said, (MODELS,))
        assert (text, len(calls)) == ("", 1), said
        jsonschema.validate(calls[0].arguments, MODELS["parameters"])
        assert calls[0].arguments["id"] == LARGE


BESIDE: dict[str, Any] = {
    "list": {"type": "string", "enum": ["a", "bb", 1], "minLength": 2},
    "none of a type": {"type": ["string", "null"], "enum": ["a", "b"]},
    "type": {"type": "string", "anyOf": [{"type": "string"}, {"type": "null"}]},
    "types": {"type": ["integer", "boolean"], "anyOf": [{"type": "integer"}, {"type": "string"}]},
}
"""Keywords that bind beside each other."""


@pytest.mark.one_in(1)
@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("parser", FORMS)
def test_a_value_is_held_to_all_that_its_schema_says(tiny_model: Path, parser: str, what: str) -> None:
    form, chance = Form(tiny_model, parser, special=False), random.Random(parser)
    matcher = form.matcher((tool("b", ("a",), a=BESIDE[what]),))
    for _ in range(6):
        said = form.text(walked(matcher.copy(), chance, form.closing()))
        text, calls = form.calls(said, (tool("b", ("a",), a=BESIDE[what]),))
        assert (text, len(calls)) == ("", 1), said
        jsonschema.validate(calls[0].arguments, {"type": "object", "properties": {"a": BESIDE[what]}})


JOINED: dict[str, Any] = {
    "$ref": "#/$defs/A",
    "properties": {"b": {"enum": ["y"]}},
    "required": ["b"],
    "$defs": {"A": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}},
}


@pytest.mark.parametrize("parser", ["json_tools", "glm47"])
def test_what_stands_beside_a_reference_binds_a_call_too(tiny_model: Path, parser: str) -> None:
    form, chance = Form(tiny_model, parser, special=False), random.Random(parser)
    offered = ({"name": "b", "description": "", "parameters": JOINED},)
    said = form.text(walked(form.matcher(offered).copy(), chance, form.closing()))
    text, calls = form.calls(said, offered)
    assert (text, [call.arguments for call in calls]) == ("", [{"a": "x", "b": "y"}]), said


def allows(form: Form, matcher: Matcher, text: str) -> bool:
    tokens = [ALPHABET.index(BYTES[byte]) for byte in text.encode()]
    return all(matcher.allowed()[token] and matcher.accept(token) for token in tokens)


WRITTEN = {
    "glm47": "b<arg_key>KEY</arg_key><arg_value>5</arg_value>",
    "json_tools": '\n{"name": "b", "arguments": {"KEY": 5}}\n',
    "pythonic": "[b(KEY=5)]",
    "gemma4": "call:b{KEY:5}",
    "qwen3_coder": "\n<function=b>\n<parameter=KEY>\n5\n</parameter>\n</function>\n",
}


@pytest.mark.parametrize("parser", WRITTEN)
def test_strict_binds_its_own_tool_alone(tiny_model: Path, parser: str) -> None:
    form, other = Form(tiny_model, parser, special=False), tool("a", ("x",), x={"type": "boolean"})
    strict = form.matcher((other, OTHER), ToolChoice(strict=("a",)))
    start, end = form.marks.call
    said = WRITTEN[parser].replace("KEY", "h")
    assert allows(form, strict.copy(), f"so {start}{said}{end} and {start}{said}{end}")
    assert not allows(form, strict.copy(), start + said.replace("b", "a", 1) + end)
    assert form.calls(f"{start}{said}{end}", (OTHER,))[1][0].arguments == {"h": 5}


def test_a_refusal_names_the_tool_and_the_place_and_prints_no_grammar(tiny_model: Path) -> None:
    inner = {"type": "array", "items": {"type": "object", "propertyNames": {"pattern": "^h"}}}
    for parser in ("json_tools", "qwen3_coder"):
        form = Form(tiny_model, parser, special=False)
        with pytest.raises(InvalidConstraint) as refused:
            form.matcher((FLAT[0], tool("plan", ("steps",), steps=inner)))
        told = refused.value.message
        assert "tool 'plan'" in told
        assert "property 'steps': its items: " in told
        assert "propertyNames" in told
        assert "%json" not in told
        assert "call_" not in told


WRONG: tuple[Any, ...] = (None, 5, -1, True, "a", "#/$defs/x", "#/const", [], [1], ["a", None], {}, {"a": 5}, [[1]])
KEYWORDS = (
    *("type", "properties", "required", "items", "anyOf", "oneOf", "allOf", "enum", "const", "format", "pattern"),
    *("minItems", "maxItems", "minimum", "maxLength", "additionalProperties", "x-guidance", "$ref", "$defs"),
)


def wrong_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema as no one should write it, with a large integer, so that rules of our own read it, too."""
    found: dict[str, Any] = {"type": chance.choice(["object", "array", "integer", ["object", "null"]])}
    inner = {"const": LARGE} if depth > 2 else wrong_schema(chance, depth + 1)
    holders = ({"properties": {"a": inner}}, {"items": inner}, {"anyOf": [inner]}, {"$defs": {"x": inner}})
    found |= chance.choice(holders)
    if chance.random() < 0.4:
        found[chance.choice(KEYWORDS)] = chance.choice(WRONG)
    return found


UNHELD = ({"not": {"type": "string"}}, {"type": "string", "pattern": "(?=a)b"}, 5)
SAID: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
SAID["additionalProperties"] = False


@pytest.mark.one_in(1)
@pytest.mark.parametrize("parser", FORMS)
def test_a_tool_that_cannot_be_held_is_free_beside_a_constraint_unless_it_is_strict(
    tiny_model: Path, parser: str
) -> None:
    """A client that wants its answer as JSON offers tools of others, too."""
    unheld = UNHELD[FORMS.index(parser) % len(UNHELD)]
    form = Form(tiny_model, parser, special=True)
    tools = (tool("held", ("n",), n={"const": 7}), tool("free", x=unheld))
    chance, schema = random.Random(31), json.dumps(SAID)

    def written(one: dict[str, Any]) -> list[int]:
        return walked(form.matcher((one,)), chance, form.closing())

    for choice in (ToolChoice(), ToolChoice(strict=("held",))):
        held = partial(form.matcher, tools, choice, json_schema=schema)
        assert takes(held(), form.tokens('{"a": "x"}'))
        assert not takes(held(), form.tokens('{"a": "y"}'))
        for _ in range(2):
            assert takes(held(), written(tools[0]))
            assert not takes(held(), written(tool("held", ("n",), n={"const": 8})))
            assert takes(held(), written(tool("free", ("x",), x={"const": "some words"})))
    with pytest.raises(InvalidConstraint, match="tool 'free'"):
        form.matcher(tools, ToolChoice(strict=("free",)), json_schema=schema)
    with pytest.raises(InvalidConstraint, match="the schema"):
        form.matcher(tools, ToolChoice(), json_schema=json.dumps({"not": {"type": "string"}}))


class Counted:
    """Counts compilations; each takes a second of the thread's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._compiled = grammars._compiled
        monkeypatch.setattr(grammars, "_compiled", self)
        monkeypatch.setattr(grammars.time, "thread_time", lambda: float(self.count))

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self._compiled(*arguments)


DEEP: dict[str, Any] = {"type": "object", "properties": {f"p{at}": UNHELD[1] for at in range(9)}}
MANY = tuple(tool(f"t{at}", x=DEEP if at % 2 else {"type": "string"}) for at in range(40))


def test_what_is_compiled_for_one_request_is_bounded_however_many_tools_it_has(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once, four alone, those that are held, and none."""
    form, counted = Form(tiny_model, "json_tools", special=True), Counted(monkeypatch)
    strict = AnswerForm(None, ToolChoice(strict=tuple(each["name"] for each in MANY)), MANY)
    told = {each["name"] for each in MANY} - {"t0", "t2"}  # none is looked at behind t3
    assert end_of(form.grammars.unheld(strict, form.marks)) == told
    assert counted.count <= 7
    counted.count = 0
    held = form.matcher(MANY, ToolChoice(), json_schema=json.dumps(SAID))
    assert takes(held, form.tokens('{"a": "x"}'))
    assert counted.count <= 7


def test_the_place_of_a_fault_is_looked_for_within_the_same_bound(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, counted = Form(tiny_model, "json_tools", special=True), Counted(monkeypatch)
    for tools, choice in ((MANY, REQUIRED), (MANY, ToolChoice(strict=("t1",)))):
        counted.count = 0
        with pytest.raises(InvalidConstraint):
            form.matcher(tools, choice, **({} if choice is REQUIRED else {"json_schema": json.dumps(SAID)}))
        assert counted.count <= 9
    monkeypatch.setattr(grammars, "_SEARCH_S", 1000.0)
    with pytest.raises(InvalidConstraint, match=r"'t1'.*property 'p0'"):
        form.matcher(MANY, REQUIRED)


def takes(matcher: Matcher, tokens: list[int]) -> bool:
    """Whether an answer may be these tokens."""
    for token in tokens:
        if matcher.is_at_end or not matcher.allowed()[token] or not matcher.accept(token):
            return False
    return matcher.is_at_end or bool(matcher.allowed()[END])


@pytest.mark.one_in(1)
@pytest.mark.parametrize("parser", FORMS)
def test_a_schema_of_wrong_shapes_is_held_to_or_refused(tiny_model: Path, parser: str) -> None:
    form, chance = Form(tiny_model, parser, special=False), random.Random(parser)
    told: list[str] = []
    for _ in range(30):
        wrong = tool("f", ("a",), a=wrong_schema(chance))
        for choice in (REQUIRED, ToolChoice(strict=("f",))):
            try:
                form.matcher((wrong,), choice)
            except InvalidConstraint as error:
                told.append(error.message)
        form.matcher((wrong, FLAT[0]), ToolChoice(strict=(FLAT[0]["name"],)))
    assert len(told) > 10
    assert all("tool 'f'" in each for each in told)


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("parser", [*FORMS, "marks"])
def test_a_call_in_the_shape_that_is_offered_is_read(tiny_model: Path, parser: str, special: bool) -> None:
    form = Form(tiny_model, parser, special=special) if parser in FORMS else None
    marks = form.marks if form is not None else Marks.of(SimpleNamespace(**NO_OWN_CALLS))
    said = call_shape(marks)
    assert said.count("NAME") == 1
    for placeholder, value in (("NAME", "look"), ("{...}", '{"path": "sea"}'), (", KEY=VALUE", ""), (",KEY:VALUE", "")):
        said = said.replace(placeholder, value)
    said = said.replace("KEY", "path").replace("VALUE", "sea").replace("TEXT", "sea")
    channels = Channels(marks, Root((tool("look", path={"type": "string"}),)), str)
    pieces = [*channels.push(f"so: {said}"), *channels.finish()]
    assert [(each.call.name, each.call.arguments) for each in pieces if each.call] == [("look", {"path": "sea"})]
    assert "".join(each.text for each in pieces) == "so:"


def test_a_form_that_is_not_known_has_no_shape(tiny_model: Path) -> None:
    marks = replace(Form(tiny_model, "mistral", special=False).marks, parse=len)
    assert call_shape(marks) == ""
    assert offer_of((FLAT[0],), call_shape(marks)).endswith("</tools>")


GUARDED = (
    ("qwen3_coder", "Close it with </parameter> or"),
    ("glm47", "a <arg_key> b"),
    ("minicpm5", 'an <param name="x"> b'),
)


@pytest.mark.parametrize(("parser", "words"), GUARDED)
def test_what_no_argument_may_have_in_it_may_stand_in_an_answer_without_a_call(
    tiny_model: Path, parser: str, words: str
) -> None:
    form, tools = Form(tiny_model, parser, special=False), (tool("say", ("a",), a={"type": "string"}),)
    assert allows(form, form.matcher(tools, ToolChoice(strict=("say",))), words)
    assert allows(form, form.matcher(tools, ToolChoice(), json_schema='{"type": "string"}'), json.dumps(words))
    body = call_shape(form.marks).replace("NAME", "say").replace("KEY", "a").partition("VALUE")[0]
    for choice, held in ((REQUIRED, {}), (ToolChoice(strict=("say",)), {}), (ToolChoice(), {"json_schema": "{}"})):
        assert allows(form, form.matcher(tools, choice, **held), body + "so")
        assert not allows(form, form.matcher(tools, choice, **held), body + words)


def test_thinking_that_begins_like_a_call_may_go_on_until_they_differ(tiny_model: Path) -> None:
    form, tools = Form(tiny_model, "kimi_k3", special=True), (tool("wait"),)
    ids = form.backend.get_vocab(with_added_tokens=True)
    opens, closes, parts = ids["<|open|>"], ids["<|close|>"], ids["<|sep|>"]
    thinks, thought = ((mark, *form.tokens("think"), parts) for mark in (opens, closes))
    calls = [opens, *form.tokens("tools"), parts]
    marks = replace(form.marks, reasoning_ids=(thinks, thought))
    model: Any = SimpleNamespace(
        layout=SimpleNamespace(vocabulary=VOCABULARY), end_tokens=frozenset({END}), marks=marks
    )
    for choice, held in (
        (REQUIRED, {}),
        (ToolChoice(strict=("wait",)), {}),
        (ToolChoice(), {"json_schema": '{"type": "string"}'}),
    ):
        matcher = form.matcher(tools, choice, **held)
        for way in (calls, [*thinks, *calls]):
            bound = Constrained(matcher.copy(), model, (), Root(tools))
            for token in way:
                assert bound.allowed("text")[token]
                assert bound.accept(token, "text")
            assert bound.allowed("text")[opens]  # of the call's own mark
            assert not bound.allowed("text")[END]


def test_an_answer_may_stand_in_the_marks_that_no_channel_shows(tiny_model: Path) -> None:
    """Where they begin as a call does, a model that opens its answer would have to call else."""
    form, tools = Form(tiny_model, "kimi_k3", special=True), (tool("wait"),)
    ids = form.backend.get_vocab(with_added_tokens=True)

    def spelled(text: str) -> list[int]:
        pieces = re.split(r"(<\|open\|>|<\|close\|>|<\|sep\|>)", text)
        return [token for each in pieces for token in ([ids[each]] if each in ids else form.tokens(each))]

    def takes(matcher: Matcher, text: str) -> bool:
        return all(matcher.allowed()[token] and matcher.accept(token) for token in spelled(text))

    opens, closes = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
    form.marks = replace(form.marks, scaffold=(opens, closes))
    strict, none = (form.matcher(tools, choice) for choice in (ToolChoice(strict=("wait",)), ToolChoice(mode="none")))
    for said in (f"{opens}so{closes}", f"{opens}response{closes}{opens}", "so", f"so{opens}"):
        for whole in (strict.copy(), none.copy()):
            assert takes(whole, said), said
            assert whole.allowed()[END]
    begun = strict.copy()
    assert takes(begun, f"{opens}so{closes}<|open|>tools<|sep|>")
    assert not begun.allowed()[END], "a call is held to its tool"
    assert takes(begun, '<|open|>call tool="wait" index="1"<|sep|>')
    assert not takes(none.copy(), "<|open|>tools")
    assert not takes(strict.copy(), "<|open|>other")


@pytest.mark.parametrize(
    ("special", "call"), [(True, 'f[ARGS]{"a": 1}'), (False, '[{"name": "f", "arguments": {"a": 1}}]')]
)
def test_behind_a_call_that_no_mark_ends_only_calls_may_stand_and_all_are_read(
    tiny_model: Path, special: bool, call: str
) -> None:
    form, tools = Form(tiny_model, "mistral", special=special), (tool("f", ("a",), a={"type": "integer"}),)
    ids = form.backend.get_vocab(with_added_tokens=True)

    def spelled(text: str) -> list[int]:
        pieces = re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text)
        return [token for each in pieces for token in ([ids[each]] if each in ids else form.tokens(each))]

    def after(text: str) -> Matcher:
        matcher = form.matcher(tools, ToolChoice(strict=("f",)))
        for token in spelled(text):
            assert matcher.allowed()[token]
            assert matcher.accept(token)
        return matcher

    said = f"so [TOOL_CALLS]{call}"
    for number in (1, 2, 3):
        matcher = after(said)
        allowed = matcher.allowed()
        assert {int(token) for token in allowed.nonzero()[0]} <= {END, spelled("[TOOL_CALLS]")[0]}
        assert allowed[END]
        text, calls = form.calls(said, tools)
        assert (text.strip(), [each.arguments for each in calls]) == ("so", [{"a": 1}] * number)
        said += f"[TOOL_CALLS]{call}"
    assert after("only text").allowed()[END]
