"""The table of handlers, by the record that each takes.

A handler is in the table once its module is imported; the `__init__` of this folder imports all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ...records import Result
from ..api.records import Request
from ..parts.parts import Parts

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler. told: whether events tell of the request and its end. queued: whether it needs the engine or memory,
    and so waits in the queue at its `priority`."""

    carry_out: Callable[[Parts, Any], Awaitable[Result]]
    told: bool
    queued: bool


_HANDLERS: dict[type[Request], Handler] = {}
HANDLERS: Mapping[type[Request], Handler] = MappingProxyType(_HANDLERS)


def answers(
    request: type[Q], *, told: bool = True, queued: bool = False
) -> Callable[[Callable[[Parts, Q], Awaitable[R]]], Callable[[Parts, Q], Awaitable[R]]]:
    """Make a function the handler of a request. told, queued: as of `Handler`."""

    def enter(carry_out: Callable[[Parts, Q], Awaitable[R]]) -> Callable[[Parts, Q], Awaitable[R]]:
        assert request not in _HANDLERS, f"{request.__name__} has a handler"
        _HANDLERS[request] = Handler(carry_out, told, queued)
        return carry_out

    return enter
