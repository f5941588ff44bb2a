"""Rules of a grammar in llguidance's form of Lark, as they are collected: texts, and JSON of a schema.

The library compiles schemas, and counts in floats: it cannot say a large integer exactly, nor an exponent in a number
that has bounds. Such values get rules of our own, with the objects and lists that they stand in.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from .costs import require_light
from .schemas import (
    ANY_KIND,
    NotForcible,
    Schema,
    alternatives,
    changed_within,
    is_number,
    joined,
    kind_of,
    leading_to,
    placed,
    reference_of,
    resolved,
    values_of,
    with_definitions,
    within,
)

JSON_FORM: Final[Mapping[str, Any]] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
)
"""The one form of JSON: as most models have learned it. Free blanks would let a model write them without end. Of oneOf
the library holds to one at least, where it cannot tell that they exclude each other."""

Literal = Callable[[str], str]
"""From a text, which may hold special tokens, to the pieces of a rule."""

_EXACT: Final = 2**53
"""Up to here a float is an exact integer."""

_LEAST: Final = 1024 - 2**63
"""Of an integer without bounds, as a float that the library can turn round."""

_MOST: Final = 2**63 - 1
_WIDEST: Final = 10**15
"""Of a number without one of its bounds: without exponents it would have hundreds of digits."""

_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?/"
"""Any that is a float, and not infinity."""

_ANY_NAME: Final = "any_value_of_a_call"
_ANY: Final[Schema] = {"$ref": f"#/$defs/{_ANY_NAME}"}
_ANY_VALUE: Final[Schema] = {
    "type": sorted(ANY_KIND),
    "minimum": -_WIDEST,
    "maximum": _WIDEST,
    "items": _ANY,
    "additionalProperties": _ANY,
}
"""The library would let numbers be of any length."""

_SAY_WHICH: Final = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref"}
"""Keywords of a schema that may say which values it means; without them it means any."""

_MOST_CLOSED: Final = 50_000
"""Schemas within one: objects that are joined have those of each other in them, over and over."""

_NEAR_ZERO: Final = 1000
"""Of the numbers between zero and a bound below 1, so small a part is left out beside an open zero."""

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Rules:
    """Collects rules, and names them. integers: those that a value may be. is_closed: whether objects have the
    properties alone that their schema names, and numbers bounds. root: the schema that all of the present ones are a
    part of. parts: the schemas that the library compiles, each with its place."""

    def __init__(self, literal: Literal, prefix: str, integers: range | None, *, is_closed: bool) -> None:
        self.literal = literal
        self._prefix = prefix
        self._integers = integers
        self._is_closed = is_closed
        self.root: Schema = {}
        self._references: dict[str, str] = {}  # the names of their rules
        self._beyond: dict[bool, set[int]] = {}  # schemas of the root, as `_is_beyond` tells them
        self.parts: list[tuple[str, Schema]] = []
        self._place: list[str] = []
        self._names: dict[str, str] = {}  # of the rules, by their text
        self._lines: list[str] = []

    def begin(self, root: Schema) -> None:
        """What follows is of another schema."""
        self.root, self._references, self._beyond = root, {}, {}

    def named(self, reference: str, write: Callable[[Any], str]) -> str:
        """The name of the rule for what a reference names. It is written once, for it may stand within itself."""
        if reference not in self._references:
            at, name = len(self._lines), f"{self._prefix}_{len(self._lines)}"
            self._references[reference] = name
            self._lines.append("")
            self._lines[at] = f"{name}: {write(resolved(reference, self.root))}"
        return self._references[reference]

    def add(self, body: str, *, head: str = "") -> str:
        """A rule of that body; gives its name."""
        text = f"{head}: {body}"
        if text not in self._names:
            self._names[text] = f"{self._prefix}_{len(self._lines)}"
            self._lines.append(self._names[text] + text)
        return self._names[text]

    def terminal(self, expression: str) -> str:
        """A terminal of that expression; gives its name."""
        name = f"{self._prefix.upper()}_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def text(self) -> str:
        """All of them."""
        return "\n".join(self._lines)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """What is added within is of a place, and a refusal names it."""
        self._place.append(place)
        try:
            with placed(place):
                yield
        finally:
            self._place.pop()

    def raw(self, close: str, unlike: Sequence[str] = ()) -> str:
        """A rule for any text up to `close`, and that. unlike: regular expressions of whole texts that it is not."""
        pieces = [each for each in self.literal(close).split(" ") if each]
        text = self.terminal(text_without(close, unlike))
        if pieces[0].startswith("<["):  # a special token ends the text by itself
            return self.add(f"{text} {self.literal(close)}")
        return self.add(text, head=f"[suffix={quoted(close)}]")

    def json(self, schema: Any, **form: Any) -> str:
        """The pieces for JSON of a schema. Raises NotForcible: it allows nothing, or no grammar says some number of it
        exactly."""
        if not isinstance(schema, Mapping):
            raise NotForcible("it allows no value")
        if not self._is_beyond(schema):
            return self._compiled(schema, form)
        reference = reference_of(schema)
        if reference is not None:
            return self.named(reference, lambda named: self.json(named, **form))
        if "const" in schema or "enum" in schema:
            return self._values(values_of(schema))
        options = alternatives(schema)
        if len(options) > 1 or options[0] is not schema:
            return f"({' | '.join(self.json(each, **form) for each in options)})"
        kind, beside = schema.get("type"), schema.keys() - {"type", "$defs", "definitions"}
        if kind == "object" and beside <= {"properties", "required", "additionalProperties"}:
            return self._object(schema, form)
        is_alike = not isinstance(schema.get("items"), list)  # all items are of one schema
        if kind == "array" and is_alike and beside <= {"items", "minItems", "maxItems"}:
            return self._array(schema, form)
        if kind == "integer" and beside <= {*_BOUNDS}:
            return self.add(f"/{self._integer(schema)}/")
        if kind == "number" and not beside:
            return self.add(_NUMBER)
        if self._is_beyond(schema, of_constants=True):
            raise NotForcible(
                f"it has a number that cannot be said exactly beside {sorted(beside)[0]!r}; leave one out"
            )
        return self._compiled(schema, form)

    def _compiled(self, schema: Schema, form: Mapping[str, Any]) -> str:
        require_light(schema, self.root)
        schema = with_definitions(schema, self.root)
        if self._is_closed:
            schema = _closed(schema, schema, iter(range(_MOST_CLOSED)))
            if _ANY["$ref"] in json.dumps(schema):
                schema = {**schema, "$defs": {**schema.get("$defs", {}), _ANY_NAME: _ANY_VALUE}}
        schema = _away_from_zero(schema)
        self.parts.append((", ".join(self._place), schema))
        return self.add("%json " + json.dumps({**schema, "x-guidance": {**JSON_FORM, **form}}))

    def _is_beyond(self, schema: Schema, *, of_constants: bool = False) -> bool:
        """Whether a schema has something that the library does not say exactly. of_constants: a value or bound. It may
        be one of `alternatives`, which is new, though what stands in it is the root's."""
        if of_constants not in self._beyond:
            self._beyond[of_constants] = leading_to(self.root, partial(self._is_fault, of_constants=of_constants))
        beyond = self._beyond[of_constants]
        if id(schema) in beyond or self._is_fault(schema, of_constants=of_constants):
            return True
        return any(id(part) in beyond for part in within(schema, self.root))

    def _is_fault(self, schema: Schema, *, of_constants: bool) -> bool:
        """As above, of what stands in no schema within it."""
        if _is_long(schema.get("const")) or _is_long(schema.get("enum")):
            return True
        least = 2**63 if schema.get("type") == "number" else _EXACT + 1
        if any(abs(each) >= least for name in _BOUNDS for each in _numbers(schema.get(name))):
            return True
        is_open = self._is_closed and not (of_constants or {*_BOUNDS, "multipleOf", "const", "enum"} & schema.keys())
        return is_open and schema.get("type") == "number"

    def _values(self, values: Sequence[Any]) -> str:
        for number in _numbers(list(values)):
            if not is_number(number):
                raise NotForcible("a number of it is beyond floats")
            if self._integers is not None and isinstance(number, int) and number not in self._integers:
                raise NotForcible(f"{number} has more than 64 bits")
        return f"({' | '.join(quoted(_dumped(each)) for each in values)})"

    def _object(self, schema: Schema, form: Mapping[str, Any]) -> str:
        named, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [key for key in required if key not in named]:
            raise NotForcible(f"it requires {missing[0]!r:.80}, and has no such property")
        items = []
        for key, value in named.items():
            with self.at(f"property {key!r:.80}"):
                items.append((f"{quoted(_dumped(key) + ': ')} {self.json(value, **form)}", key in required))
        return f'"{{" {self.listed(items, quoted(", "))} "}}"'

    def _array(self, schema: Schema, form: Mapping[str, Any]) -> str:
        with self.at("its items"):
            item = self.add(self.json(schema.get("items", {}), **form))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and least > most:
            raise NotForcible("it allows no value")
        if most == 0:
            return '"[]"'
        more = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def listed(self, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """Pieces for items in their order with commas between them; those that are not required may be left out."""
        # From the last to the first: behind an item that stands (more), and where none stands yet (first).
        more, first = "", ""
        for item, required in reversed(items):
            with_comma, alone = f"{comma} {item} {more}", f"{item} {more}"
            if not required:
                with_comma, alone = f"({with_comma} | {more})", f"({alone} | {first})"
            more, first = (self.add(each) if each.strip() else "" for each in (with_comma, alone))
        return first

    def _integer(self, schema: Schema) -> str:
        """The expression of the integers between bounds."""
        own = self._integers or range(-(10**40), 10**40)
        low, high = own.start, own.stop - 1
        for name, limit in ((each, schema[each]) for each in _BOUNDS if each in schema):
            if not is_number(limit):
                raise NotForcible(f"{name} is no number")
            if name.endswith("inimum"):
                low = max(low, math.ceil(limit) + (name[0] == "e" and limit == math.ceil(limit)))
            else:
                high = min(high, math.floor(limit) - (name[0] == "e" and limit == math.floor(limit)))
        if low > high:
            raise NotForcible("no integer is within its bounds")
        parts = [_digits(max(0, low), high)] if high >= 0 else []
        parts += [f"-({_digits(max(1, -high), -low)})"] if low < 0 else []
        return "|".join(parts)


def quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_without(mark: str, unlike: Sequence[str] = ()) -> str:
    """The expression of any text that has no `mark` in it. unlike: regular expressions of whole texts that it is
    not."""
    return "/(?s:.*)/" + "".join(f" & ~/{each}/" for each in (text_with(mark), *unlike))


def text_with(mark: str) -> str:
    """The regular expression of any text that has a mark in it."""
    spelled = "".join(f"\\x{{{ord(each):x}}}" for each in mark)
    return f"(?s:.*){spelled}(?s:.*)"


_PLAIN_FLOAT: Final = re.compile(r"-?\d{1,15}\.\d+")


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a JSON value."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)
    elif kind_of(value) in ("integer", "number"):
        yield value


def _is_long(value: Any) -> bool:
    """Whether a value has a number in it that the library does not say as it is."""
    return any(
        abs(each) > _EXACT if isinstance(each, int) else _PLAIN_FLOAT.fullmatch(repr(each)) is None
        for each in _numbers(value)
    )


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _digits(low: int, high: int) -> str:
    """The expression of the integers of a range, both at least 0."""
    one, other = str(low), str(high)
    if len(one) < len(other):
        return f"{_digits(low, 10 ** len(one) - 1)}|{_digits(10 ** len(one), high)}"
    return _alike(one, other)


def _alike(low: str, high: str) -> str:
    """As `_digits`, of as many digits each, zeros at the beginning too."""
    rest = len(low) - 1
    if low == high:
        return low
    if not rest:
        return f"[{low}-{high}]"
    if {*low} == {"0"} and {*high} == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f"{low[0]}({_alike(low[1:], high[1:])})"
    parts = [f"{low[0]}({_alike(low[1:], '9' * rest)})", f"{high[0]}({_alike('0' * rest, high[1:])})"]
    between = int(low[0]) + 1, int(high[0]) - 1
    if between[0] <= between[1]:
        parts.append(f"[{between[0]}-{between[1]}][0-9]{{{rest}}}")
    return f"({'|'.join(parts)})"


def _away_from_zero(schema: Any) -> Any:
    """A schema whose open bounds at zero are a little further out, where the other bound is below 1: the library allows
    zero there."""
    if not isinstance(schema, Mapping):
        return schema
    result = changed_within(schema, _away_from_zero)
    for open_bound, bound, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        others = (sign * each for name in _BOUNDS if name != open_bound for each in _numbers(result.get(name)))
        nearest = min((each for each in others if each > 0), default=1)
        if is_number(result.get(open_bound)) and result[open_bound] == 0 and nearest < 1:
            del result[open_bound]
            result[bound] = sign * nearest / _NEAR_ZERO
    return result


def _closed(schema: Any, root: Any, budget: Iterator[int]) -> Any:
    """A schema that allows less: objects have no properties beyond those named, and numbers are within bounds, also
    where a value may be any. root: what its references are of. budget: has an item for each schema that may be closed
    yet. Raises NotForcible: more are joined."""
    if schema is True:
        return _ANY
    if not isinstance(schema, Mapping):
        return schema
    if next(budget, None) is None:
        raise NotForcible(f"its references join more than {_MOST_CLOSED} schemas; make it simpler")
    result = changed_within(joined(schema, root), partial(_closed, root=root, budget=budget))
    if not _SAY_WHICH & result.keys():
        result["type"] = sorted(ANY_KIND)
    kinds = result.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds and "allOf" not in result:
        result.setdefault("additionalProperties", False if "properties" in result else _ANY)
    if "array" in kinds and "prefixItems" not in result:
        result.setdefault("items", _ANY)
    if {"number", "integer"} & set(map(str, kinds)) and not {"enum", "const"} & result.keys():
        least, most = (-_WIDEST, _WIDEST) if "number" in kinds else (_LEAST, _MOST)
        if any(abs(each) >= _WIDEST for name in _BOUNDS for each in _numbers(result.get(name))):
            least, most = _LEAST, 2**62
        if not {"minimum", "exclusiveMinimum"} & result.keys():
            result["minimum"] = least
        if not {"maximum", "exclusiveMaximum"} & result.keys():
            result["maximum"] = most
    return result
