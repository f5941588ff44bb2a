"""What the compiler's fuel does not count. Its time and memory double with each pattern that one text has to match, and
grow with the number that another is to be a multiple of: a kilobyte of schema took minutes and gigabytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from .schemas import NotForcible, Schema, binding, parts_of, placed, resolved

MOST_PATTERNS: Final = 8
"""That one text has to match. These took half a second, and six more half a minute."""

MOST_MULTIPLE: Final = 10_000
"""Of `multipleOf`, without its point and all zeros at its end but one; multiplied where several hold for one number.
These took less than a second, and a hundred times as much minutes."""

_JOINING: Final = ("allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions")
_JSON: Final = json.JSONDecoder()


def require_light(schema: Any, root: Any) -> None:
    """Raises NotForcible: a schema has a value that more has to hold for than is compiled. root: the schema that it is
    a part of. Both as of `binding`. It names the smallest such part."""
    if (reason := _too_much(schema, root)) is not None:
        for place, part in parts_of(schema):
            with placed(place):
                require_light(part, root)
        raise NotForcible(reason)


def _too_much(schema: Any, root: Any) -> str | None:
    if _Together(root, _patterns).of(schema) > MOST_PATTERNS:
        return f"it has a text that more than {MOST_PATTERNS} patterns and formats hold for at once"
    if round(_Together(root, _multiple).of(schema), 6) > math.log10(MOST_MULTIPLE):
        return f"without the zeros at its end but one, its 'multipleOf' is above {MOST_MULTIPLE}"
    return None


def require_light_grammar(source: str) -> None:
    """As `require_light`, of a grammar in the compiler's own form, with the schemas in it."""
    if source.count("&") > MOST_PATTERNS:
        raise NotForcible(f"the grammar has more than {MOST_PATTERNS} '&'")
    for behind in source.split("%json")[1:]:
        try:
            schema, _ = _JSON.raw_decode(behind.lstrip())
        except ValueError:
            raise NotForcible("the grammar has '%json' with no schema behind it") from None
        bound = binding(schema)
        require_light(bound, bound)


class _Together:
    """What the schemas that may hold for one value weigh together, at most."""

    def __init__(self, root: Any, weight: Callable[[Schema], float]) -> None:
        self._root = root
        self._weight = weight
        self._known: dict[str, float] = {}  # by reference; 0 while one is looked at

    def of(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return 0
        parts = parts_of({key: value for key, value in schema.items() if key not in _JOINING})
        weight = max([self._weight(schema), *(self.of(part) for _, part in parts)])
        weight += sum(map(self.of, schema.get("allOf", ())))
        weight += sum(max(map(self.of, schema.get(word, ())), default=0) for word in ("anyOf", "oneOf"))
        return weight + (self._behind(schema["$ref"]) if "$ref" in schema else 0)

    def _behind(self, reference: str) -> float:
        if reference not in self._known:
            self._known[reference] = 0
            self._known[reference] = self.of(resolved(reference, self._root))
        return self._known[reference]


def _patterns(schema: Schema) -> float:
    return len({"pattern", "format"} & schema.keys())


def _multiple(schema: Schema) -> float:
    _, digits, exponent = Decimal(str(schema.get("multipleOf", 1))).as_tuple()
    text = "".join(map(str, digits))
    short = text.rstrip("0")
    has_zeros = int(exponent) + len(text) - len(short) > 0
    return math.log10(int(short or "1") * (10 if has_zeros else 1))
