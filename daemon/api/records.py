"""The base of every request of a verb, and types of value that several records share.

A request refuses unknown fields; a reader skips those of a result (`records.py` of the package).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, InstanceOf

from ...records import Record
from .limits import (
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_MODEL_CHARS,
    MAX_NUMBER,
    MAX_SESSION_CHARS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_ID,
)


@dataclass(frozen=True, slots=True)
class Listed:
    """Marks a list of any kind; behind the wire it is a tuple. or_one: a single text stands for a list of it. at_once:
    items of a long list that are checked in one piece, about a millisecond."""

    or_one: bool = False
    at_once: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        (item,) = get_args(source)
        of_items: Any = GenericAlias(tuple, (item, ...))
        return handler.generate_schema(Annotated[of_items, BeforeValidator(_as_tuple)])


def _as_tuple(value: object) -> object:
    return tuple(value) if type(value) is list else value


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


class Request(Record):
    """Base of every request of a client."""

    def require(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            ValueError: a sentence on what to give, without its full stop.
        """
