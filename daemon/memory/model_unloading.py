"""Unloads models that were not used for a while, and those that are served no more or have another choice."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from ..engine.rounds import Rounds
from .model_registry import Place, Shelf

_LOG = logging.getLogger(__name__)

LEAVING_S: Final = 1.0
"""The pause before another attempt to unload a model that is to go."""

_MOST_DOUBLINGS: Final = 6
"""How often failures double that pause at most."""

Clock = Callable[[], float]


class Disuse(Rounds):
    """Unloads models when they are due. last_use: when a model was last used. unload: frees its
    memory unless it is in use, and tells whether it did. A failed unload is tried again after the same time; for a
    model that is to go, after ever longer pauses.
    """

    def __init__(
        self,
        shelf: Shelf,
        last_use: Callable[[str], float],
        unload: Callable[[str], Awaitable[bool]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._shelf = shelf
        self._last_use = last_use
        self._unload = unload
        self._clock = clock
        self._tried: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        super().__init__()

    async def unload(self, name: str) -> None:
        """Free a model's memory, if no request uses it; else try again later."""
        self._tried[name] = self._clock()
        try:
            await self._unload(name)
            self._failures.pop(name, None)
        except Exception as error:  # noqa: BLE001 - it stays loaded, and its place tells why
            self._failures[name] = min(_MOST_DOUBLINGS, self._failures.get(name, 0) + 1)
            _LOG.warning("Model %r could not be unloaded: %s", name, error)

    async def _round(self) -> float | None:
        for name in self._due():
            await self.unload(name)
        return self._next()

    def _due(self) -> list[str]:
        now = self._clock()
        found = sorted((deadline, name) for name, deadline in self._deadlines().items())
        return [name for deadline, name in found if deadline <= now]

    def _next(self) -> float | None:
        """Seconds until a model may be due; one that is not loaded yet is due after its whole time at the earliest."""
        now = self._clock()
        times = [ttl_s for place in self._shelf.places.values() if (ttl_s := _ttl_of(place)) is not None]
        deadlines = [deadline - now for deadline in self._deadlines().values()]
        return max(0.0, min(times + deadlines)) if times else None

    def _deadlines(self) -> dict[str, float]:
        found = {}
        for place in self._shelf.places.values():
            ttl_s, name = _ttl_of(place), place.name
            if ttl_s is None:
                continue
            if place.is_to_go:
                found[name] = self._tried.get(name, -math.inf) + ttl_s * 2 ** self._failures.get(name, 0)
            elif place.model is not None:
                last_use = self._last_use(name)
                found[name] = max(last_use, self._tried.get(name, last_use)) + ttl_s
        return found


def _ttl_of(place: Place) -> float | None:
    if place.is_to_go:
        return LEAVING_S
    return None if place.choice.pinned else place.choice.ttl_s
