"""The shape that every error of Torpor has, so that one table can carry any of them to a user or over a wire.

Each folder derives one root of its own from `TorporError` (StoreError, SnapshotError, DaemonError, ApiError).
"""

from __future__ import annotations

import re
from typing import Any, ClassVar


class TorporError(Exception):
    """An expected failure.

    `code` is stable and names the kind: it is the name of the class in small letters, unless the class says another; so
    who renames a class writes the code as it was into it. The message says what is wrong and what to do about it;
    `details` holds the facts (plain str, int, float, bool, None, and lists or maps of them), which can also be read as
    attributes.
    """

    code: ClassVar[str] = "error"

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        """Make it again as it is, without its constructor: what that takes is not what `args` has."""
        return _made_again, (type(self), self.args), self.__dict__

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class NoHome(TorporError):
    """The system knows no home folder of this user, or of the one that a path names."""


def _made_again(kind: type[TorporError], args: tuple[Any, ...]) -> TorporError:
    return kind.__new__(kind, *args)
