"""The reference of the verbs, as Markdown, from their table: `make reference` writes it into docs/reference/verbs.md.

Owns the words for kinds and bounds. All that is said of a verb stands with its row and its records.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from torpor.daemon.api.dialogue import Message, Tool
from torpor.daemon.api.events import NEVER_SENT
from torpor.daemon.api.records import Request
from torpor.daemon.api.verb import Verb
from torpor.daemon.api.verbs import VERBS
from torpor.records import Record

_WORDS: Final[Mapping[object, str]] = {
    str: "text",
    bytes: "bytes",
    memoryview: "bytes",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Mapping: "map",
    dict: "map",
}
_BOUNDS: Final = ("ge", "gt", "le", "min_length", "max_length", "pattern")

_INTRODUCTION = """Each verb is a method of `Client` (blocking) and of
`AsyncClient` (awaited), and a request of that name on the wire ([protocol.md](protocol.md)). What stands before `*` may
be given by its place, the rest by name; `on_event` is called with each event of the request on its way.
"""


def reference() -> str:
    """All verbs, and the records that several of them have."""
    shared = [record for record in _records() if record not in {verb.request for verb in VERBS.values()}]
    verbs = [_of_verb(verb) for verb in VERBS.values()]
    return "\n".join([_INTRODUCTION, *verbs, "## Records\n", *map(_of_record, shared)])


def _of_verb(verb: Verb[Any, Any]) -> str:
    taken = ", ".join(_parameters(verb.request))
    lines = [f"## `{verb.name}`\n", f"`{verb.attribute}({taken})` gives `{verb.result.__name__}`.\n"]
    lines += [inspect.cleandoc(verb.request.__doc__ or ""), ""]
    if verb.leaves is not None:
        lines += [f"Can be cancelled. {verb.leaves}\n"]
    if verb.always:
        lines += ["Also taken while the daemon stops, and while all connections work.\n"]
    return "\n".join(lines + _table(verb.request))


def _of_record(record: type[Record]) -> str:
    return "\n".join([f"### `{record.__name__}`\n", inspect.cleandoc(record.__doc__ or ""), "", *_table(record)])


def _parameters(request: type[Request]) -> Iterator[str]:
    starred = False
    for each in _fields(request):
        if each.kw_only and not starred:
            starred = True
            yield "*"
        yield each.name if _is_needed(each) else f"{each.name}={each.default!r}"


def _table(record: type[Record]) -> list[str]:
    declared = get_type_hints(record, include_extras=True)
    rows = [
        f"| `{each.name}` | {_kind(declared[each.name])} | {_left_out(each)} |"
        for each in _fields(record)
        if each.name not in NEVER_SENT
    ]
    return ["| field | kind | left out |", "|---|---|---|", *rows, ""] if rows else []


def _fields(record: type[Record]) -> list[Field[Any]]:
    """In the order of the record's parameters: a field of a base that is given by name alone stands behind its own that
    may be given by their places."""
    return sorted(fields(record), key=lambda each: each.kw_only is True)


def _left_out(field: Field[Any]) -> str:
    if _is_needed(field):
        return "never"
    return "empty" if field.default is MISSING or field.default == () else f"`{field.default!r}`"


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _kind(declared: Any) -> str:
    """A declared kind, in words."""
    origin, parts = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return _kind(parts[0]) + _bounds(parts[0], parts[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_kind, parts)))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in parts)
    if origin in (tuple, Sequence):
        return f"list of {_kind(parts[0])}"
    if isinstance(declared, type) and issubclass(declared, Record):
        return f"[`{declared.__name__}`](#{declared.__name__.lower()})"
    return _WORDS[origin or declared]


def _bounds(kind: Any, marks: Sequence[Any]) -> str:
    """What a value is held to, in words; empty where it is to nothing but its kind."""
    given = [each for mark in marks for each in getattr(mark, "metadata", (mark,))]
    held = {name: getattr(each, name) for each in given for name in _BOUNDS if getattr(each, name, None) is not None}
    unit = "" if kind in (int, float) else " characters" if kind is str else " items"
    if "pattern" in held:
        return f" as `{held['pattern']}`"
    least = f"more than {held['gt']:,}" if "gt" in held else _told(held.get("ge", held.get("min_length")))
    most = _told(held.get("le", held.get("max_length")))
    if least and most:
        return f" ({least} to {most}{unit})"
    return f" (at least {least}{unit})" if least else f" (at most {most}{unit})" if most else ""


def _told(bound: float | None) -> str:
    return "" if bound is None else f"{bound:,}"


def _records() -> Iterator[type[Record]]:
    """All that rows are made of, each once, those that hold others first."""
    seen: set[type[Record]] = set()
    rows = VERBS.values()
    waiting: list[Any] = [*(verb.result for verb in rows), *(verb.request for verb in rows), Message, Tool]
    while waiting:
        declared = waiting.pop(0)
        if not (isinstance(declared, type) and issubclass(declared, Record)):
            waiting += get_args(declared)
        elif declared not in seen:
            seen.add(declared)
            yield declared
            hints = get_type_hints(declared, include_extras=True)
            waiting += [hints[each.name] for each in fields(declared)]
