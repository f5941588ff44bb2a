"""From a map on the wire to a record of `daemon/api`, strictly (threat 48).

No unknown field, no conversion, no NaN, every length bounded; long lists are checked in pieces. Knows records only by
their declarations. Owns the messages of refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ...daemon.api.records import Request
from ...daemon.api.verb import Verb
from ...records import FORBIDDING, Listed, Result
from ...spellings import by_present_names
from ..errors import InvalidRequest, MalformedMessage
from .framing import Pieces, whole

_Checked = TypeVar("_Checked")
R = TypeVar("R", bound=Result)


def load_request(verb: Verb[Any, Any], raw: Mapping[str, Any]) -> Request:
    """Check the parameters of a request.

    Raises:
        InvalidRequest: with `field`, the first field at fault.
        InvalidSampling: a sampling value is out of range.
    """
    return whole(load_request_in_pieces(verb, raw))


def load_request_in_pieces(verb: Verb[Any, Any], raw: Mapping[str, Any]) -> Pieces[Request]:
    """As `load_request`, for a large request: yields behind each piece of a long list. Each piece is checked as a list
    of its own. In the check of all parameters, one item stands for the list."""
    yield from built(verb)
    raw = by_present_names(raw)
    found: dict[str, tuple[Any, ...]] = {}
    for name, long in _long_lists(verb).items():
        if long.takes(raw.get(name)):
            found[name] = yield from _checked_in_pieces(verb.name, name, long, raw[name])
    short = {name: value[-1:] if name in found else value for name, value in raw.items()}
    request: Request = replace(checked(verb.name, _of_request(verb).validate_python, short), **found)
    try:
        request.require()
    except ValueError as error:
        raise _refusal(verb.name, "", str(error)) from None
    return request


def built(verb: Verb[Any, Any]) -> Pieces[None]:
    """Make what checks the requests and the results of a verb, once, and yield behind each part: pydantic takes up to
    30 ms for one."""
    if verb not in _BUILT:
        for make in (_long_lists, _of_request, reader_of_result):
            make(verb)
            yield
        _BUILT.add(verb)


_BUILT: set[Verb[Any, Any]] = set()


def load_result(verb: Verb[Any, R], raw: Mapping[str, Any]) -> R:
    """Type the answer to a request. Raises MalformedMessage: it is not the result of this verb."""
    try:
        found: R = reader_of_result(verb).validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise MalformedMessage(
            f"The daemon's result of {verb.name} is not what this client knows: {field}: {first['msg']}.", field=field
        ) from None
    return found


@cache
def listed(verb: Verb[Any, Any]) -> Mapping[str, Listed]:
    """The list fields of a request, with their declared marks."""
    hints = get_type_hints(verb.request, include_extras=True)
    marked = {name: _marks_of(declared)[1] for name, declared in hints.items()}
    lists = {name: next((each for each in marks if isinstance(each, Listed)), None) for name, marks in marked.items()}
    return MappingProxyType({name: mark for name, mark in lists.items() if mark is not None})


def params_of_json(verb: Verb[Any, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request from its JSON, with the lists as a map on the wire has them."""
    lists = listed(verb)
    return {name: tuple(value) if name in lists and type(value) is list else value for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class _LongList:
    """A list that is checked in pieces. at_once: items of a piece, about a millisecond. most: items in all."""

    of_items: TypeAdapter[tuple[Any, ...]]
    at_once: int
    most: int

    def takes(self, value: object) -> bool:
        """Whether a value is checked in pieces. One that is too long is not, so that it is refused for its length."""
        return isinstance(value, tuple) and self.at_once < len(value) <= self.most


@cache
def _long_lists(verb: Verb[Any, Any]) -> Mapping[str, _LongList]:
    hints, found = get_type_hints(verb.request, include_extras=True), {}
    for name, mark in listed(verb).items():
        if mark.at_once is not None:
            (item,), marks = _marks_of(hints[name])
            bounds = [each for mark in marks for each in getattr(mark, "metadata", ()) if hasattr(each, "max_length")]
            (most,) = [each.max_length for each in bounds]
            of_items: Any = GenericAlias(tuple, (item, ...))
            found[name] = _LongList(TypeAdapter(of_items, config=FORBIDDING), mark.at_once, most)
    return MappingProxyType(found)


def _marks_of(declared: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of a declared kind, and its marks; for `X | None`, those of X."""
    if get_origin(declared) is not Annotated:
        declared = next((each for each in get_args(declared) if get_origin(each) is Annotated), None)
    kind, *marks = get_args(declared) or (None,)
    return get_args(kind), tuple(marks)


@cache
def _of_request(verb: Verb[Any, Any]) -> TypeAdapter[Any]:
    return TypeAdapter(verb.request)


@cache
def reader_of_result(verb: Verb[Any, Any]) -> TypeAdapter[Any]:
    """Checks a map as the result of a verb."""
    return TypeAdapter(verb.result)


def _checked_in_pieces(verb: str, name: str, long: _LongList, items: Sequence[Any]) -> Pieces[tuple[Any, ...]]:
    found: list[Any] = []
    for start in range(0, len(items), long.at_once):
        piece = items[start : start + long.at_once]
        found += checked(verb, long.of_items.validate_python, piece, within=(name, start))
        yield
    return tuple(found)


def checked(
    verb: str, check: Callable[[Any], _Checked], raw: Any, *, within: tuple[str, int] | None = None
) -> _Checked:
    """The value that `check` makes of a raw one. verb: what it is told to be of. within: the list that this is a piece
    of, and the piece's start in it. Raises InvalidRequest: with `field`, the first one at fault."""
    try:
        return check(raw)
    except ValidationError as error:
        first: dict[str, Any] = {**error.errors(include_url=False, include_input=False)[0]}
        if within is not None:
            name, start = within
            at, *rest = first["loc"]
            first["loc"] = name, start + at, *rest
        place = ".".join(str(part) for part in first["loc"])[:256]
        raise _refusal(verb, place, _problem(first)) from None  # the cause would carry the client's text into logs


def _refusal(verb: str, place: str, problem: str) -> InvalidRequest:
    """Name the field at fault, without repeating the client's text (threat 60)."""
    said = f"{place}: {problem}" if place else problem
    return InvalidRequest(f"{said.rstrip('.')}.", method=verb, field=place or "params")


_PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "it is missing; give it",
        "extra_forbidden": "there is no such field; leave it out",
        "unexpected_keyword_argument": "there is no such field; leave it out",
        "missing_argument": "it is missing; give it",
        "string_type": "it is no text; give a text",
        "string_too_short": "it is too short; give {min_length} or more characters",
        "too_short": "it has {actual_length} entries; give at least {min_length}",
        "too_long": "it has too many entries; give at most {max_length}",
        "list_type": "it is no list; give a list",
        "tuple_type": "it is no list; give a list",
        "bytes_type": "these are no bytes; give bytes",
    }
)
_CONTENT_OF_PARTS = "it is no text; give one text for each message: join a list of parts, write a tool call out"


def _problem(first: Mapping[str, Any]) -> str:
    """The fault of a field and the remedy. Only lengths are taken from the context: no text of a client."""
    kind, place = first["type"], first["loc"]
    if kind == "string_type" and place[:1] == ("messages",) and place[-1] == "content":
        return _CONTENT_OF_PARTS
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format_map(first.get("ctx", {}))
    return str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be", 1)
