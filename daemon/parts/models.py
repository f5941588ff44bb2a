"""The models: their files, their weights, the thread that computes with them, and the memory that they share with the
sessions."""

from __future__ import annotations

import asyncio
from functools import partial

from ..api.process import meant_by
from ..engine.buffers import Buffers
from ..engine.engine import Engine
from ..events.bus import Bus
from ..memory.dropping import Dropping
from ..memory.loading import Loader, Loading
from ..memory.memory import Memory, default_budget
from ..memory.model_registry import Place, Shelf
from ..options.current import CurrentOptions
from ..residency.awake import AwakeSessions
from ..residency.idle_sleeps import IdleSleeps
from ..residency.weights import Weights
from ..sessions.encoding import Encoder
from ..sessions.sessions import Turns
from ..tasks.door import Door
from .store import StoreParts


class ModelParts:
    """The engine, what is served on it, and the memory for it. idle_sleeps: free the memory of sessions."""

    def __init__(
        self,
        store: StoreParts,
        engine: Engine,
        buffers: Buffers,
        shelf: Shelf,
        loader: Loader,
        awake: AwakeSessions,
        turns: Turns,
        door: Door,
        bus: Bus,
        options: CurrentOptions,
    ) -> None:
        budget, put_away = options.now.memory_budget, store.putting_away.put_away_idle
        self._options = options
        self.engine = engine
        self.shelf = shelf
        self.loader = loader
        self.buffers = buffers
        self.encoder = Encoder()
        dropping = Dropping(shelf, awake, self.encoder, buffers, bus)
        self.memory = Memory(
            default_budget(shelf.weights_bytes()) if budget is None else budget,
            shelf,
            awake,
            turns,
            partial(put_away, cause="pressure"),
            dropping.drop,
            buffers,
            bus,
        )
        self.loading = Loading(shelf, self.memory, loader, bus, store.upkeep_loop.look_again)
        self.idle_sleeps = IdleSleeps(store.putting_away, awake, turns, self.memory, door)
        self.weights = Weights(shelf, self.loading, dropping, awake, turns, self.memory, self.idle_sleeps, door)

    async def start(self) -> None:
        """Bound the memory of computed buffers."""
        await self.buffers.bound(self.memory.for_sessions)

    def places(self) -> list[Place]:
        """Those of all served models, and of those that leave with their last use."""
        return list(self.shelf.places.values())

    def place_for(self, name: str | None) -> Place:
        """The place of the model that a client names, maybe by an alias; None means the default. Raises UnknownModel:
        no model has that name."""
        if name is not None and name not in self.shelf:
            name = meant_by(name, self._options.now.aliases)
        return self.shelf.place(name)

    async def close(self) -> None:
        """Wait for running sleeps, and end the threads that load, encode and compute."""
        await self.memory.close()
        await self.buffers.close()
        self.loader.close()
        await asyncio.to_thread(self.encoder.close)
        await asyncio.to_thread(self.engine.stop)
