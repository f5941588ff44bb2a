"""Models that were not used for a while are unloaded, and those that are served no more or have another choice."""

from __future__ import annotations

import math
import time
from typing import ClassVar, Final

from ..memory.model_registry import Place, Shelf
from ..residency.weights import Weights
from .loop import Job, Upkeep

LEAVING_S: Final = 1.0
"""The pause before another attempt to unload a model that is to go."""


class Unloading(Job):
    """Unloads one model after the other, unless it is in use. `look_again` is for another choice of models. Where it
    fails, that model comes again after the same time.
    """

    name: ClassVar = "unload"

    def __init__(self, upkeep: Upkeep, shelf: Shelf, weights: Weights) -> None:
        self._shelf = shelf
        self._weights = weights
        self._tried: dict[str, float] = {}
        super().__init__(upkeep)

    def due(self) -> float | None:
        """A model that is not loaded yet is due after its whole time at the earliest."""
        now = time.monotonic()
        times = [now + ttl_s for place in self._shelf.places.values() if (ttl_s := _ttl_of(place)) is not None]
        return min([*times, *self._deadlines().values()], default=None)

    async def piece(self) -> None:
        deadlines, now = self._deadlines(), time.monotonic()
        name = min(deadlines, key=deadlines.__getitem__, default=None)
        if name is not None and deadlines[name] <= now:
            self._tried[name] = now
            await self._weights.retire(name, cause="unused")

    def _deadlines(self) -> dict[str, float]:
        found = {}
        for place in self._shelf.places.values():
            ttl_s, name = _ttl_of(place), place.name
            if ttl_s is not None and place.is_to_go:
                found[name] = self._tried.get(name, -math.inf) + ttl_s
            elif ttl_s is not None and place.model is not None:
                last_use = self._weights.last_use(name)
                found[name] = max(last_use, self._tried.get(name, last_use)) + ttl_s
        return found


def _ttl_of(place: Place) -> float | None:
    if place.is_to_go:
        return LEAVING_S
    return None if place.choice.pinned else place.choice.ttl_s
