"""Schemas and grammars that would take the compiler time without end are refused, and usual ones are not."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.models import joined_patterns
from torpor.daemon.models.joined_patterns import require_few_in_lark, require_few_joined
from torpor.daemon.models.schemas import NotForcible


def pattern(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*w.*.{{{number}}}", **more}


FIVE = [pattern(at) for at in range(5)]
NAMED = {f"P{at}": pattern(at) for at in range(5)}
MANY: dict[str, dict[str, Any]] = {
    "in allOf": {"properties": {"x": {"allOf": FIVE}}},
    "nested": {"allOf": [{"allOf": FIVE[:3]}, {"allOf": FIVE[3:]}]},
    "beside references": {
        "$ref": "#/$defs/A0",
        "$defs": {**{f"A{at}": {**pattern(at), "$ref": f"#/$defs/A{at + 1}"} for at in range(4)}, "A4": pattern(4)},
    },
    "of one property": {
        "allOf": [{"properties": {"x": {"$ref": f"#/$defs/P{at}"}}} for at in range(5)],
        "$defs": NAMED,
    },
    "of one property behind others": {
        "allOf": [
            {"properties": {f"a{at}": {"$ref": f"#/$defs/P{at}"}, "x": {"$ref": f"#/$defs/P{at}"}}} for at in range(5)
        ],
        "$defs": NAMED,
    },
    "of items": {"allOf": [{"items": {"anyOf": [each, {"type": "null"}]}} for each in FIVE]},
    "in a joined part of a joined part": {
        "allOf": [{"properties": {"x": {"allOf": FIVE[at : at + 3]}}} for at in (0, 2)]
    },
}
FEW: dict[str, dict[str, Any]] = {
    "one each": {"properties": {f"p{at}": each for at, each in enumerate(FIVE)}},
    "one each in a joined object": {"allOf": [{"properties": {f"p{at}": each}} for at, each in enumerate(FIVE)]},
    "of a union": {"anyOf": FIVE},
    "of a union that is named": {"allOf": [{"$ref": "#/$defs/U"}, {"type": "string"}], "$defs": {"U": {"anyOf": FIVE}}},
    "four": {"allOf": FIVE[:4], "properties": {"x": FIVE[4]}},
    "a tree": {
        "$ref": "#/$defs/T",
        "$defs": {
            "T": {
                "allOf": [
                    {
                        "properties": {
                            **{f"c{at}": {"$ref": "#/$defs/T"} for at in range(4)},
                            **{f"p{at}": each for at, each in enumerate(FIVE)},
                        }
                    }
                ]
            }
        },
    },
}


@pytest.mark.parametrize("schema", MANY.values(), ids=list(MANY))
def test_many_patterns_of_one_text_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(NotForcible, match="more than 4 patterns"):
        require_few_joined(schema)


@pytest.mark.parametrize("schema", FEW.values(), ids=list(FEW))
def test_many_patterns_of_many_texts_are_not(schema: dict[str, Any]) -> None:
    require_few_joined(schema)


def test_references_that_join_without_end_are_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_patterns, "_MOST_LOOKS", 1000)
    known = {
        f"D{at}": {
            "allOf": [{"properties": {key: {"$ref": f"#/$defs/D{at + 1}"} for key in "abcd"}}, {"type": "object"}]
        }
        for at in range(9)
    }
    schema = {"$ref": "#/$defs/D0", "$defs": {**known, "D9": {"type": "object"}, **NAMED}}
    with pytest.raises(NotForcible, match="too many schemas"):
        require_few_joined(schema)


@pytest.mark.parametrize(
    ("grammar", "refused"),
    [
        ("start: A\nA: /a/ & /b/ & /c/ & /d/ & /e/", True),
        ("start: A\nA: /a/ & /b/", False),
        ('start: "&&&&&&" /[&]&&&&&&/', False),
        ('start: %json {"allOf": [' + ", ".join(f'{{"p\\u0061ttern": "a{at}"}}' for at in range(5)) + "]}", True),
        ('start: %json {"type": "string"} "%json"', False),
    ],
)
def test_a_grammar_that_joins_many_terminals_is_refused(grammar: str, refused: bool) -> None:
    if refused:
        with pytest.raises(NotForcible, match="more than 4 patterns"):
            require_few_in_lark(grammar)
    else:
        require_few_in_lark(grammar)
