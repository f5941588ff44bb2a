"""A schema whose keywords have wrong shapes is refused by its place, before anything relies on them; null is none."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torpor.daemon.models.schemas import NotForcible, binding, joined, kinds_of, resolved

LARGE = 2**60
RIGHT: dict[str, tuple[Any, ...]] = {
    "additionalProperties": (True, False, {}),
    "anyOf": ([{}],),
    "const": (None, 5, [None], {"required": [[1]]}),
    "enum": ([], [None, 1, {"type": 5}]),
    "exclusiveMinimum": (1, True),
    "format": ("date",),
    "items": ({}, False, [], [{}, True]),
    "maxItems": (0, LARGE),
    "minimum": (-1, 0.5),
    "not": ({}, True),
    "pattern": ("a",),
    "properties": ({}, {"a": {}, "b": True}),
    "required": ([], ["a"]),
    "type": ("object", ["string", "null"]),
    "$defs": ({}, {"a": {"type": "object"}}),
    "$ref": ("#/$defs/a",),
}
WRONG: dict[str, tuple[Any, ...]] = {
    "additionalProperties": (1, "a", []),
    "allOf": ([], {}, [5], [None]),
    "anyOf": ([], {}, "a", [[]]),
    "definitions": ([], 5, {"a": None}),
    "enum": ({}, "a", 5),
    "exclusiveMaximum": ("1", float("inf")),
    "format": (["date"], {}, 5),
    "items": (5, "a", [5]),
    "minItems": (-1, -1.0, 0.5, "1", True),
    "maxLength": ([], False, float("inf")),
    "minimum": ("0", True, float("nan"), [1]),
    "not": (5, []),
    "oneOf": (True, [1]),
    "pattern": (5, ["a"]),
    "patternProperties": ([], {"a": 1}),
    "prefixItems": ({}, [], [1]),
    "properties": ([], 5, "a", {"a": 5}, {"a": None}),
    "required": (5, True, "a", [[1]], [None], {"a": 1}),
    "type": (5, [], [5], [None], {}),
    "$defs": ([], {"a": [1]}),
    "$ref": (5, ["#"], {}),
}


A = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
B = {"properties": {"b": {}}, "additionalProperties": False}
BOTH = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "one"),
    [
        ({"allOf": [A, {"properties": {"b": {}}}]}, BOTH),
        ({"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": A}}, {**BOTH, "$defs": {"A": A}}),
        ({"allOf": [A, {"allOf": [A, {"properties": {"b": {}}}]}]}, BOTH),
        ({"allOf": [A, {**BOTH, "additionalProperties": False}]}, {**BOTH, "additionalProperties": False}),
        ({"allOf": [A, B]}, None),
        ({"allOf": [A, {"properties": {"a": {"type": "integer"}}}]}, None),
        ({"allOf": [A, {"minProperties": 1}]}, None),
        ({"allOf": [A, {"type": "array"}]}, None),
        ({"allOf": [A, True]}, None),
        ({"$ref": "#", "allOf": [{"$ref": "#"}]}, None),
        (A, None),
    ],
)
def test_objects_that_are_joined_are_one_where_they_are_properties_alone(schema: Any, one: Any) -> None:
    assert joined(schema, schema) == (schema if one is None else one)


@pytest.mark.parametrize("keyword", WRONG)
def test_a_keyword_of_a_wrong_shape_is_refused_by_its_place(keyword: str) -> None:
    for value in WRONG[keyword]:
        wrong = {"type": "object", keyword: value}
        for schema, place in (
            (wrong, ""),
            ({"properties": {"a": {"items": wrong}}}, "property 'a': its items: "),
            ({"anyOf": [{"$defs": {"d": wrong}}]}, "anyOf 0: 'd': "),
        ):
            told = f"^{re.escape(place)}.*({re.escape(repr(keyword))} has to be|it is no schema)"
            with pytest.raises(NotForcible, match=told):
                binding(schema)


@pytest.mark.parametrize("keyword", RIGHT)
def test_a_keyword_of_its_shape_stays(keyword: str) -> None:
    for value in RIGHT[keyword]:
        bound = binding({"items": {keyword: value}})["items"]
        assert bound.keys() == {keyword}
        if keyword in ("const", "enum"):
            assert bound[keyword] == value


@pytest.mark.parametrize("keyword", sorted({*WRONG, *RIGHT, "description", "nullable", "anything"} - {"const"}))
def test_a_keyword_that_is_null_is_as_if_it_were_absent(keyword: str) -> None:
    for rest in ({}, {"title": "A", "default": None}):
        assert binding({"properties": {"a": {keyword: None, **rest}}, keyword: None} | rest).keys() <= {"properties"}
        assert binding({"items": {keyword: None, **rest}}) == {"items": {}}


def test_a_count_may_be_written_with_a_point() -> None:
    bound = binding({"maxLength": 5.0, "minItems": 2**60, "maximum": 5.5})
    assert bound == {"maxLength": 5, "minItems": 2**60, "maximum": 5.5}
    assert type(bound["maxLength"]) is int


def test_a_property_that_is_required_is_named_where_others_are() -> None:
    a = {"a": {"type": "string"}}
    bound = binding({"type": "object", "properties": a, "required": ["b", "a"]})
    assert bound == {"type": "object", "properties": {**a, "b": {}}, "required": ["b", "a"]}
    others = {"properties": a, "required": ["b"], "additionalProperties": {"type": "integer", "title": "B"}}
    assert binding(others)["properties"] == {**a, "b": {"type": "integer"}}
    for more in ({"additionalProperties": False}, {"patternProperties": {"b": {"type": "null"}}}):
        assert binding({"properties": a, "required": ["b"], **more})["properties"] == a
    assert binding({"required": ["b"]}) == {"required": ["b"]}


def test_null_is_no_value_of_an_enum_that_has_it_not() -> None:
    one = {"type": "string", "nullable": True}
    assert binding(one) == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert binding({**one, "enum": ["x"]}) == {"type": "string", "enum": ["x"]}
    assert "anyOf" in binding({**one, "enum": ["x", None]})


def test_a_value_that_is_no_schema_is_refused() -> None:
    values: tuple[Any, ...] = (None, 5, "a", [], [{}])
    for value in values:
        with pytest.raises(NotForcible, match="no schema"):
            binding(value)
    assert (binding(True), binding(False)) == ({}, False)


def test_a_client_does_not_set_up_the_compiler() -> None:
    guidance = {"x-guidance": {"lenient": True}}
    schema = {**guidance, "type": "object", "properties": {"a": guidance, "x-guidance": {"type": "string", **guidance}}}
    assert binding(schema) == {"type": "object", "properties": {"a": {}, "x-guidance": {"type": "string"}}}
    assert binding({"const": guidance}) == {"const": guidance}


def test_a_reference_names_schemas_and_no_other_values() -> None:
    inner = {"type": "string"}
    root = binding(
        {
            "properties": {"a": {"anyOf": [inner, {"items": inner}]}, "required": inner},
            "$defs": {"x/y": inner, "": inner},
            "items": [inner],
            "const": {"type": 5, "required": [[1]]},
            "required": ["a"],
        }
    )
    for at in ("$defs/x~1y", "$defs/", "items/0", "properties/a/anyOf/0", "properties/a/anyOf/1/items"):
        assert resolved(f"#/{at}", root) == inner
    assert resolved("#", root) is root
    wrong = (
        "const",
        "required",
        "required/0",
        "properties",
        "items",
        "items/1",
        "items/-1",
        "items/x",
        "type",
        "$defs",
    )
    other: tuple[Any, ...] = ("a#/$defs/", 5, None, "#/properties/a/anyOf", "#/properties/b/items")
    for reference in (*other, *(f"#/{at}" for at in wrong)):
        assert resolved(reference, root) is None, reference
        assert kinds_of({"$ref": reference}, root) >= {"string", "object"}
