"""The room of an answer, in memory and in the journal: it grows in steps with the answer.

A limit on an answer is a ceiling, and most answers end far below it. So only the next step is reserved. Shortly before
its end the following one is taken, where it is free: then the answer goes on without a stop. Where it is not free, the
answer stops between two tokens, and waits for it like any request. Each wait doubles the next step, so that long
answers that crowd each other do not stop often.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ...errors import TorporError
from ...memvid.format.blocks import BLOCK_TOKENS
from ..engine.generation import PREFILL_CHUNK_TOKENS, Room
from ..memory.line import Use
from ..memory.memory import Memory
from ..sessions.sessions import Session
from ..versions.journal import TurnJournal

STEP_TOKENS: Final = BLOCK_TOKENS
"""Caches grow by so many tokens."""


def next_end(tokens: int, limit: int, more: int = STEP_TOKENS) -> int:
    """The end of the room behind a session's tokens: at the end of a step, or at the most that it may have."""
    return min(limit, (tokens + more) // STEP_TOKENS * STEP_TOKENS)


class AnswerRoom(Room):
    """The room of one answer. limit: the most tokens of its session. `ask` is the engine's, all else the loop's."""

    def __init__(self, memory: Memory, journal: TurnJournal, use: Use, limit: int) -> None:
        self._memory = memory
        self._journal = journal
        self._use = use
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._step = STEP_TOKENS
        self._asked: int | None = None
        self._taking: asyncio.Task[None] | None = None

    def begin(self, live: Session) -> None:
        """Go on in a session that has room for a step. Nothing writes in it now."""
        if not self.is_last:
            self.end = next_end(len(live.state.tokens), self._limit, self._step)
        self._live, self._growth = live, live.growth_of(PREFILL_CHUNK_TOKENS)

    def wanted(self) -> int:
        """How many tokens to wait for at the end."""
        self._step *= 2
        tokens = len(self._live.state.tokens)
        return next_end(tokens, self._limit, self._step) - tokens

    def ask(self) -> None:
        if self._asked != self.end and self.end != self._limit:
            self._asked = self.end
            self._loop.call_soon_threadsafe(self._take)

    async def settled(self) -> None:
        if self._taking is not None:
            await asyncio.wait({self._taking})

    def _take(self) -> None:
        """Take the next step, if it is free."""
        if self._asked != self.end or self.is_last:
            return
        end = min(self._limit, (self.end or 0) + STEP_TOKENS)
        if self._memory.take_free(self._use, self._growth(end) - self._use.reserved):
            self._taking = self._loop.create_task(self._take_in_journal(end))

    async def _take_in_journal(self, end: int) -> None:
        try:
            await self._journal.make_room(self._live, end - len(self._live.state.tokens))
        except TorporError:
            return  # it is told where the answer has to stop for it
        self.end = end
