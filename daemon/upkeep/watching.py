"""Notices model files that change under a running daemon, so that a loaded model is not confused with its changed
files. A look every few seconds compares stamps first, then the digests of touched files: it finds changes behind links
and on network file systems, too, of which no system tells.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar, Final

from ...snapshot.digests import DigestCache
from ..events.bus import Bus
from ..events.events import ModelFilesChanged, ModelFilesRestored
from ..memory.model_registry import Place, Shelf
from ..models.loaded_files import LoadedFiles
from ..options.current import CurrentOptions
from ..options.serve_options import ChangePolicy
from ..residency.weights import Weights
from .loop import NOW, RecurringJob, Upkeep

_LOG = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 2.0
"""The pause between two looks at a model's files."""

IDLE_CHECK_S: Final = 10.0
"""The longest pause: it grows with the time without a request, because each look wakes three threads."""


class Watching(RecurringJob[str]):
    """Compares the files of loaded models with their state at the load, one model after the other. An option says
    what is done with a model with changed files: it serves only awake sessions (`refuse`); or it is unloaded once no
    request uses it, and the next one loads the files of that time (`reload`). `look_again` is for a model that was
    loaded.
    """

    name: ClassVar = "watch model files"

    def __init__(
        self,
        upkeep: Upkeep,
        shelf: Shelf,
        digests: DigestCache,
        weights: Weights,
        bus: Bus,
        options: CurrentOptions,
    ) -> None:
        self._shelf = shelf
        self._digests = digests
        self._weights = weights
        self._bus = bus
        self._options = options
        super().__init__(upkeep)

    def uses(self) -> dict[str, tuple[float, float]]:
        places, seconds = self._shelf.places.values(), min(max(CHECK_EVERY_S, self._bus.quiet_s()), IDLE_CHECK_S)
        return {place.name: (NOW, seconds) for place in places if _files_of(place) is not None}

    async def look_at(self, name: str) -> None:
        await self._check(self._shelf.places[name])

    async def _check(self, place: Place) -> None:
        files = _files_of(place)
        if files is None:
            return
        found = await asyncio.to_thread(files.differences, self._digests)  # it may read weights, and delays no upkeep
        if _files_of(place) is not files:
            return  # it was loaded again meanwhile
        policy = self._options.now.on_model_change
        self._tell(place, found, policy)
        place.changed = found
        if found and policy == "reload" and (place.model is None or await self._weights.retire(place.name, "changed")):
            place.changed = ()  # the next load reads the files of that time

    def _tell(self, place: Place, found: tuple[str, ...], policy: ChangePolicy) -> None:
        if found and not place.changed:
            _LOG.warning("The files of model %r have changed under it: %s", place.name, ", ".join(found))
            self._bus.publish(ModelFilesChanged(None, place.name, policy))
        elif place.changed and not found:
            self._bus.publish(ModelFilesRestored(None, place.name))


def _files_of(place: Place) -> LoadedFiles | None:
    """The files to compare: of a model that is loaded, or was when its files changed."""
    model = place.model or (place.facts if place.changed else None)
    return model.files if model is not None else None
