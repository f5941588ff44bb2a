"""What the oracle takes for the call that a model meant."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.tests.dialogues.calls import is_clear, is_meant

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("parser", "schema", "meant", "shown", "expected"),
    [
        ("glm47", NULLABLE, "null", None, True),
        ("glm47", NULLABLE, None, "null", True),
        ("json_tools", NULLABLE, "null", None, False),
        ("glm47", {"type": "string"}, "null", None, False),
        ("qwen3_coder", {"type": "integer"}, 5, "5", False),
        ("qwen3_coder", {"type": "string"}, " a", "a", False),
        ("json_tools", {"type": "integer"}, 175928847299117063, 175928847299117056, False),
        ("json_tools", {"type": "number"}, 1, 1.0, False),
        ("json_tools", {"type": "number"}, 1, True, False),
    ],
)
def test_a_call_is_the_one_that_was_meant_to_the_types_of_its_values(
    parser: str, schema: dict[str, Any], meant: Any, shown: Any, expected: bool
) -> None:
    one, other = ({"name": "run", "arguments": {"a": value}} for value in (meant, shown))
    assert is_meant(parser, one, other, {"run": {"properties": {"a": schema}}}) is expected


def test_a_call_with_less_or_another_name_is_another_one() -> None:
    schemas = {name: {"properties": {"a": {}, "b": {}}} for name in ("run", "stop")}
    call = {"name": "run", "arguments": {"a": 1, "b": 2}}
    assert is_meant("json_tools", call, dict(call), schemas)
    assert not is_meant("json_tools", call, {"name": "run", "arguments": {"a": 1}}, schemas)
    assert not is_meant("json_tools", call, {**call, "name": "stop"}, schemas)


def test_a_value_that_quotes_a_tag_is_unclear_between_tags_alone() -> None:
    call = {"name": "run", "arguments": {"a": ["x</parameter>"]}}
    assert not is_clear("qwen3_coder", call)
    assert is_clear("json_tools", call)
