"""Beginnings that are being read right now: sessions that begin alike at the same time read their beginning once.

A new session waits for another one that reads its first tokens, and takes them over as of any session (`reuse.py`): at
the next committed block where the other one keeps blocks, else at its end. It never waits for more reading than it has
to do alone. What it has to read itself counts as under way in its turn, so longer beginnings are shared, too.

No circle can come of it: a session that waits reads nothing, and one that reads has its memory and waits for none. If
the other one fails or is given up, the first of those that wait reads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...memvid.format.blocks import BLOCK_TOKENS
from ..engine.admission import current
from ..engine.generation import reading
from ..sessions.sessions import Session
from .reuse import PrefixReuse


class Reading:
    """A reading under way. tokens: of its session at its end. passes: the model calls of these. by_block: whether it
    commits block by block. The event loop's."""

    def __init__(self, live: Session, ids: Sequence[int], *, by_block: bool) -> None:
        self.live = live
        self.tokens = live.state.tokens[:]
        self.tokens.extend(ids)
        self.passes = live.state.passes.copy()
        for size, _ in reading(live.model, live.state, len(ids)):
            self.passes.add(size)
        self.request = current()
        self._by_block = by_block
        self._read = len(live.state.tokens)
        self._told = asyncio.Event()

    @property
    def committed(self) -> int:
        """The tokens that others may take over."""
        return len(self.live.state.tokens) if self._by_block else 0

    def left_before(self, count: int) -> int:
        """How many tokens it reads before others may take over `count`."""
        return (count if self._by_block else len(self.tokens)) - self._read

    def advance(self, tokens_left: int) -> None:
        """Tell those that wait how far it is."""
        self._read = len(self.tokens) - tokens_left
        self._told.set()

    async def told(self) -> None:
        """Wait until it is further, or at its end."""
        self._told.clear()
        await self._told.wait()


class InFlight:
    def __init__(self, reuse: PrefixReuse) -> None:
        self._reuse = reuse
        self._under_way: dict[Reading, None] = {}

    @asynccontextmanager
    async def joined(self, live: Session, ids: Sequence[int], *, by_block: bool) -> AsyncIterator[Reading]:
        """Around the reading of tokens, once no other session is to read their beginning before."""
        if not live.state.tokens:
            await self._wait_for_others(live, ids)
        mine = Reading(live, ids, by_block=by_block)
        self._under_way[mine] = None
        try:
            yield mine
        finally:
            del self._under_way[mine]
            mine.advance(0)

    async def _wait_for_others(self, live: Session, ids: Sequence[int]) -> None:
        request = current()
        while (found := self._best(live, ids)) is not None:
            other, count = found
            request.waits = True
            if not request.stands_back():
                other.request.lift()
            while other in self._under_way and other.committed < count:
                await other.told()
            if other in self._under_way:
                self._reuse.note(other.live)
                return

    def _best(self, live: Session, ids: Sequence[int]) -> tuple[Reading, int] | None:
        """The reading that is worth waiting for, and the tokens that it will have for the session."""
        known, best = self._reuse.known(live, ids) + BLOCK_TOKENS - 1, None
        for other in self._under_way:
            count = self._reuse.usable(live, other.live, other.tokens, other.passes, ids)
            if count > known and other.left_before(count) <= len(ids):
                known, best = count, (other, count)
        return best
