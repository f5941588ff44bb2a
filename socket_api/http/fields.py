"""The fields of a foreign API's request: checked, with their own names in refusals.

A field that is not known has no effect, and is named in the answer's `x-torpor-ignored`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema

from ...daemon.api.limits import MAX_CALL_ID_CHARS, MAX_STOPS
from ...daemon.api.reading import Stop
from ..errors import InvalidRequest
from ..wire.checking import checked

IGNORED_HEADER: Final = "x-torpor-ignored"
MAX_IGNORED_TOLD: Final = 32
"""Names in one header."""

MAX_IGNORED_KEPT: Final = 256
"""Unknown fields of a request."""

_ITEMS_AT_ONCE: Final = 256
"""Of a list that is checked in one call: a few milliseconds."""

_SAFE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """Base of each object of a request. It keeps what it does not know."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def read_fields(kind: type[B], raw: Mapping[str, Any]) -> B:
    """Check a request. What is long is checked in pieces: no other thread goes on while one is checked. Raises
    InvalidRequest: with the first field at fault."""
    read: TypeAdapter[B] = _reader(kind)
    given = {name: raw[name] for name in kind.model_fields.keys() & raw.keys()}
    ignored = dict(islice(((name, value) for name, value in raw.items() if name not in given), MAX_IGNORED_KEPT))
    long = {name: value for name, value in given.items() if type(value) is list and len(value) > _ITEMS_AT_ONCE}
    found = {name: _read_list(name, reader, long[name]) for name, reader in _lists(kind).items() if name in long}
    short = {name: value[-1:] if name in found else value for name, value in given.items()}
    return checked("request", read.validate_python, {**short, **ignored}).model_copy(update=found)


def _read_list(name: str, reader: TypeAdapter[list[Any]], items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for start in range(0, len(items), _ITEMS_AT_ONCE):
        piece = items[start : start + _ITEMS_AT_ONCE]
        found += checked("request", reader.validate_python, piece, within=(name, start))
    return found


@cache
def _lists(kind: type[Body]) -> dict[str, TypeAdapter[list[Any]]]:
    """Readers of the fields of a request that are lists of any length."""
    found = {}
    for name, declared in kind.model_fields.items():
        given = declared.annotation
        for each in get_args(given) if get_origin(given) in (Union, UnionType) else (given,):
            of, *marks = get_args(each) if get_origin(each) is Annotated else (each, *declared.metadata)
            if get_origin(of) is list and not any(getattr(mark, "max_length", None) for mark in _told_by(marks)):
                found[name] = TypeAdapter(of, config=ConfigDict(strict=True))
    return found


def _told_by(marks: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(getattr(mark, "metadata", (mark,)) for mark in marks)


@cache
def _reader(kind: type[Body]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fault_at(field: str, problem: str) -> InvalidRequest:
    """The refusal of a field. problem: a sentence without its full stop."""
    return InvalidRequest(f"{field}: {problem}.", field=field)


def ignored_of(body: Body, also: Iterable[str] = ()) -> str:
    """The names of given fields that have no effect, for a header. also: known fields without one."""
    names = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return ", ".join(told_names((*names, *also)))


def told_names(names: Iterable[str]) -> list[str]:
    """Those of some names that a header can tell, and not too many."""
    return [name for name in names if _SAFE.fullmatch(name)][:MAX_IGNORED_TOLD]


def _is_content(content: object) -> object:
    if content is None or isinstance(content, str | list):
        return content
    raise ValueError("it is neither a text nor a list of parts; give one of them")


Content = Annotated[
    Any,
    BeforeValidator(_is_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
"""A text, or a list of parts, for `Words`."""

_TEXT_KINDS: Final = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Words:
    """Reads contents as text. A line stands for a part that is none, so that a dialogue can go on behind a picture;
    only the newest message is refused, for its client can still give another. left_out: the kinds of such parts."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def of(self, content: Any, field: str = "", *, is_newest: bool = False) -> str:
        """The text of a content. field: its name, for the refusal of one that is the newest. Raises InvalidRequest."""
        if content is None or isinstance(content, str):
            return content or ""
        texts = []
        for at, part in enumerate(content if isinstance(content, list) else [content]):
            text = words_in(part)
            if text is None and is_newest:
                told = _kind_of(part)
                raise fault_at(field, f"part {at} is {told}; this model reads text alone")
            texts.append(self.line_for(part) if text is None else text)
        return "\n".join(texts)

    def line_for(self, part: object) -> str:
        """What stands for a part that is no text."""
        kind = _kind_of(part)
        self.left_out.append(kind)
        return f"[{kind} left out: this model reads text alone]"


def words_in(part: object) -> str | None:
    """The text of a part; of a document or a result of a search that is text, its words. None if it is none."""
    if not isinstance(part, Mapping):
        return None
    kind, source = part.get("type", "text"), part.get("source")
    text: object = part.get("text", part.get("refusal")) if kind in _TEXT_KINDS else None
    if kind == "document" and isinstance(source, Mapping):
        text = source.get({"text": "data", "content": "content"}.get(str(source.get("type")), ""))
    elif kind == "search_result":
        text = part.get("content")
    if isinstance(text, list):
        words = [words_in(each) for each in text]
        return None if None in words else "\n".join(each for each in words if each)
    return text if isinstance(text, str) else None


def _kind_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) and _SAFE.fullmatch(kind) else "something"


def call_id_of(given: str | None) -> str:
    """The id of a call as a verb takes it: some gateways keep whole thoughts in it, and such a one is its digest."""
    if given is None or len(given) <= MAX_CALL_ID_CHARS:
        return given or ""
    return hashlib.sha256(given.encode()).hexdigest()


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Texts that end an answer; a single one may stand alone."""
