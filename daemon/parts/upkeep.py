"""The upkeep: what is done for the store, by order and unasked."""

from __future__ import annotations

import asyncio

from ...memvid.folder.retention import Retention
from ..api.process import ScrubInfo
from ..events.bus import Bus
from ..options.current import CurrentOptions
from ..sleep.maintenance import Maintenance
from ..upkeep.analyst import Analyst
from ..upkeep.healing import Healing
from ..upkeep.retaining import Retaining
from ..upkeep.scrubbing import Scrub, ScrubPolicy
from .models import ModelParts
from .sessions import SessionParts
from .store import StoreParts


class UpkeepParts:
    """Maintenance, retention, analyses, and the search for damage. scrub: where it is on."""

    def __init__(
        self,
        store: StoreParts,
        models: ModelParts,
        sessions: SessionParts,
        bus: Bus,
        options: CurrentOptions,
        scrub: ScrubPolicy | None,
    ) -> None:
        disk, hibernation = store.disk, store.hibernation
        self.maintenance = Maintenance(disk, store.way)
        self.retaining = Retaining(
            disk, self.maintenance, bus, lambda: Retention(options.now.keep_last, options.now.keep_days)
        )
        hibernation.on_version = self.retaining.note
        self.analyst = Analyst(disk)
        self.healing = Healing(disk, models.engine, hibernation, self.maintenance, sessions.residency, bus)
        self.scrub = None if scrub is None else Scrub(disk, scrub, bus, self.healing.mend)
        if self.scrub is not None:
            store.waking.on_damage = self.scrub.suspect

    def scrub_info(self) -> ScrubInfo | None:
        """What the scrub has done so far; None where it is off."""
        return None if self.scrub is None else self.scrub.info(self.healing.healed, self.healing.failed)

    async def close(self) -> None:
        """Begin nothing more, and wait for what runs, which must not meet a closed store."""
        if self.scrub is not None:
            await self.scrub.close()
        await self.retaining.close()
        await asyncio.to_thread(self.analyst.close)
        await asyncio.to_thread(self.maintenance.close)
