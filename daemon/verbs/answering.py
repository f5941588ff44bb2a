"""The table of handlers, by the record that each takes.

Owns the table and the code around each handler. A handler is in it once its module is imported; the `__init__` of this
folder does that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ..api.records import Request, Result
from ..parts import Parts

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Handler:
    """One that answers. told: whether the bus is told that it was asked for, and how it ended. queued: whether it wants
    the engine or memory, and so is taken in only where there is room, with the `priority` that it is given."""

    carry_out: Callable[[Parts, Any], Awaitable[Result]]
    told: bool
    queued: bool


_HANDLERS: dict[type[Request], Handler] = {}
HANDLERS: Mapping[type[Request], Handler] = MappingProxyType(_HANDLERS)


def answers(
    request: type[Q], *, told: bool = True, queued: bool = False
) -> Callable[[Callable[[Parts, Q], Awaitable[R]]], Callable[[Parts, Q], Awaitable[R]]]:
    """Make a function the handler of a request; it stays what it is. told, queued: as of `Handler`."""

    def enter(carry_out: Callable[[Parts, Q], Awaitable[R]]) -> Callable[[Parts, Q], Awaitable[R]]:
        assert request not in _HANDLERS, f"{request.__name__} has a handler"
        _HANDLERS[request] = Handler(carry_out, told, queued)
        return carry_out

    return enter
