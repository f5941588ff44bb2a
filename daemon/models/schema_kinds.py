"""What kinds of values a JSON schema allows, and what its references name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Final

ANY_KIND: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_KINDS: Final = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def kind_of(value: object) -> str:
    """The kind of a JSON value; empty for what is none."""
    return _KINDS.get(type(value), "")


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """The kinds of values that a schema allows; all, where it does not say. root: the schema that it is a part of."""
    return _Kinds(root).of(schema)


def resolved(reference: object, root: Any) -> Any:
    """What a reference within a schema names; None if it names nothing there."""
    found = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


class _Kinds:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, frozenset[str]] = {}  # by reference; empty while one is looked at

    def of(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, Mapping):
            return ANY_KIND
        limits = [_typed(schema)]
        if "const" in schema:
            limits.append(frozenset({kind_of(schema["const"])}))
        if isinstance(schema.get("enum"), list):
            limits.append(frozenset(map(kind_of, schema["enum"])))
        options = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        limits += [frozenset().union(*map(self.of, each)) for each in options]
        if isinstance(schema.get("allOf"), list):
            limits += map(self.of, schema["allOf"])
        if isinstance(schema.get("$ref"), str):
            limits.append(self._behind(schema["$ref"]))
        return reduce(_both, limits)

    def _behind(self, reference: str) -> frozenset[str]:
        if reference not in self._known:
            self._known[reference] = frozenset()
            self._known[reference] = self.of(resolved(reference, self._root))
        return self._known[reference]


def _typed(schema: Mapping[str, Any]) -> frozenset[str]:
    said = schema.get("type")
    kinds = frozenset(each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str))
    return (kinds | {"null"} if schema.get("nullable") is True else kinds) if kinds & ANY_KIND else ANY_KIND


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The kinds in both. An integer is a number."""
    return _wide(one) & _wide(other)


def _wide(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds
