"""The store stays within its budget, so that few sleeps wait for room. And sessions that nobody named and nobody has
used for long are deleted.

`disk/making_room.py` strips. A use, a name or a tag that comes to a session meanwhile saves it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import ClassVar, Final

from ...memvid.answers import DeleteReport
from ...memvid.uri import SessionUri
from ..disk.making_room import Room
from ..residency.residency import Residency
from .loop import NOW, Job, SessionJob, Upkeep

_LOG = logging.getLogger(__name__)

AGAIN_S: Final = 600.0
"""Where nothing more may go. Meanwhile some of it was not used for an hour."""

LOOK_S: Final = 6 * 3600.0
"""A session is unused by the day."""


class MakingRoom(Job[None]):
    """Makes room once the store is nearly as large as it may be. `look_again` behind each new version."""

    name: ClassVar = "make room"

    def __init__(self, upkeep: Upkeep, room: Room) -> None:
        self._room = room
        self._next = NOW
        super().__init__(upkeep)

    def due(self) -> Iterable[tuple[None, float]]:
        return [(None, self._next)] if self._room.is_short else ()

    async def piece(self, _item: None) -> float | None:
        begun = time.monotonic()
        await self._room.make()
        self._next = begun + AGAIN_S if self._room.is_short else NOW
        return time.monotonic() - begun


class DeletingUnused(SessionJob):
    """Looks for such sessions at the start and every six hours, and deletes one after the other."""

    name: ClassVar = "delete unused"

    def __init__(
        self,
        upkeep: Upkeep,
        room: Room,
        residency: Residency,
        delete: Callable[[SessionUri], Awaitable[DeleteReport]],
    ) -> None:
        self._room = room
        self._residency = residency
        self._delete = delete
        self._next = NOW
        super().__init__(upkeep)

    def due(self) -> Iterable[tuple[SessionUri | None, float]]:
        return [*super().due(), (None, self._next)]

    async def piece(self, uri: SessionUri | None) -> float | None:
        if uri is not None:
            return await super().piece(uri)
        self._next = time.monotonic() + LOOK_S
        async with self._thread.piece():
            begun = time.monotonic()
            self._noted.update(dict.fromkeys(await self._thread.run(self._room.unused)))
        return time.monotonic() - begun

    async def look_at(self, uri: SessionUri) -> float:
        async with self._residency.turn(uri):
            async with self._thread.piece():
                begun = time.monotonic()
                is_unused = await self._thread.run(partial(self._room.unused, uri))
            if is_unused:
                await self._delete(uri)
                _LOG.warning("%s was deleted: nobody named it, and the store was in use on many days without it", uri)
            return time.monotonic() - begun
