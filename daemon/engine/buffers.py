"""MLX's cache of freed buffers, kept small beside the memory budget.

MLX keeps the memory of arrays that are gone, to use it again; to everybody else it is taken. So what is kept is
bounded, and what sessions had is given back when they go to sleep to make room.

Only the engine thread may ask for either: MLX waits for its streams then, without letting other threads run Python, and
the stream of a wake may wait for Python.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from .engine import Engine

CACHED_SHARE: Final = 16
"""Freed buffers are kept up to this part, one sixteenth, of what the budget leaves beside the models: beside what is
counted, for they are no session's, but there."""


class Buffers:
    """The cache of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: int | None = None

    async def bound(self, for_sessions: int) -> None:
        """Let MLX keep no more than its share, nor more than it would have kept by itself, until `close`.

        for_sessions: what the budget leaves beside the models.
        """

        def limit() -> int:
            before = int(mx.set_cache_limit(0))  # MLX tells it to those who change it alone
            before = before if self._before is None else self._before
            mx.set_cache_limit(min(before, for_sessions // CACHED_SHARE))
            return before

        self._before = await self._engine.call(limit)

    async def hand_back(self) -> None:
        """Give all of it back to the system."""
        await self._engine.call(mx.clear_cache)

    async def close(self) -> None:
        """Let MLX keep what it would have kept by itself."""
        before = self._before
        if before is not None:
            await self._engine.call(lambda: mx.set_cache_limit(before))
