"""Waiting that outlasts a cancellation.

A request whose client goes away is cancelled, but work that others' state depends on (a step on the engine thread,
a bundle that is being written) must be seen to its end before the session is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ..api.session import Look

Result = TypeVar("Result")


class LeftMidway(asyncio.CancelledError):
    """The cancellation of a request that was done in part; that part stays. was_read: whether the session has read what
    the request had for it; tokens, text: what was written; token_count: what the session holds now; branched: the look
    that it ended."""

    def __init__(
        self, *, was_read: bool, tokens: tuple[int, ...], text: str, token_count: int, branched: Look | None = None
    ) -> None:
        super().__init__()
        self.was_read = was_read
        self.tokens = tokens
        self.text = text
        self.token_count = token_count
        self.branched = branched


def require_wanted() -> None:
    """Raise the cancellation that came when a step of this task was done already, before it begins another."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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
