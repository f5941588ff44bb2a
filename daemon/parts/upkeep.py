"""The upkeep: what is done for the store and the memory, by order and unasked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...memvid.answers import MaintenanceReport
from ...memvid.operations import Order
from ...memvid.uri import SessionUri
from ..api.process import ScrubInfo
from ..disk.maintenance import carry_out
from ..events.bus import Bus
from ..options.current import CurrentOptions
from ..tasks.door import Door, LastSleep
from ..upkeep.analyst import Analyst
from ..upkeep.healing import Healing
from ..upkeep.idling import Idling
from ..upkeep.making_room import DeletingUnused
from ..upkeep.measuring import Measuring
from ..upkeep.single_questions import SingleQuestions
from ..upkeep.suspending import Suspending
from ..upkeep.unloading import Unloading
from ..upkeep.watching import Watching
from .models import ModelParts
from .sessions import SessionParts
from .store import StoreParts

if TYPE_CHECKING:
    from ..upkeep.collecting import Collecting
    from ..upkeep.uploading import Uploading

Result = TypeVar("Result")


class UpkeepParts:
    """The jobs of the loop that need more than the store; orders, and analyses."""

    def __init__(
        self,
        store: StoreParts,
        models: ModelParts,
        sessions: SessionParts,
        door: Door,
        bus: Bus,
        options: CurrentOptions,
    ) -> None:
        disk, versions, shelf, weights = store.disk, store.versions, models.shelf, models.weights
        self._disk, self._scrub = disk, store.scrub
        self.loop = loop = store.upkeep_loop
        self.analyst = Analyst(disk, versions.threads)
        self.healing = Healing(loop, disk, models.engine, versions, sessions.residency, shelf, door, bus, store.to_heal)
        self.deleting_unused = DeletingUnused(
            loop, store.room, sessions.residency, partial(sessions.delete_session, everywhere=False)
        )
        self.idling = Idling(loop, sessions.awake, models.idle_sleeps, options)
        self.single_questions = SingleQuestions(loop, sessions.awake, models.idle_sleeps)
        self.unloading = Unloading(loop, shelf, weights)
        self.watching = Watching(loop, shelf, models.loader.digests, weights, bus, options)
        self.measuring = Measuring(loop, disk)
        self.suspending = Suspending(models.idle_sleeps)
        self.uploading: Uploading | None = None
        self.collecting: Collecting | None = None
        if (remote := store.remote) is not None:
            from ..upkeep.collecting import Collecting
            from ..upkeep.renewing import Renewing
            from ..upkeep.sending_turns import SendingTurns
            from ..upkeep.uploading import Uploading

            self.uploading = Uploading(loop, disk, remote, sessions.residency, bus)
            self.renewing = Renewing(loop, remote, self.uploading)
            self.collecting = Collecting(loop, remote, sessions.residency, door)
            self.sending_turns = SendingTurns(loop, remote, options)
            remote.on_return = self._try_remote_again

    def _try_remote_again(self) -> None:
        for job in (self.uploading, self.sending_turns):
            if job is not None:
                job.try_again()

    def start(self) -> None:
        """Begin with the jobs, and follow the system."""
        self.loop.start()
        self.suspending.start()

    async def carry_out(self, order: Order) -> MaintenanceReport:
        """Carry out an order, after earlier ones. Raises as the store's operation, and ServiceClosed."""
        return await carry_out(self._disk, self.loop.thread, order)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do long work on the store that was asked for, after earlier orders. Raises ServiceClosed: the daemon stops,
        and has not begun it."""
        return await self.loop.thread.order(work)

    def scrub_info(self) -> ScrubInfo | None:
        """What the scrub has done so far; None where it is off."""
        return None if self._scrub is None else self._scrub.info(self.healing.healed, self.healing.failed)

    async def close(self, order: LastSleep) -> list[SessionUri]:
        """Begin nothing more, and wait for what runs, which must not meet a closed store. What sleeps goes to the
        remote, as far as there is time; gives what did not."""
        self.analyst.close()
        await self.suspending.close()
        await self.loop.close()
        return [] if self.uploading is None else await self.uploading.finish(order)
