"""Daemons that share a remote, with eyes inside. The fixture `machine` opens them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from torpor.daemon.disk.remote import Remote
from torpor.memvid.errors import RemoteUnreachable
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import Rigged

S = SessionUri("default", "s")
OpenMachine = Callable[..., AbstractAsyncContextManager[Rigged]]


def remote_of(rig: Rigged) -> Remote:
    remote = rig.service._parts.store.remote
    assert remote is not None
    return remote


async def freed(rig: Rigged, uri: SessionUri = S) -> None:
    """The remote has the session, and others may have it."""
    while (head := await remote_of(rig).head(uri)) is None or head.newest is None or head.awake_at is not None:
        await asyncio.sleep(0.01)


async def dies(rig: Rigged) -> None:
    """As close to a kill as one process comes: nothing is put to sleep, sent or released."""
    parts = rig.service._parts
    await parts.upkeep.loop.close()
    parts.store.disk.close()


async def unreachable(*_: Any, **__: Any) -> Any:
    """In the place of what asks a remote that does not answer, on the event loop."""
    await asyncio.sleep(0)
    silent()


def silent(*_: Any, **__: Any) -> Any:
    """As `unreachable`, on any thread."""
    raise RemoteUnreachable("No answer.")
