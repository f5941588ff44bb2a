"""Changes in folders, told by the system where it can and found by looking where it cannot.

Owns how long is waited at most. The waiting code finds out by looking what has changed, if anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import watchfiles

_LOG = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 5.0
"""After how long it is time to look, whether or not anything was told: the system tells of no change over a network, of
none that a link leads to, and of none where it has no more watches to give."""

_DEBOUNCE_MS: Final = 400


async def change_in(folders: Collection[Path], closing: asyncio.Event) -> None:
    """Return when something may have happened right in one of the folders, or it is time to look, or it is closing."""
    try:
        if folders:
            await _told(folders, closing)
            return
    except Exception as error:  # noqa: BLE001 - no such folder any more, no more watches to be had, and the like
        _LOG.info("%s: looked at every %g s only: %s", ", ".join(map(str, folders)), CHECK_EVERY_S, error)
    with suppress(TimeoutError):
        await asyncio.wait_for(closing.wait(), CHECK_EVERY_S)


async def _told(folders: Collection[Path], closing: asyncio.Event) -> None:
    changes = watchfiles.awatch(
        *folders,
        watch_filter=None,
        debounce=_DEBOUNCE_MS,
        stop_event=closing,
        rust_timeout=round(CHECK_EVERY_S * 1000),
        yield_on_timeout=True,
        recursive=False,
    )
    async with aclosing(changes):
        async for _ in changes:
            return
