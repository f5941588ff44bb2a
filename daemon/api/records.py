"""The base of every request of a verb, and types of value that several records share.

A request refuses unknown fields; a reader skips those of a result (`records.py` of the package).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf

from ...records import Listed, Record
from .limits import (
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_MODEL_CHARS,
    MAX_NUMBER,
    MAX_SESSION_CHARS,
    MAX_TEXT_CHARS,
)
from .sampling import Sampling


def _without_nulls(raw: Any) -> Any:
    return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


Seconds = Annotated[float, Field(ge=0)]
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


NamedSampling = Annotated[Sampling, BeforeValidator(_without_nulls)]
"""The sampling of a request: on the wire a parameter that is null counts as left out."""

LentBytes = bytes | InstanceOf[memoryview]
"""What the daemon gives as a view of its memory, to read alone; behind the wire they are bytes."""


class Request(Record):
    """Base of every request of a client."""

    def require(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            ValueError: a sentence on what to give, without its full stop.
        """
