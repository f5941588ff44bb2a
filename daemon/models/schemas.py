"""JSON schemas: the kinds of values that they allow, what their references name, and which of their words bind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, Final

Schema = Mapping[str, Any]

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


_TELLING: Final = frozenset(
    {"description", "title", "default", "examples", "example", "$comment", "deprecated", "discriminator", "readOnly"}
    | {"writeOnly", "uniqueItems", "$schema", "$id", "nullable"}
)
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Those that a grammar can say."""

_NAMED: Final = ("properties", "$defs", "definitions", "patternProperties")
_VALUES: Final = ("enum", "const", "required", "x-guidance")


def binding(schema: Any) -> Any:
    """A schema without the keywords that only tell, formats that no grammar can say, and uniqueItems: a list that
    stands for a set may name one of its members twice."""
    if isinstance(schema, list):
        return [binding(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    bound = {key: each for key, each in schema.items() if key not in _TELLING and (key != "format" or each in _FORMATS)}
    found = changed_within(bound, binding)
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True and "type" in found else found


def changed_within(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with each value right within it changed, but for those that are plain values and no schemas."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: change(each) for name, each in value.items()}
        else:
            found[key] = value if key in _VALUES else change(value)
    return found


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas right within a schema, each with its place."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found = [(f"property {name!r:.80}" if key == "properties" else name, each) for name, each in value.items()]
        elif isinstance(value, list) and key not in _VALUES:
            found = [(f"{key} {at}", each) for at, each in enumerate(value)]
        else:
            found = [(f"its {key}", value)] if key not in _VALUES else []
        yield from ((place, each) for place, each in found if isinstance(each, Mapping))


def leading_to(root: Schema, is_fault: Callable[[Schema], bool]) -> set[int]:
    """The schemas in a schema that are faults, or have one in them or behind their references: `id()` of each. Each is
    looked at once, however deep it stands and however many name it."""
    holders: dict[int, list[int]] = {id(root): []}
    faults: list[int] = []
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if is_fault(schema):
            faults.append(id(schema))
        for part in within(schema, root):
            if id(part) not in holders:
                holders[id(part)] = []
                waiting.append(part)
            holders[id(part)].append(id(schema))
    found: set[int] = set()
    while faults:
        at = faults.pop()
        if at not in found:
            found.add(at)
            faults += holders[at]
    return found


def within(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schemas right within a schema that a value of it may have to match, and the one that it names."""
    yield from (part for _, part in parts_of({key: schema[key] for key in schema.keys() - {"$defs", "definitions"}}))
    named = resolved(schema.get("$ref"), root)
    if isinstance(named, Mapping):
        yield named


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with what its references name, so that it stands alone."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def reference_of(schema: Any) -> str | None:
    """What a schema names that is a reference, and no more."""
    named = schema.get("$ref") if isinstance(schema, Mapping) else None
    is_alone = isinstance(named, str) and not schema.keys() - {"$ref", "$defs", "definitions"}
    return named if is_alone else None


def alternatives(schema: Any, behind: Any = None, seen: set[str] | None = None) -> list[Any]:
    """A schema as a list of simpler ones: a value that matches the schema matches one of them. They come from anyOf,
    oneOf and lists of types, and each is of one type, where they say so. behind: the root, to look behind references,
    too. seen: those that were followed."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping):
        return [schema]
    named = None if behind is None else resolved(reference_of(schema), behind)
    if named is not None:
        is_new = schema["$ref"] not in seen  # a union with itself allows no more
        seen.add(schema["$ref"])
        return alternatives(named, behind, seen) if is_new else []
    own = schema.keys() - {"$defs", "definitions"}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and own <= {key, "type"} and (key != "allOf" or len(options) == 1):
            limit = {"type": schema["type"]} if "type" in schema else {}
            parts = [{**limit, **each} if isinstance(each, Mapping) else each for each in options]
            return [one for each in parts for one in alternatives(each, behind, seen)]
    if isinstance(schema.get("type"), list):
        named_once = [each for at, each in enumerate(schema["type"]) if each not in schema["type"][:at]]
        return [_of_its_kind({**schema, "type": each}) for each in named_once]
    if isinstance(schema.get("enum"), list):
        kinds = dict.fromkeys(map(kind_of, schema["enum"]))
        if len(kinds) < 2:
            return [schema]
        return [{**schema, "enum": [each for each in schema["enum"] if kind_of(each) == kind]} for kind in kinds]
    return [schema]


def _of_its_kind(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of one type with the values of its enum that are of it."""
    if not isinstance(schema.get("enum"), list):
        return schema
    return {**schema, "enum": [each for each in schema["enum"] if kind_of(each) in _wide(_typed(schema))]}


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
