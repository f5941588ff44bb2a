"""The upkeep: what is done for the store and the memory, by order and unasked."""

from __future__ import annotations

from ...memvid.maintenance.repack_plan import RepackPolicy
from ...memvid.store import Receipt
from ..api.process import ScrubInfo
from ..events.bus import Bus
from ..options.current import CurrentOptions
from ..sleep.maintenance import Maintenance
from ..tasks.door import Door
from ..upkeep.analyst import Analyst
from ..upkeep.healing import Healing
from ..upkeep.idling import Idling
from ..upkeep.repacking import Repacking
from ..upkeep.retaining import Retaining
from ..upkeep.scrubbing import Scrub, ScrubPolicy
from ..upkeep.unloading import Unloading
from ..upkeep.watching import Watching
from .models import ModelParts
from .sessions import SessionParts
from .store import StoreParts


class UpkeepParts:
    """The jobs of the loop, maintenance and analyses. scrub: where it is on."""

    def __init__(
        self,
        store: StoreParts,
        models: ModelParts,
        sessions: SessionParts,
        door: Door,
        bus: Bus,
        options: CurrentOptions,
        scrub: ScrubPolicy | None,
    ) -> None:
        disk, hibernation, shelf, weights = store.disk, store.hibernation, models.shelf, models.weights
        self.loop = loop = store.upkeep_loop
        self.maintenance = Maintenance(disk, loop.thread)
        self.analyst = Analyst(disk, hibernation.threads)
        self.healing = Healing(disk, models.engine, hibernation, self.maintenance, sessions.residency, shelf, door, bus)
        self.scrub = None if scrub is None else Scrub(loop, disk, scrub, bus, self.healing.mend)
        self.retaining = Retaining(loop, disk, bus, options)
        self.repacking = Repacking(loop, disk, RepackPolicy())
        self.idling = Idling(loop, sessions.awake, models.idle_sleeps, options)
        self.unloading = Unloading(loop, shelf, weights)
        self.watching = Watching(loop, shelf, models.loader.digests, weights, bus, options)
        hibernation.on_version = self._has_version
        if self.scrub is not None:
            store.waking.on_damage = self.scrub.suspect

    def _has_version(self, receipt: Receipt) -> None:
        self.repacking.consider(receipt)
        self.retaining.note(receipt.uri)

    def scrub_info(self) -> ScrubInfo | None:
        """What the scrub has done so far; None where it is off."""
        return None if self.scrub is None else self.scrub.info(self.healing.healed, self.healing.failed)

    def stop(self) -> None:
        """Begin nothing more on the disk; a repack stops at its next step, other orders go on to their end."""
        self.loop.thread.stop()

    async def close(self) -> None:
        """Begin nothing more, and wait for what runs, which must not meet a closed store."""
        self.analyst.close()
        await self.loop.close()
