"""Versions go into the remote behind sleeps and writes behind, and sessions that sleep become free for others.

A session is looked at behind each of its new versions, and all of them at the start: what an earlier run did not send
is sent then. One for which another machine asks is put to sleep first, once no request has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import ClassVar

from ...errors import TorporError
from ...memvid.remote.sessions import Pushed
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..disk.remote import Remote
from ..events.bus import Bus
from ..events.events import VersionPushed
from ..residency.residency import Residency
from ..tasks.door import LastSleep
from ..tasks.pieces import NAMES_AT_ONCE
from .loop import NOW, SessionJob, Upkeep


class Uploading(SessionJob):
    """Sends one session after the other."""

    name: ClassVar = "remote"

    def __init__(self, upkeep: Upkeep, store: Store, remote: Remote, residency: Residency, bus: Bus) -> None:
        self._store = store
        self._remote = remote
        self._residency = residency
        self._bus = bus
        self._has_begun = False
        super().__init__(upkeep)
        remote.on_version = self.note
        residency.awake.on_drop = self.note

    def due(self) -> Iterable[tuple[SessionUri | None, float]]:
        return super().due() if self._has_begun else [(None, NOW)]

    async def piece(self, uri: SessionUri | None) -> float | None:
        if uri is not None:
            return await super().piece(uri)
        for uris in self._store.index.iter_uris(NAMES_AT_ONCE):
            self._noted.update(dict.fromkeys(uris))
            await asyncio.sleep(0)
        self._has_begun = True
        return None

    def is_in_use(self, uri: SessionUri) -> bool:
        """Whether a session is awake, or a request has it."""
        return uri in self._residency.awake or bool(self._residency.turns.users(uri))

    async def look_at(self, uri: SessionUri) -> float | None:
        lease = self._remote.leases.get(uri)
        if lease is not None and lease.is_lost:
            if not self.is_in_use(uri):
                del self._remote.leases[uri]
        elif lease is not None and lease.request is None and self.is_in_use(uri):
            await self.push(uri)
        elif lease is not None or await self._remote.is_behind(uri):
            async with self._residency.turn(uri):
                await self.hand_over(uri)
        return None

    async def hand_over(self, uri: SessionUri) -> None:
        """Put a session to sleep if somebody asks for it, send it, and let others have it if it sleeps. The caller has
        its turn. Raises as `Residency.hold`, `Remote.push`, and the errors of a sleep."""
        await self._residency.hold(uri)
        live = self._residency.awake.get(uri)
        if live is None:
            await self._residency.journal.replay(uri)  # else it would be there without its last turns
        if live is not None and (lease := self._remote.leases.get(uri)) is not None and lease.request is not None:
            await self._residency.putting_away.put_away(live, ignore, "handover")
        await self.push(uri)
        if uri not in self._residency.awake:
            await self._remote.release(uri)

    async def finish(self, order: LastSleep) -> None:
        """At a stop, behind the last sleeps: send what the remote lacks, and let others have the sessions, as far as
        there is time. The next daemon sends the rest."""
        for uri in dict.fromkeys([*self._remote.leases, *self._noted]):
            with suppress(TorporError):
                order.require_time()
                if uri in self._remote.leases or await self._remote.is_behind(uri):
                    await self._remote.hold(uri)
                    await self.push(uri)
                    await self._remote.release(uri)

    async def push(self, uri: SessionUri) -> Pushed | None:
        """Send the newest version of a session that is held; None: the remote has it, or there is none. Raises as
        `Remote.push`."""
        begun, newest = time.monotonic(), self._store.find_session(uri)
        if newest is None or (head := self._remote.head_of(uri)) is None or head.newest == newest.bundle_id:
            return None
        pushed = await self._remote.push(uri)
        self._bus.publish(
            VersionPushed(
                uri,
                version=pushed.version,
                bytes_sent=pushed.sent.bytes_sent,
                blocks_sent=pushed.sent.blocks_sent,
                seconds=time.monotonic() - begun,
            )
        )
        return pushed
