"""The leases of sessions that are in use are renewed, a few times in each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import ClassVar

from ...memvid.errors import LeaseLost, RemoteRefused, RemoteUnclear, RemoteUnreachable
from ...memvid.uri import SessionUri
from ..disk.remote import Remote
from ..disk.remote_threads import RENEWED_AT_ONCE
from .loop import Job, Upkeep
from .uploading import Uploading


class Renewing(Job[SessionUri]):
    """Renews those leases together that are due. Who asks for the session gets it once nobody here uses it."""

    name: ClassVar = "lease"

    def __init__(self, upkeep: Upkeep, remote: Remote, uploading: Uploading) -> None:
        self._remote = remote
        self._uploading = uploading
        super().__init__(upkeep)
        remote.on_lease = lambda _: self.look_again()

    def due(self) -> Iterable[tuple[SessionUri, float]]:
        now = time.monotonic()
        return [(uri, now + lease.due_s) for uri, lease in self._remote.renewable().items()]

    async def piece(self, uri: SessionUri) -> None:
        due = [each for each, lease in self._remote.renewable().items() if each != uri and lease.due_s <= 0]
        one, *_ = await asyncio.gather(*map(self._renew, [uri, *due[: RENEWED_AT_ONCE - 1]]), return_exceptions=True)
        if one is not None:  # of the others a fault is told when its turn comes
            raise one

    async def _renew(self, uri: SessionUri) -> None:
        # What fails is due again soon, and not only once the lease has run out. A lost lease is due no more, and the
        # next one of its session is a new one: it is not put off for what became of this.
        with suppress(RemoteUnreachable, RemoteUnclear, RemoteRefused, LeaseLost):
            if await self._remote.renew(uri):
                self._uploading.note_at_once(uri)
            elif not self._uploading.is_in_use(uri):
                self._uploading.note(uri)
