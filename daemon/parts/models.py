"""The models: their files, their weights, the thread that computes with them, and their words."""

from __future__ import annotations

import asyncio

from ..api.process import meant_by
from ..engine.buffers import Buffers
from ..engine.engine import Engine
from ..memory.loading import Loader
from ..memory.model_registry import Place, Shelf
from ..options.current import CurrentOptions
from ..sessions.encoding import Encoder


class ModelParts:
    """The engine and what is served on it."""

    def __init__(self, engine: Engine, shelf: Shelf, loader: Loader, options: CurrentOptions) -> None:
        self.engine = engine
        self.shelf = shelf
        self.loader = loader
        self.buffers = Buffers(engine)
        self.encoder = Encoder()
        self._options = options
        shelf.on_drop = self.encoder.let_go

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
        """End the threads that load, encode and compute."""
        self.loader.close()
        await asyncio.to_thread(self.encoder.close)
        await asyncio.to_thread(self.engine.stop)
