"""Waiting that outlasts a cancellation.

A request whose client goes away is cancelled, but work that others' state depends on (a step on the engine thread,
a bundle that is being written) must be seen to its end before the session is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done, however often the waiting task is cancelled meanwhile; its error is dropped."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # seen, so that asyncio does not report it as never retrieved


async def to_the_end(work: Awaitable[Result]) -> Result:
    """The result of work that runs to its end even when the caller is cancelled, which is then told afterwards.

    Several may wait for one task. What may still be given up (waiting for a turn) does not belong into the work.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise
    finally:
        del task  # its error, whose frames have this one, would hold itself
