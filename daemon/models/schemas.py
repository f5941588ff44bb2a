"""JSON schemas: the shapes of their keywords and which of these bind, the kinds of values that they allow, and what
their references name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
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


def of_property(schema: Any, key: str, root: Any) -> Any:
    """What a schema says of the value of a property, as a schema: in itself, or in the schemas that it names or joins.
    True where it says nothing. Which properties a pattern means is not looked at, for that may take for ever."""
    rule = _of_property(schema, key, root, set())
    return True if rule is None else rule


def _of_property(schema: Any, key: str, root: Any, seen: set[str]) -> Any:
    """As `of_property`; None where it says nothing. seen: the references that were followed, each once."""
    if not isinstance(schema, Mapping):
        return None
    rules = [_of_named(schema, key)]
    rules += [_of_property(part, key, root, seen) for part in _listed(schema, "allOf")]
    for word in ("anyOf", "oneOf"):
        options = (_of_property(part, key, root, seen) for part in _listed(schema, word))
        rules.append(_under("anyOf", [each for each in options if each not in (None, False)]))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        rules.append(_of_property(resolved(reference, root), key, root, seen))
    return _under("allOf", [each for each in rules if each is not None])


def _of_named(schema: Schema, key: str) -> Any:
    """What the schema's own properties say of one; None for nothing."""
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(named, Mapping) and key in named:
        return named[key]
    others = [schema.get("additionalProperties"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    return _under("anyOf", [each for each in others if isinstance(each, Mapping)])


def _under(word: str, schemas: list[Any]) -> Any:
    """Schemas under one keyword; one alone as it is, None for none."""
    return {word: schemas} if len(schemas) > 1 else next(iter(schemas), None)


def _listed(schema: Schema, word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


class NotForcible(Exception):
    """A model cannot be held to something. Its text says why."""


@contextlib.contextmanager
def placed(place: str) -> Iterator[None]:
    """A refusal within names the place."""
    try:
        yield
    except NotForcible as error:
        raise NotForcible(f"{place}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the value of a keyword is. words: what it is. fits: whether a value is that, but for the schemas in it."""

    words: str
    fits: Callable[[Any], bool]


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, of) for each in value)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    # An integer may be larger than any float.
    return kind_of(value) == "integer" or (kind_of(value) == "number" and math.isfinite(value))


_ONE: Final = _Shape("a schema", lambda value: isinstance(value, Mapping | bool))
_SOME: Final = _Shape("a list of schemas, and has one at least", lambda value: isinstance(value, list) and bool(value))
_ONE_OR_SOME: Final = _Shape("a schema, or a list of schemas", lambda value: isinstance(value, Mapping | bool | list))
_NAMED: Final = _Shape("an object with schemas", lambda value: isinstance(value, Mapping))
_ANYTHING: Final = _Shape("any value", lambda _: True)
_VALUES: Final = _Shape("a list", lambda value: isinstance(value, list))
_TEXT: Final = _Shape("a text", lambda value: isinstance(value, str))
_TEXTS: Final = _Shape("a list of texts", lambda value: _is_list(value, str))
_TYPE: Final = _Shape(
    "a text, or a list of texts", lambda value: isinstance(value, str) or (bool(value) and _is_list(value, str))
)
_COUNT: Final = _Shape("an integer of at least 0", lambda value: is_number(value) and value == int(value) >= 0)
_NUMBER: Final = _Shape("a number", is_number)
_LIMIT: Final = _Shape("a number, true or false", lambda value: isinstance(value, bool) or is_number(value))

_SHAPES: Final[Mapping[str, _Shape]] = MappingProxyType(
    {
        **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "else", "if", "not"), _ONE),
        **dict.fromkeys(("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"), _ONE),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SOME),
        "items": _ONE_OR_SOME,
        **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), _NAMED),
        "const": _ANYTHING,
        "enum": _VALUES,
        **dict.fromkeys(("$ref", "format", "pattern"), _TEXT),
        "required": _TEXTS,
        "type": _TYPE,
        **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _COUNT),
        **dict.fromkeys(("maximum", "minimum", "multipleOf"), _NUMBER),
        **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _LIMIT),
    }
)
"""Of each keyword that may bind. Whatever reads a schema that `binding` gave may rely on them."""

_TELLING: Final = frozenset(
    {"description", "title", "default", "examples", "example", "$comment", "deprecated", "discriminator", "readOnly"}
    | {"writeOnly", "uniqueItems", "$schema", "$id", "nullable"}
)
_OF_COMPILER: Final = "x-guidance"
"""Sets up the compiler, which a client does not."""

_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Those that a grammar can say."""


def binding(schema: Any) -> Any:
    """A schema whose keywords have the shapes that they should: without those that only tell, formats that no grammar
    can say, and uniqueItems, for a list that stands for a set may name one of its members twice. A keyword that is null
    is not there, as some clients write it. What allows any value is an empty schema. Raises NotForcible: with the place
    of the first wrong shape."""
    if schema is True or schema is False:
        return {} if schema else False
    if not isinstance(schema, Mapping):
        raise NotForcible("it is no schema, which is a JSON object, true or false")
    bound = {key: value for key, value in schema.items() if _may_bind(key, value)}
    for key, value in bound.items():
        if key in _SHAPES and not _SHAPES[key].fits(value):
            raise NotForcible(f"{key!r} has to be {_SHAPES[key].words}")
        if _SHAPES.get(key) is _COUNT:
            bound[key] = int(value)  # 5.0 is an integer, as JSON has it
    if bound.get("format", "") not in _FORMATS:
        bound.pop("format", None)
    strict = changed_within(_with_required(bound), binding)
    is_nullable = schema.get("nullable") is True and "type" in strict and None in strict.get("enum", (None,))
    return {"anyOf": [strict, {"type": "null"}]} if is_nullable else strict


def _with_required(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that names each property that it requires, if it names any: where a form writes those alone that are
    named, it could not be met."""
    others, named = schema.get("additionalProperties", True), schema.get("properties")
    if named is None or others is False or "patternProperties" in schema:
        return schema
    more = {key: {} if others is True else others for key in schema.get("required", ()) if key not in named}
    return {**schema, "properties": {**named, **more}} if more else schema


def _may_bind(key: str, value: Any) -> bool:
    return key not in _TELLING and key != _OF_COMPILER and (value is not None or key == "const")


def changed_within(schema: Schema, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with each schema right within it changed. Raises NotForcible: as `change`, with the place."""
    result = {key: copy(value) for key, value in schema.items()}
    for key, slot, place, part in _slots(schema):
        holder, at = (result, key) if slot is None else (result[key], slot)
        with placed(place):
            holder[at] = change(part)
    return result


def parts_of(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas right within a schema, each with its place."""
    yield from ((place, part) for _, _, place, part in _slots(schema) if isinstance(part, Mapping))


def _slots(schema: Schema) -> Iterator[tuple[str, Any, str, Any]]:
    """Where schemas stand right within a schema: the keyword, the key or number in its value, or None if that is the
    schema; the place in words; and what stands there."""
    for key, value in schema.items():
        shape = _SHAPES.get(key, _ANYTHING)
        if shape is _NAMED:
            for name, part in value.items():
                yield key, name, f"property {name!r:.80}" if key == "properties" else f"{name!r:.80}", part
        elif shape is _SOME or (shape is _ONE_OR_SOME and isinstance(value, list)):
            yield from ((key, at, f"{key} {at}", part) for at, part in enumerate(value))
        elif shape is _ONE or shape is _ONE_OR_SOME:
            yield key, None, f"its {key}", value


def resolved(reference: object, root: Any) -> Any:
    """The schema within a schema that a reference names; None if it names none there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place, steps = root, iter(part.replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:])
    for key in steps:
        place, shape = place.get(key) if isinstance(place, Mapping) else None, _SHAPES.get(key, _ANYTHING)
        if shape is _NAMED:
            place = place.get(next(steps, None)) if isinstance(place, Mapping) else None
        elif isinstance(place, list) and shape in (_SOME, _ONE_OR_SOME):
            at = next(steps, "")
            place = place[int(at)] if at.isdecimal() and int(at) < len(place) else None
        elif shape not in (_ONE, _ONE_OR_SOME):
            return None
    return place if isinstance(place, Mapping | bool) else None


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
    places: set[int] = set()
    while faults:
        at = faults.pop()
        if at not in places:
            places.add(at)
            faults += holders[at]
    return places


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


def joined(schema: Any, root: Any) -> Any:
    """An object that a schema joins of others, in allOf or beside a reference, as one object; as it is where they are
    more than properties. root: what the references are of."""
    if reference_of(schema) is not None:  # what it names is joined in its own place, once
        return schema
    parts = list(_joined_parts(schema, root, set()))
    if len(parts) < 2 or not all(_is_of_properties(each) for each in parts):
        return schema
    properties: dict[str, Any] = {}
    for part in parts:
        for key, value in part.get("properties", {}).items():
            if properties.setdefault(key, value) != value:
                return schema
    closed = [part for part in parts if part.get("additionalProperties", True) is not True]
    if any(part["additionalProperties"] is not False or part.get("properties", {}) != properties for part in closed):
        return schema
    whole = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = list(dict.fromkeys(key for part in parts for key in part.get("required", ())))
    whole |= {"type": "object", "properties": properties, "required": required}
    return {**whole, "additionalProperties": False} if closed else whole


_OF_PROPERTIES: Final = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})


def _is_of_properties(schema: Any) -> bool:
    return (
        isinstance(schema, Mapping) and not schema.keys() - _OF_PROPERTIES and schema.get("type", "object") == "object"
    )


def _joined_parts(schema: Any, root: Any, seen: set[str]) -> Iterator[Any]:
    """The schemas that a value has to match, all of them, behind references. seen: those that were followed."""
    if not isinstance(schema, Mapping) or not {"allOf", "$ref"} & schema.keys():
        yield schema
        return
    rest = {key: value for key, value in schema.items() if key not in ("allOf", "$ref")}
    if rest.keys() - {"$defs", "definitions"}:
        yield rest
    for part in _listed(schema, "allOf"):
        yield from _joined_parts(part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _joined_parts(resolved(reference, root), root, seen)


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
            parts = [_of_both_types(schema, each) for each in options]
            return _some([one for each in parts if each is not False for one in alternatives(each, behind, seen)])
    if isinstance(schema.get("type"), list):
        named_once = [each for at, each in enumerate(schema["type"]) if each not in schema["type"][:at]]
        return _some([_of_its_kind({**schema, "type": each}) for each in named_once])
    schema = _of_its_kind(schema)
    if isinstance(schema.get("enum"), list):
        kinds = dict.fromkeys(map(kind_of, schema["enum"]))
        if len(kinds) < 2:
            return [schema]
        return [{**schema, "enum": [each for each in schema["enum"] if kind_of(each) == kind]} for kind in kinds]
    return [schema]


def _some(options: list[Any]) -> list[Any]:
    """Those of alternatives that allow a value; a schema of none if no one does."""
    return [each for each in options if not isinstance(each, Mapping) or each.get("enum") != []] or [{"enum": []}]


def _of_both_types(schema: Mapping[str, Any], option: Any) -> Any:
    """An option of a schema that may have types, of these as well; False if nothing is of both."""
    if "type" not in schema or option is False:
        return option
    if not isinstance(option, Mapping) or "type" not in option:
        return {**(option if isinstance(option, Mapping) else {}), "type": schema["type"]}
    both = _both(_typed(schema), _typed(option))
    kinds = sorted(both - {"integer"} if "number" in both else both)
    return {**option, "type": kinds[0] if len(kinds) == 1 else kinds} if kinds else False


def _is_count(value: object) -> bool:
    return kind_of(value) in ("integer", "number")


_LIMITS: Final[Mapping[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {
        "minLength": lambda value, limit: not isinstance(value, str) or len(value) >= limit,
        "maxLength": lambda value, limit: not isinstance(value, str) or len(value) <= limit,
        "minimum": lambda value, limit: not _is_count(value) or value >= limit,
        "maximum": lambda value, limit: not _is_count(value) or value <= limit,
        "exclusiveMinimum": lambda value, limit: not _is_count(value) or value > limit,
        "exclusiveMaximum": lambda value, limit: not _is_count(value) or value < limit,
    }
)
"""What a value may be beside a list of values: whether it is, by its limit."""


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema with a list of them allows. Raises NotForcible: none, or a keyword stands beside that is
    not looked at."""
    if more := sorted(schema.keys() - {"const", "enum", "type", "$defs", "definitions", *_LIMITS}):
        raise NotForcible(f"it cannot be held to {more[0]!r} beside a list of values; leave one out")
    listed = schema.get("enum", [schema.get("const")])
    if "const" in schema:
        wanted = schema["const"]
        listed = [each for each in listed if (kind_of(each), each) == (kind_of(wanted), wanted)]
    limits = [(fits, schema[name]) for name, fits in _LIMITS.items() if name in schema]
    kinds = _wide(_typed(schema))
    values = [each for each in listed if kind_of(each) in kinds and all(fits(each, limit) for fits, limit in limits)]
    if not values:
        raise NotForcible("it allows no value")
    return values


def texts_of(schema: Any, root: Any) -> frozenset[str] | None:
    """The texts that a schema allows; None for any, also where it has wrong shapes. root: the schema that it is a part
    of."""
    try:
        behind = binding(root)
        options = alternatives(binding(schema), behind)
    except NotForcible:
        return None
    texts: set[str] = set()
    for each in options:
        if "string" in kinds_of(each, behind):
            values = [each["const"]] if "const" in each else each.get("enum")
            if values is None:
                return None
            texts.update(one for one in values if isinstance(one, str))
    return frozenset(texts)


def _of_its_kind(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of one type with the values of its enum that are of it; with none if its const is not."""
    kinds, listed = _wide(_typed(schema)), schema.get("enum")
    if "const" in schema and kind_of(schema["const"]) not in kinds:
        return {**schema, "enum": []}
    values = [each for each in listed if kind_of(each) in kinds] if isinstance(listed, list) else listed
    return schema if values == listed else {**schema, "enum": values}


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
    types = schema.get("type")
    kinds = frozenset(each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str))
    return (kinds | {"null"} if schema.get("nullable") is True else kinds) if kinds & ANY_KIND else ANY_KIND


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The kinds in both. An integer is a number."""
    return _wide(one) & _wide(other)


def _wide(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds
