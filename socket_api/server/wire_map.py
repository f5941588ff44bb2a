"""From a result of the service to the map on the wire. It is checked on the way: a value that the record does not allow
would look like a breach of the protocol.

Long lists are made piece by piece, because other clients' streams wait meanwhile. Server half.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter

from ...daemon.api.verb import R, Verb
from ...daemon.tasks.pieces import SESSIONS_AT_ONCE, Pieces
from ...records import IGNORING, Record, as_map
from ..wire.checking import reader_of_result

_PLAIN_ITEMS_AT_ONCE: Final = 4096
"""Numbers and texts take less time than records."""


def wire_map(verb: Verb[Any, R], result: R) -> Pieces[dict[str, Any]]:
    """The map of the answer to a verb."""
    given = vars(result)
    long = {name: each for name, each in given.items() if isinstance(each, list | tuple) and len(each) > _at_once(each)}
    short = {name: as_map(() if name in long else value) for name, value in given.items()}
    reader_of_result(verb).validate_python(short)
    for name, items in long.items():
        short[name] = yield from _checked(_of_field(verb, name), items)
    return short


def _checked(of_items: TypeAdapter[Any], items: Sequence[Any]) -> Pieces[tuple[Any, ...]]:
    found: list[Any] = []
    at_once = _at_once(items)
    for start in range(0, len(items), at_once):
        piece = as_map(items[start : start + at_once])
        of_items.validate_python(piece)
        found += piece
        yield
    return tuple(found)


@cache
def _of_field(verb: Verb[Any, Any], name: str) -> TypeAdapter[Any]:
    """For pieces of a field that is a list."""
    return TypeAdapter(get_type_hints(verb.result, include_extras=True)[name], config=IGNORING)


def _at_once(items: Sequence[Any]) -> int:
    return SESSIONS_AT_ONCE if isinstance(items[0] if items else None, Record) else _PLAIN_ITEMS_AT_ONCE
