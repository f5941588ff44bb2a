"""The threads on which a remote is asked, and whether it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...memvid.errors import RemoteError, RemoteRefused, RemoteUnclear, RemoteUnreachable
from ..tasks.cancellation import to_the_end

_ASKED_AT_ONCE: Final = 4

RENEWED_AT_ONCE: Final = 8
"""Where an answer takes a second, 160 leases of a minute are renewed in time, and four hundred before they run out."""

_SLOW_S: Final = 2.0
_SILENT_S: Final = 30.0
"""Behind a request that failed after so long, what can go on without the remote does not ask it again for that time: a
session that began without it and a removal would each wait as long."""

_OUTAGE_S: Final = 60.0
"""What failed while no request was answered for so long is tried again with the next answer. Behind less, one request
failed beside others that were answered: what it was for waits for its turn."""

Result = TypeVar("Result")


class RemoteThreads:
    """Asks a remote. The event loop's. fault: of the last request, if that failed; None: it was answered. on_return: is
    told of the first answer behind an outage."""

    def __init__(self, fault: RemoteError | None, on_return: Callable[[], None]) -> None:
        # An answer may be long in coming, and a lease does not wait for it.
        self._pool = ThreadPoolExecutor(_ASKED_AT_ONCE + RENEWED_AT_ONCE, thread_name_prefix="torpor-remote")
        self._others = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._silent: tuple[float, RemoteUnreachable] | None = None  # until when, and its last fault
        self.fault = fault
        self._failed_s = None if fault is None else time.monotonic()  # since when no request was answered
        self._on_return = on_return

    async def run(self, work: Callable[[], Result]) -> Result:
        """Ask the remote, to the end."""
        async with self._others:
            return await self.run_at_once(work)

    async def run_at_once(self, work: Callable[[], Result]) -> Result:
        """As `run`; it waits for no other request."""
        begun = time.monotonic()
        try:
            result = await to_the_end(asyncio.get_running_loop().run_in_executor(self._pool, work))
        except (RemoteUnreachable, RemoteUnclear, RemoteRefused) as error:
            self.fault = error
            self._failed_s = self._failed_s or begun
            if isinstance(error, RemoteUnreachable) and time.monotonic() - begun > _SLOW_S:
                self._silent = time.monotonic() + _SILENT_S, error
            raise
        was_away = self._failed_s is not None and time.monotonic() - self._failed_s >= _OUTAGE_S
        self._silent = self.fault = self._failed_s = None
        if was_away:
            self._on_return()
        return result

    def require_answering(self) -> None:
        """Raises RemoteUnreachable: it was silent a moment ago, and is not asked again for what can go on without
        it."""
        if self._silent is not None and time.monotonic() < self._silent[0]:
            raise self._silent[1]

    async def close(self) -> None:
        """Wait for what is under way."""
        await asyncio.to_thread(self._pool.shutdown)
