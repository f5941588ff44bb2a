"""What a connection holds, and lets go of when it ends. A server makes a holder for each; a caller within the process
has none, and what it makes stays until it is closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar


class Holder:
    """Holds things by a key, each with the function that ends it."""

    def __init__(self) -> None:
        self._ends: dict[int, Callable[[], Awaitable[object]]] = {}

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self._ends)

    def hold(self, key: int, end: Callable[[], Awaitable[object]]) -> None:
        """Hold one more thing."""
        self._ends[key] = end

    def let_go(self, key: int) -> None:
        """Hold it no more: it has ended."""
        self._ends.pop(key, None)

    async def end(self) -> None:
        """End all that it holds."""
        while self._ends:
            _, end = self._ends.popitem()
            await end()


holder: ContextVar[Holder | None] = ContextVar("holder", default=None)
"""Of the request under way."""
