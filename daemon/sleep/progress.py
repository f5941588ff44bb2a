"""Progress of work on other threads, told on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..api.events import OnEvent, ProgressEvent, Stage


def reporter(stage: Stage, emit: OnEvent) -> Callable[[int, int], None]:
    """Progress from any thread, delivered on the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, ProgressEvent(stage, done, total))

    return report
