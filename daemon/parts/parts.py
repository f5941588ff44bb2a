"""The groups of one service, and what all of them share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.process import HttpInfo
from ..config.configuring import ConfigFile, Configuring
from ..config.settings import Settings
from ..engine.admission import Queue
from ..engine.buffers import Buffers
from ..engine.engine import Engine
from ..events.bus import Bus
from ..memory.loading import Loader
from ..memory.model_registry import Shelf
from ..options.current import CurrentOptions
from ..options.serve_options import ServeOptions
from ..residency.awake import AwakeSessions
from ..sessions.sessions import Turns
from ..tasks.door import Door, LastSleep
from ..upkeep.scrubbing import ScrubPolicy
from .models import ModelParts
from .sessions import SessionParts
from .store import StoreParts
from .upkeep import UpkeepParts

if TYPE_CHECKING:
    from ...memvid.remote.sessions import RemoteSessions


class Parts:
    """The parts of one service, over one store and the models of one process. queue: of the requests that need the
    engine or memory. started: by the monotonic clock. config: where the daemon follows a configuration file. http:
    where it serves HTTP."""

    config: Configuring | None = None
    http: HttpInfo | None = None

    def __init__(
        self,
        disk: Store,
        engine: Engine,
        shelf: Shelf,
        loader: Loader,
        bus: Bus,
        options: ServeOptions,
        scrub: ScrubPolicy | None,
        remote: RemoteSessions | None,
    ) -> None:
        self._current = CurrentOptions(options)
        self.started = time.monotonic()
        self.door = Door()
        self.queue = Queue(self._current)
        self.bus = bus
        awake, turns, buffers = AwakeSessions(), Turns(), Buffers(engine)
        self.store = StoreParts(disk, engine, buffers, awake, turns, self.door, bus, self._current, scrub, remote)
        self.models = ModelParts(
            self.store, engine, buffers, shelf, loader, awake, turns, self.door, bus, self._current
        )
        self.sessions = SessionParts(self.store, self.models, awake, turns, self.door, bus, self._current)
        self.upkeep = UpkeepParts(self.store, self.models, self.sessions, self.door, bus, self._current)

    @property
    def options(self) -> ServeOptions:
        """The options that hold now."""
        return self._current.now

    async def start(self) -> None:
        """Begin what the groups do unasked. Raises MemoryBudgetExceeded."""
        await self.models.start()
        self.sessions.start()
        self.upkeep.start()

    def follow(self, file: ConfigFile, settings: Settings) -> None:
        """Follow a configuration file. settings: its content at the start."""
        self.config = Configuring(
            file,
            settings,
            self._current,
            self.models.shelf,
            self.models.memory,
            self.models.weights,
            self.bus,
        )

    async def reload_config(self) -> None:
        """Read the configuration file again, if there is one."""
        if self.config is not None:
            await self.config.reload()
            self.upkeep.loop.look_again()

    async def close(self, order: LastSleep) -> list[SessionUri]:
        """End all parts, the last made first. Sessions that are not durable are lost. Gives those of which the remote
        may lack the newest version."""
        unsent = await self.upkeep.close(order)
        await self.sessions.close()
        await self.models.close()
        await self.store.close()
        self.bus.close()
        return unsent
