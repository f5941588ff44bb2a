"""Patterns that one text has to match, all of them: the compiler of grammars takes time and memory that double with
each, and its fuel does not count that."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .schemas import NotForcible, joined_parts, parts_of, resolved, within

MOST_JOINED: Final = 4
"""Patterns of one text."""

_MOST_LOOKS: Final = 50_000
"""Schemas that are looked at behind others, for all patterns of one schema: references may lead to many."""

_SAME_VALUE: Final = ("allOf", "anyOf", "oneOf")

_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
"""A string or an expression of a Lark grammar."""

_TOLD: Final = f"one text is to match more than {MOST_JOINED} patterns; join fewer, or make them one"


def require_few_joined(root: Any) -> None:
    """Refuse a schema that joins many patterns for one text, in allOf or beside references. Raises NotForcible."""
    if not isinstance(root, Mapping):
        return
    every = list(_every(root))
    if len({each["pattern"] for each in every if isinstance(each.get("pattern"), str)}) <= MOST_JOINED:
        return
    looks = iter(range(_MOST_LOOKS))
    for schema in every:
        parts = list(joined_parts(schema, root, set()))
        if len(parts) > 1:
            counts = [Counter(_paths(part, root, (), frozenset(), looks)) for part in parts]
            joining = Counter(path for each in counts for path in each)
            if any(parts > 1 and sum(each[path] for each in counts) > MOST_JOINED for path, parts in joining.items()):
                raise NotForcible(_TOLD)


def require_few_in_lark(grammar: str) -> None:
    """Refuse a Lark grammar that joins many terminals, or has a schema that joins many patterns. Raises NotForcible."""
    if _QUOTED.sub("", grammar).count("&") >= MOST_JOINED:
        raise NotForcible(_TOLD)
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # the compiler refuses it, or it is a word in a string
        require_few_joined(schema)


def _every(root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema, each once."""
    waiting, seen = [root], {id(root)}
    while waiting:
        schema = waiting.pop()
        yield schema
        for part in (*(part for _, part in parts_of(schema)), *within(schema, root)):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _paths(
    schema: Any, root: Any, path: tuple[str, ...], behind: frozenset[str], looks: Iterator[int]
) -> Iterator[tuple[str, ...]]:
    """Where in a value of a schema patterns are. path: to the schema. behind: the references that led there."""
    if not isinstance(schema, Mapping):
        return
    if next(looks, None) is None:
        raise NotForcible("its references join too many schemas; make it simpler")
    if "pattern" in schema:
        yield path
    for place, part in parts_of({key: schema[key] for key in schema.keys() - {"$defs", "definitions"}}):
        word = place.partition(" ")[0]
        yield from _paths(part, root, path if word in _SAME_VALUE else (*path, place), behind, looks)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in behind:
        yield from _paths(resolved(reference, root), root, path, behind | {reference}, looks)
