"""The store, and how sessions go into it and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...memvid.format.records import VerifyReport
from ...memvid.maintenance.repack_plan import RepackPolicy
from ...memvid.store import Receipt, Store
from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..disk.making_room import Room
from ..disk.upkeep_thread import UpkeepThread
from ..engine.buffers import Buffers
from ..engine.engine import Engine
from ..events.bus import Bus
from ..options.current import CurrentOptions
from ..residency.awake import AwakeSessions
from ..residency.putting_away import PuttingAway
from ..residency.standing import Standing
from ..sessions.sessions import Turns
from ..tasks.door import Door
from ..upkeep.loop import Upkeep
from ..upkeep.making_room import MakingRoom
from ..upkeep.repacking import Repacking
from ..upkeep.retaining import Retaining
from ..upkeep.scrubbing import Scrub, ScrubPolicy
from ..upkeep.writing_diary import WritingDiary
from ..versions.forking import Forking
from ..versions.journal import TurnJournal
from ..versions.quantising import Quantising
from ..versions.writing import Versions

if TYPE_CHECKING:
    from ...memvid.remote.sessions import RemoteSessions
    from ..disk.remote import Remote

Result = TypeVar("Result")


class StoreParts:
    """What is durable, and what looks after it. disk: the store itself, room: in it. upkeep_loop: of the work on it
    that no session waits for. scrub: where it is on. to_heal: what it has found damaged. remote: where one is
    configured."""

    def __init__(
        self,
        disk: Store,
        engine: Engine,
        buffers: Buffers,
        awake: AwakeSessions,
        turns: Turns,
        door: Door,
        bus: Bus,
        options: CurrentOptions,
        scrub: ScrubPolicy | None,
        remote: RemoteSessions | None,
    ) -> None:
        self.disk = disk
        self.upkeep_loop = loop = Upkeep(UpkeepThread(door))
        self.to_heal: dict[SessionUri, VerifyReport] = {}
        self.scrub = None if scrub is None else Scrub(loop, disk, scrub, bus, self.to_heal)
        self.retaining = Retaining(loop, disk, bus, options)
        self.writing_diary = WritingDiary(loop, disk)
        self.repacking = Repacking(loop, disk, RepackPolicy())
        elsewhere = set if remote is None else partial(_all_of, remote.versions_seen)
        self.room = Room(disk, loop.thread, awake, turns.in_use, bus, options, elsewhere)
        self.remote: Remote | None = None
        if remote is not None:
            from ..disk.remote import Remote  # with what it needs: who has no remote does not wait for it

            self.remote = Remote(remote, max(1, int(options.now.remote_lease)), bus, options, self.room, door)
        self.making_room = MakingRoom(loop, self.room)
        self.versions = Versions(
            disk,
            engine,
            loop.thread,
            self.room,
            door,
            bus,
            on_version=self._has_version,
            on_damage=ignore if self.scrub is None else self.scrub.suspect,
        )
        self.waking = self.versions.waking
        self.journal = TurnJournal(disk, self.versions, options, self.remote)
        self.forking = Forking(disk, self.versions, self.room)
        self.quantising = Quantising(disk, engine, self.versions)
        self.standing = Standing(disk, awake)
        self.putting_away = PuttingAway(disk, self.versions, awake, self.standing, buffers, self.room, bus)

    def _has_version(self, receipt: Receipt) -> None:
        self.repacking.consider(receipt)
        self.retaining.note(receipt.uri)
        self.making_room.look_again()
        if self.remote is not None:
            self.remote.on_version(receipt.uri)

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop."""
        return await self.versions.threads.on_io(work)

    async def on_look(self, work: Callable[[], Result]) -> Result:
        """As `on_io`, for a view."""
        return await self.versions.threads.on_look(work)

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await self.versions.threads.on_writer(work)

    async def close(self) -> None:
        """Wait for running reads and writes, and let the store go."""
        await self.versions.threads.close()
        if self.remote is not None:
            await self.remote.close()
        self.disk.close()


def _all_of(versions: Mapping[SessionUri, Sequence[str]]) -> set[str]:
    return {each for of_one in list(versions.values()) for each in of_one}  # others note more meanwhile
