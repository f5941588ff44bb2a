"""What would take the compiler minutes and gigabytes is refused before it begins; what schemas say every day is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torpor.daemon.models.costs import MOST_PATTERNS, require_light, require_light_grammar
from torpor.daemon.models.rules import Rules, quoted
from torpor.daemon.models.schemas import NotForcible, binding

MANY = MOST_PATTERNS + 1
TEXTS = [{"type": "string", "pattern": f".*w{{{at}}}"} for at in range(MANY)]
FEW = TEXTS[: MOST_PATTERNS // 2]


def holder(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def chain(parts: list[Any]) -> dict[str, Any]:
    """Each part stands beside a reference to the next."""
    named = {f"d{at}": {**part, "$ref": f"#/$defs/d{at + 1}"} for at, part in enumerate(parts)}
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{len(parts)}": {"type": "string"}}}


PATTERNS = (
    holder(x={"allOf": TEXTS}),
    {"allOf": [holder(x=each) for each in TEXTS]},
    chain(TEXTS),
    {"allOf": [{"anyOf": [{"type": "null"}, each]} for each in TEXTS]},
    {"type": "array", "items": {"allOf": [{**each, "format": "uri"} for each in TEXTS[: MANY // 2 + 1]]}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, TEXTS[0]], "$defs": {"a": {"allOf": FEW}}},
)
MULTIPLES = (
    {"type": "integer", "multipleOf": 999983},
    {"type": "number", "multipleOf": 0.1234567},
    {"type": "integer", "multipleOf": 4096000},
    holder(x={"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17)]}),
    {"type": "integer", "multipleOf": 10**400 + 1},
)
LIGHT = (
    {"allOf": [holder(**{f"p{at}_{number}": each for at, each in enumerate(TEXTS)}) for number in range(3)]},
    {"anyOf": [*TEXTS, *TEXTS]},
    {"allOf": TEXTS[:MOST_PATTERNS]},
    {"type": "object", "patternProperties": {f"^{at}": each for at, each in enumerate(TEXTS)}},
    {"$ref": "#/$defs/a", "$defs": {"a": holder(of={"$ref": "#/$defs/a"}, name=TEXTS[0])}},
    *({"type": "number", "multipleOf": each} for each in (1, 7, 0.01, 0.125, 4096, 10**9, 25000, 60.0, 1e-6)),
)


def refused(schema: Any) -> str:
    rules = Rules(quoted, "answer", None, is_closed=False)
    rules.begin(binding(schema))
    with pytest.raises(NotForcible) as error:
        rules.json(rules.root)
    with pytest.raises(NotForcible, match=r"more than|above"):
        require_light_grammar(f"start: answer\nanswer: %json {json.dumps(schema)}")
    return str(error.value)


@pytest.mark.parametrize("schema", PATTERNS)
def test_a_text_that_many_patterns_hold_for_is_refused(schema: Any) -> None:
    assert f"more than {MOST_PATTERNS} patterns" in refused(schema)


@pytest.mark.parametrize("schema", MULTIPLES)
def test_a_multiple_of_a_large_number_is_refused(schema: Any) -> None:
    assert "multipleOf" in refused(schema)


def test_the_refusal_names_the_smallest_part() -> None:
    assert refused(holder(a=TEXTS[0], x={"items": {"allOf": TEXTS}})).startswith("property 'x': its items: it has")


@pytest.mark.parametrize("schema", LIGHT)
def test_what_is_cheap_is_not_refused(schema: Any) -> None:
    bound = binding(schema)
    require_light(bound, bound)
    require_light_grammar(f'start: answer\nanswer: %json {json.dumps(schema)} | "x"')


def test_a_grammar_joins_as_many_patterns_as_a_schema() -> None:
    joined = " & ".join(f"/{each['pattern']}/" for each in TEXTS)
    require_light_grammar(f"start: A\nA: {joined}")
    with pytest.raises(NotForcible, match="'&'"):
        require_light_grammar(f"start: A\nA: {joined} & /x/")


@pytest.mark.parametrize("behind", ["// words\n{}", "", "{", '{"allOf": 5}'])
def test_no_schema_in_a_grammar_is_passed_over(behind: str) -> None:
    with pytest.raises(NotForcible):
        require_light_grammar(f"start: %json {behind}")
