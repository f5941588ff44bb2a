"""The thread for work on the store that no session waits for: pieces of upkeep, and orders of maintenance. Whoever
works on it has it alone.

Here upkeep yields to requests. A piece stops at its next step once an order waits, a sleep is written, or the daemon
stops. And while it writes, a repack has a temporary file beside the packs that it replaces: a sleep without room claims
that, and the repack, an order too, stops at its next step and removes the file. None begins until the sleep has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from ..errors import ServiceClosed
from ..tasks.cancellation import to_the_end
from ..tasks.door import Door, Phase

Result = TypeVar("Result")


class UpkeepThread:
    """Works on one thread, in turns. The event loop's, but for what says that it is for any thread. Once the daemon
    stops, no more work is begun: pieces and repacks stop at their next step, other orders go on to their end.

    sleeps: those that are being written. claims: those of them that have no room. repacks_ended: how many have.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        # One: what it does is slow on purpose, and two would take the disk and a processor from requests.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torpor-upkeep")
        self._turn = asyncio.Lock()
        self._orders, self._repacks = _Count(), _Count()
        self.sleeps, self.claims = _Count(), _Count()
        self.repacks_ended = 0

    # --- for upkeep and orders

    @asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """Have the thread alone, for a piece of upkeep. Raises ServiceClosed: the daemon stops."""
        async with self._turn:
            self._require_going_on()
            yield

    async def run(self, work: Callable[[], Result]) -> Result:
        """Work on the thread, within a piece, or shortly at the end of one; to its end, even if no caller waits any
        more."""
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._pool, work))

    async def order(self, work: Callable[[], Result]) -> Result:
        """Do what was asked for, after earlier orders and the piece that runs. Raises ServiceClosed: the daemon stops,
        and has not begun it."""
        async with self._ordered():
            return await self.run(work)

    async def repack(
        self, work: Callable[[Callable[[], bool]], Result], *, is_order: bool = False
    ) -> tuple[Result, bool]:
        """Repack, as a piece or an order. work: gets a function that tells, at each step, whether it has to stop. Gives
        its result, and whether it was told to stop. Raises ServiceClosed, as `order`."""
        stop = _Stop(self._must_order_stop if is_order else self.must_stop)
        await (self.claims if is_order else self.sleeps).none()
        async with self._ordered() if is_order else self.piece():
            try:
                with self._repacks:
                    return await self.run(partial(work, stop)), stop.was_told
            finally:
                self.repacks_ended += 1

    def must_stop(self) -> bool:
        """Whether a piece has to stop at its next step. For any thread."""
        return self._is_stopping() or bool(self._orders) or bool(self.sleeps)

    def _must_order_stop(self) -> bool:
        return self._is_stopping() or bool(self.claims)

    def _is_stopping(self) -> bool:
        return self._door.phase >= Phase.STOPPING

    @asynccontextmanager
    async def _ordered(self) -> AsyncIterator[None]:
        with self._orders:
            await self._turn.acquire()
        try:
            self._require_going_on()
            yield
        finally:
            self._turn.release()

    def _require_going_on(self) -> None:
        if self._is_stopping():
            raise ServiceClosed("The daemon is stopping; try again when it is back.")

    # --- for sleeps

    async def wait_for_room(self, ended_before: int) -> bool:
        """Within a claim, wait until a running repack has stopped and removed its temporary file. False if none has run
        since `repacks_ended` was `ended_before`: then there is no more room than before."""
        had_one = bool(self._repacks) or self.repacks_ended != ended_before
        await self._repacks.none()
        return had_one

    # --- the end

    async def close(self) -> None:
        """Wait for the work that runs, and end the thread. The daemon has to stop before."""
        async with self._turn:
            self._pool.shutdown()


class _Count:
    """How many are within it now."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    def __bool__(self) -> bool:
        """For any thread."""
        return self._count > 0

    async def none(self) -> None:
        """Wait until none is within it."""
        await self._none.wait()


class _Stop:
    """A repack calls this between its steps; it remembers an order to stop."""

    def __init__(self, must_stop: Callable[[], bool]) -> None:
        self._must_stop = must_stop
        self.was_told = False

    def __call__(self) -> bool:
        self.was_told = self.was_told or self._must_stop()
        return self.was_told
