"""MLX's cache of freed buffers, kept small beside the memory budget.

MLX keeps the memory of freed arrays for reuse; other programs cannot use it. So this cache is bounded, and the memory
of sessions that sleep to make room is given back.

Only the engine thread may do either: meanwhile MLX waits for its streams and lets no other thread run Python.
"""

from __future__ import annotations

from typing import Final

from ...snapshot.memory import hand_back_cache, limit_cache
from .engine import Engine

CACHED_SHARE: Final = 16
"""Freed buffers take at most one sixteenth of the budget without the models. They belong to no session, so they come on
top of the counted bytes."""


class Buffers:
    """The cache of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: int | None = None

    async def bound(self, for_sessions: int) -> None:
        """Limit MLX's cache to its share, or to MLX's own limit if that is less, until `close`.

        for_sessions: the budget without the models, in bytes.
        """

        def limit() -> int:
            before = limit_cache(0)  # MLX tells the old limit only at a change
            before = before if self._before is None else self._before
            limit_cache(min(before, for_sessions // CACHED_SHARE))
            return before

        self._before = await self._engine.call(limit)

    async def hand_back(self) -> None:
        """Give the whole cache back to the system."""
        await self._engine.call(hand_back_cache)

    async def close(self) -> None:
        """Restore MLX's own limit."""
        before = self._before
        if before is not None:
            await self._engine.call(lambda: limit_cache(before))
