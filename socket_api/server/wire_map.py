"""From a result of the service to the map that crosses the wire, checked on the way: a client would take a drift of
fields for a breach of the protocol.

Long lists are made piece by piece, for a stream of somebody else waits meanwhile. Server half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter

from ...daemon.engine.pieces import SESSIONS_AT_ONCE, Pieces
from ..wire.results import Reply

_PLAIN_ITEMS_AT_ONCE: Final = 4096
"""Numbers and texts, which take less time than records do."""


def wire_map(model: type[Reply], result: object) -> Pieces[dict[str, Any]]:
    """The map of a result, which is a record of the service, or already a map of its fields."""
    given = _fields_of(result)
    long = {name: items for name, items in given.items() if _is_sequence(items) and len(items) > _at_once(items)}
    short = {name: _plain(() if name in long else value) for name, value in given.items()}
    found = model.model_validate(short, strict=False).model_dump()
    for name, items in long.items():
        found[name] = yield from _checked(_adapter(model, name), items)
    return found


def _checked(of_items: TypeAdapter[Any], items: Sequence[Any]) -> Pieces[tuple[Any, ...]]:
    found: list[Any] = []
    at_once = _at_once(items)
    for start in range(0, len(items), at_once):
        piece = of_items.validate_python(_plain(items[start : start + at_once]), strict=False)
        found += of_items.dump_python(piece)
        yield
    return tuple(found)


@cache
def _adapter(model: type[Reply], name: str) -> TypeAdapter[Any]:
    """For pieces of a field that is a list of any length."""
    kind: Any = model.model_fields[name].annotation
    return TypeAdapter(kind)


def _at_once(items: Sequence[Any]) -> int:
    return SESSIONS_AT_ONCE if is_dataclass(items[0] if items else None) else _PLAIN_ITEMS_AT_ONCE


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _fields_of(result: Any) -> Mapping[str, Any]:
    return result if isinstance(result, Mapping) else {each.name: getattr(result, each.name) for each in fields(result)}


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict` has it, of what the service answers: records, maps, sequences and plain values."""
    if is_dataclass(value) or isinstance(value, Mapping):
        return {name: _plain(item) for name, item in _fields_of(value).items()}
    return tuple(map(_plain, value)) if _is_sequence(value) else value
