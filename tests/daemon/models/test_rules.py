"""A grammar says each number exactly, keeps to what a schema binds, and a refusal names the place."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from torpor.daemon.models import rules
from torpor.daemon.models.call_reading import INTEGERS
from torpor.daemon.models.rules import Rules, _digits, _is_long, quoted
from torpor.daemon.models.schemas import NotForcible, alternatives, binding, kinds_of

WORDS = LLTokenizer("byte")
LARGE = 175928847299117063


def grammar(schema: dict[str, Any], *, is_closed: bool) -> str:
    found = Rules(quoted, "value", INTEGERS if is_closed else None, is_closed=is_closed)
    found.begin(binding(schema))
    with found.at("the schema"):
        start = found.json(found.root)
    return f"start: {start}\n{found.text()}"


def says(schema: dict[str, Any], text: str, *, is_closed: bool) -> bool:
    matcher = LLMatcher(WORDS, grammar(schema, is_closed=is_closed), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = WORDS.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


WHOLE = {"type": "integer"}
AB = tuple(
    {"type": "object", "properties": {key: {"enum": [value]}}, "required": [key]}
    for key, value in (("a", "x"), ("b", 1))
)
SAID = (
    ({"const": LARGE}, [LARGE], [LARGE - 7, LARGE + 1]),
    ({"enum": ["a", LARGE, None, 1e300]}, ["a", LARGE, None, 1e300], [LARGE - 7]),
    ({**WHOLE, "enum": [LARGE]}, [LARGE], [LARGE - 7]),
    ({**WHOLE, "minimum": 10**17}, [10**17, LARGE, 2**64 - 1], [10**17 - 1, 5, -LARGE]),
    ({**WHOLE, "exclusiveMinimum": 10**15}, [10**15 + 1, LARGE], [10**15]),
    ({**WHOLE, "maximum": -(10**16)}, [-(10**16), -LARGE, -(2**63)], [0, 1 - 10**16]),
    ({**WHOLE, "exclusiveMaximum": 2**64}, [2**64 - 1, 0, -1], [2**64]),
    ({"type": "object", "properties": {"id": {"const": LARGE}}, "required": ["id"]}, [{"id": LARGE}], [{}]),
    ({"type": "array", "items": {"const": LARGE}, "maxItems": 2}, [[], [LARGE] * 2], [[LARGE] * 3, [LARGE - 7]]),
    ({"type": "array", "items": {"const": LARGE}, "minItems": 2}, [[LARGE] * 3], [[LARGE], []]),
    ({"anyOf": [{"const": LARGE}, {"type": "null"}]}, [LARGE, None], [LARGE - 7]),
    ({"$ref": "#/$defs/Id", "$defs": {"Id": {"const": LARGE}}}, [LARGE], [LARGE - 7]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/Id"}}, "$defs": {"Id": {"enum": [LARGE]}}},
        [{"a": LARGE}, {}],
        [{"a": LARGE - 7}],
    ),
    ({"type": "string", "format": "path"}, ["a b"], [1]),
    ({"type": "string", "format": "date"}, ["2026-11-28"], ["a"]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [["a", "b"]], [[1]]),
    ({"type": "string", "nullable": True}, ["a", None], [1]),
    ({**WHOLE, "enum": [5, LARGE], "minimum": 10}, [LARGE], [5]),
    ({**WHOLE, "enum": [5, LARGE, -LARGE], "exclusiveMaximum": LARGE}, [5, -LARGE], [LARGE]),
    ({"type": "string", "enum": ["x", LARGE]}, ["x"], [LARGE]),
    ({"enum": ["a", "bbb", LARGE], "minLength": 2, "maxLength": 3}, ["bbb", LARGE], ["a"]),
    ({"const": LARGE, "enum": [LARGE, 1, True]}, [LARGE], [1, True]),
    ({"type": ["string", "null"], "enum": ["a", "b", LARGE]}, ["a", "b"], [None, LARGE]),
    ({**WHOLE, "anyOf": [{"const": LARGE, **WHOLE}, {"type": "string"}]}, [LARGE], ["a"]),
    ({"type": "string", "anyOf": [{"type": ["string", "null"]}, {"const": LARGE}]}, ["a"], [None, LARGE]),
    ({"type": "number", "anyOf": [{**WHOLE, "minimum": 2**60}, False, {"type": "null"}]}, [2**60], [1, None, 0.5]),
    ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, ["ax", "bx"], ["c"]),
    ({"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.25, 0.001], [0, 0.0, -0.1, 0.6]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.01}, [0.005], [0, 0.0, 0.01]),
    ({"type": "array", "items": {"type": "number", "minimum": -0.2, "exclusiveMaximum": 0}}, [[-0.1]], [[0], [-0.0]]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 5}, [5, 0.5], [0, 5.5]),
    ({"allOf": [AB[0], AB[1]]}, [{"a": "x", "b": 1}], [{"a": "x"}, {"b": 1}, {"a": "y", "b": 1}]),
    (
        {"properties": {"p": {"allOf": [{"$ref": "#/$defs/A"}, AB[1]]}}, "$defs": {"A": AB[0]}, "required": ["p"]}
        | {"type": "object"},
        [{"p": {"a": "x", "b": 1}}],
        [{"p": {"a": "x"}}, {"p": {"b": 1}}],
    ),
)


@pytest.mark.parametrize("is_closed", [True, False], ids=["call", "answer"])
def test_a_schema_allows_what_it_says_to_the_digit(is_closed: bool) -> None:
    for schema, right, wrong in SAID:
        for value in (*right, *wrong):
            text = json.dumps(value)
            assert says(schema, text, is_closed=is_closed) is (value in right and value not in wrong), (schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 0},
        {"type": "string", "enum": [1, LARGE]},
        {"enum": [5, LARGE], "multipleOf": 5},
        {"enum": ["a", LARGE], "pattern": "^(a+)+$"},
        {"const": LARGE, "maximum": 5},
    ],
)
def test_what_allows_nothing_or_is_not_looked_at_beside_a_list_of_values_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(NotForcible, match=r"no value|leave one out"):
        grammar(schema, is_closed=True)


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        ({}, "N"),
        ({"description": "any"}, "N"),
        ({"minLength": 1}, "N"),
        ({"type": "object"}, '{"k": N}'),
        ({"type": "object", "additionalProperties": True}, '{"k": {"l": [N]}}'),
        ({"type": "array"}, "[N, [N]]"),
        ({"type": "object", "properties": {"a": {}, "b": True}}, '{"a": N, "b": [N]}'),
        ({"type": "object", "properties": {"a": True, "b": {"const": LARGE}}}, '{"a": N}'),
        ({"anyOf": [{"type": "array", "items": True}, {"type": "object"}]}, '[{"a": N}]'),
    ],
)
def test_a_value_that_may_be_any_has_no_number_that_no_call_may_have(schema: dict[str, Any], around: str) -> None:
    for number in ("5", "-0.25", "1000000"):
        assert says(schema, around.replace("N", number), is_closed=True)
    for number in ("1e999", "123456789012345678901234567890"):
        assert not says(schema, around.replace("N", number), is_closed=True)


NODE = {"type": "object", "properties": {"id": {"const": LARGE}, "size": {"type": "number"}}, "required": ["id"]}
NODE["properties"] |= {side: {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]} for side in ("left", "right")}


def test_a_schema_that_names_itself_twice_is_said() -> None:
    tree = {
        "id": LARGE,
        "size": 1.5,
        "left": {"id": LARGE, "left": None},
        "right": {"id": LARGE, "right": {"id": LARGE}},
    }
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}
    for is_closed in (True, False):
        assert says(schema, json.dumps(tree), is_closed=is_closed)
        assert not says(schema, json.dumps({**tree, "left": {"id": 1}}), is_closed=is_closed)


def test_references_that_name_each_other_often_take_no_time_that_grows_with_their_paths() -> None:
    several = {f"D{at}": {"anyOf": [{"$ref": f"#/$defs/D{(at + by) % 40}"} for by in (1, 2, 3)]} for at in range(40)}
    several["D39"] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/D0"}, "y": {"const": LARGE}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": several}
    assert len(grammar(schema, is_closed=True)) < 20_000
    assert kinds_of({"$ref": "#/$defs/D0"}, schema) == {"object"}
    assert len(alternatives({"$ref": "#/$defs/D0"}, schema)) == 1


def nested(leaf: dict[str, Any], depth: int, **of_object: Any) -> dict[str, Any]:
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, **of_object}
    return leaf


@pytest.mark.parametrize(
    "schema",
    [
        nested({"type": "string"}, 12),
        nested({"const": LARGE}, 12),
        nested({"const": LARGE}, 12, type=["object", "object"]),
        nested({"type": "array", "items": nested({"const": LARGE}, 6)}, 6),
        {"anyOf": [{"$ref": "#/$defs/D"}] * 12, "$defs": {"D": nested({"const": LARGE}, 6)}},
        {"items": [{"$ref": "#/$defs/D", "maxLength": 9}] * 12, "$defs": {"D": nested({"type": "string"}, 12)}},
    ],
)
def test_each_schema_within_a_schema_is_looked_at_a_few_times(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def counted(value: Any) -> bool:
        nonlocal looks
        looks += 1
        return _is_long(value)

    monkeypatch.setattr(rules, "_is_long", counted)
    grammar(schema, is_closed=True)
    assert looks < 240


@pytest.mark.one_in(1)
def test_objects_that_join_each_other_without_end_are_refused() -> None:
    two = {key: {"allOf": [{"$ref": "#/$defs/N"}, {"properties": {f"{key}x": {}}}]} for key in "pq"}
    around = {"type": "object", "properties": two, "$defs": {"N": {"type": "object", "properties": two}}}
    levels = {
        f"L{at}": {
            "type": "object",
            "properties": {
                key: {"allOf": [{"$ref": f"#/$defs/L{at + 1}"}, {"properties": {f"{key}x": {}}}]} for key in "abcd"
            },
        }
        for at in range(12)
    }
    for schema in (around, {"$ref": "#/$defs/L0", "$defs": {**levels, "L12": {"type": "object"}}}):
        with pytest.raises((NotForcible, RecursionError)):
            grammar(schema, is_closed=True)


def test_numbers_of_a_call_have_exponents_and_are_floats() -> None:
    for text in ("1e300"[:4], "1.5e-7", "-2E+9", "175928847299117063", "0.1", "123456789012"):
        assert says({"type": "number"}, text, is_closed=True), text
    for text in ("1e999", "1" * 400, "01", "nan"):
        assert not says({"type": "number"}, text, is_closed=True), text
    for text in (str(LARGE), str(2**63 - 1), "-9223372036854774784"):
        assert says({"type": "integer"}, text, is_closed=True), text
    assert not says({"type": "integer"}, str(2**64), is_closed=True)


def test_a_range_of_integers_is_said_exactly() -> None:
    chance = random.Random(1)
    for _ in range(150):
        low, high = sorted(chance.randrange(10 ** chance.randrange(1, 21)) for _ in range(2))
        expression = re.compile(_digits(low, high))
        for number in (low, high, low - 1, high + 1, (low + high) // 2, chance.randrange(10**20)):
            assert (expression.fullmatch(str(number)) is not None) is (low <= number <= high), (low, high, number)
        assert len(expression.pattern) < 3000


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object", "properties": {"a": {"const": 2**64}}}, f"property 'a': {2**64} has more than 64 bits"),
        ({**WHOLE, "minimum": 2**64}, "no integer is within its bounds"),
        ({"allOf": [{"const": LARGE}, {"type": "integer"}]}, "cannot be said exactly"),
        ({**WHOLE, "minimum": 10**17, "multipleOf": 3}, "cannot be said exactly"),
    ],
)
def test_a_number_that_cannot_be_said_exactly_is_refused_by_its_place(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(NotForcible, match=re.escape("the schema: ") + ".*" + re.escape(told)):
        grammar(schema, is_closed=True)


def test_joined_objects_that_name_each_other_stay_as_long_as_they_were() -> None:
    """A tree, and a chain in which each object names the next one twice."""
    names = [f"#/$defs/d{at}" for at in range(30)]
    chain = {
        f"d{at}": {
            "allOf": [
                {"type": "object", "properties": {"a": {"$ref": name}, "b": {"$ref": name}}},
                {"type": "object", "properties": {"c": {"type": "string"}}},
            ]
        }
        for at, name in enumerate((*names[1:], names[0]))
    }
    rules = Rules(quoted, "tool", range(-(2**63), 2**64), is_closed=True)
    rules.begin({"$ref": names[0], "$defs": chain})
    rules.json(rules.root)
    assert len(rules.text()) < 4 * len(json.dumps(chain))
