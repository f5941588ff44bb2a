"""Waiting that outlasts a cancellation.

A request is cancelled when its client leaves. But work that shared state depends on (a step on the engine thread, a
bundle being written) must end before the session is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ..api.session import Look

Result = TypeVar("Result")


class LeftMidway(asyncio.CancelledError):
    """The cancellation of a request that was partly done; that part stays. was_read: whether the session has read the
    request's input; tokens, text: the generated part; token_count: the tokens of the session now; branched: the look
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
    """Raise a cancellation that came after a step was done, before the task begins another."""
    if is_unwanted():
        raise asyncio.CancelledError


def is_unwanted() -> bool:
    """Whether the task was cancelled, though it goes on to its end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done, even if the waiting task is cancelled; its error is dropped."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # taken, so that asyncio does not log it


async def to_the_end(work: Awaitable[Result]) -> Result:
    """The result of work that runs to its end even if the caller is cancelled; the cancellation is raised afterwards.

    Several callers may wait for one task. Steps that may be cancelled (waiting for a turn) do not belong in the work.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise
    finally:
        del task  # its error, whose frames have this one, would hold itself


async def in_any_case(work: Awaitable[Result]) -> Result:
    """As `to_the_end`, but a cancellation is ignored: it comes too late to undo what the caller has done."""
    task = asyncio.ensure_future(work)
    try:
        await settled(task)
        return task.result()
    finally:
        del task
