"""Models that were not used for a while are unloaded, and those that are served no more or have another choice."""

from __future__ import annotations

from typing import ClassVar, Final

from ..memory.model_registry import Shelf
from ..residency.weights import Weights
from .loop import NOW, RecurringJob, Upkeep

LEAVING_S: Final = 1.0
"""The pause before another attempt to unload a model that is to go."""


class Unloading(RecurringJob[str]):
    """Unloads one model after the other, unless it is in use: then it comes again after the same time. `look_again` is
    for another choice of models, and for a model that was loaded.
    """

    name: ClassVar = "unload"

    def __init__(self, upkeep: Upkeep, shelf: Shelf, weights: Weights) -> None:
        self._shelf = shelf
        self._weights = weights
        super().__init__(upkeep)

    def uses(self) -> dict[str, tuple[float, float]]:
        uses = {}
        for place in self._shelf.places.values():
            if place.is_to_go:
                uses[place.name] = NOW, LEAVING_S
            elif place.model is not None and not place.choice.pinned and place.choice.ttl_s is not None:
                uses[place.name] = self._weights.last_use(place.name), place.choice.ttl_s
        return uses

    async def look_at(self, name: str) -> None:
        await self._weights.retire(name, cause="unused")
