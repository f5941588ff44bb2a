"""The fields of a foreign API's request: checked, with their own names in refusals.

A field that is not known has no effect, and is named in the answer's `x-torpor-ignored`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema

from ...daemon.api.limits import MAX_STOPS
from ...daemon.api.reading import Stop
from ..errors import InvalidRequest
from ..wire.checking import checked

MAX_IGNORED_TOLD: Final = 32
"""Names in one header."""

_SAFE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """Base of each object of a request. It keeps what it does not know."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def read_fields(kind: type[B], raw: Mapping[str, Any]) -> B:
    """Check a request. Raises InvalidRequest: with the first field at fault."""
    read: TypeAdapter[B] = _reader(kind)
    return checked("request", read.validate_python, raw)


@cache
def _reader(kind: type[Body]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fault_at(field: str, problem: str) -> InvalidRequest:
    """The refusal of a field. problem: a sentence without its full stop."""
    return InvalidRequest(f"{field}: {problem}.", field=field)


def ignored_of(body: Body, also: Iterable[str] = ()) -> str:
    """The names of given fields that have no effect, for a header. also: known fields without one."""
    names = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return ", ".join([name for name in (*names, *also) if _SAFE.fullmatch(name)][:MAX_IGNORED_TOLD])


def _joined(content: object) -> object:
    """The text of a content: a text, or a list of parts, of which each is a text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("it is neither a text nor a list of parts; give one of them")  # noqa: TRY004 - pydantic tells no other
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _TEXT_KINDS or not isinstance(text, str):
            told = repr(kind) if isinstance(kind, str) and _SAFE.fullmatch(kind) else "no text"
            raise ValueError(f"part {at} is {told}; this model reads text alone")
        texts.append(text)
    return "\n".join(texts)


_TEXT_KINDS: Final = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")

Content = Annotated[
    str,
    BeforeValidator(_joined),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
"""A text, or a list of parts that are text."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Texts that end an answer; a single one may stand alone."""
