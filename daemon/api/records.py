"""The base of every record of a verb: strict fields, and types of value that several records share.

Owns the rules for reading a record from a map. A request refuses unknown fields; a reader skips unknown fields of a
result, so that an older client works with a newer daemon. `socket_api` does the reading, where a map crosses the wire.
In the process a record is a plain value, and not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Final, Literal, dataclass_transform, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, InstanceOf

from .limits import (
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_MODEL_CHARS,
    MAX_NUMBER,
    MAX_SESSION_CHARS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_ID,
)

FORBIDDING: Final = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
IGNORING: Final = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Listed:
    """Marks a list of any kind; behind the wire it is a tuple. or_one: a single text stands for a list of it. at_once:
    items of a long list that are checked in one piece, about a millisecond."""

    or_one: bool = False
    at_once: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        (item,) = get_args(source)
        return handler.generate_schema(GenericAlias(tuple, (item, ...)))


Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
ProcessId = Annotated[int, Field(gt=1, lt=2**31)]
"""Never 0, 1 or a group: a client may act on the process."""

SessionText = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
Labels = Annotated[Sequence[Label], Listed(), Field(max_length=MAX_LABELS)]
Version = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Position = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Priority = Literal["normal", "background"]
"""`background` gives way to `normal`."""

LentBytes = bytes | InstanceOf[memoryview]
"""What the daemon gives as a view of its memory, to read alone; behind the wire they are bytes."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Record:
    """Base of all, which makes frozen dataclasses of them: no conversion, no NaN."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBIDDING

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Read a record from a map: with strict fields pydantic would take only a record."""
        schema = handler(source)
        itself: Any = handler.resolve_ref_schema(schema)
        itself["strict"] = False
        return schema


class Result(Record):
    """Base of every answer of the daemon."""

    __pydantic_config__: ClassVar[ConfigDict] = IGNORING


class Request(Record):
    """Base of every request of a client."""

    def require(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            ValueError: a sentence on what to give, without its full stop.
        """
