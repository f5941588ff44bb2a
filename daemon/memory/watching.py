"""Notices model files that change under a running daemon, so that a loaded model is not confused with its changed
files.

The system's notifications watch the folders; a look every few seconds finds the changes that they miss (a file behind a
link, a network file system). Touched files are compared by stamps first, then by digests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import watchfiles

from ...snapshot.digests import DigestCache
from ..engine.rounds import Rounds
from ..events.bus import Bus
from ..events.events import ModelFilesChanged, ModelFilesRestored
from ..models.loaded_files import LoadedFiles
from ..options.serve_options import ChangePolicy
from .model_registry import Place, Shelf

_LOG = logging.getLogger(__name__)


class Watching(Rounds):
    """Compares the files of loaded models with their state at the load. retire: unloads a model unless it is in use,
    and tells whether it did. policy: for a model with changed files: it serves only awake sessions (`refuse`); or it is
    unloaded once no request uses it, and the next one loads the files of that time (`reload`).
    """

    def __init__(
        self,
        shelf: Shelf,
        digests: DigestCache,
        retire: Callable[[str], Awaitable[bool]],
        bus: Bus,
        policy: ChangePolicy = "refuse",
    ) -> None:
        self.policy = policy
        self._shelf = shelf
        self._digests = digests
        self._retire = retire
        self._bus = bus
        super().__init__()

    async def _round(self) -> float:
        for place in list(self._shelf.places.values()):
            try:
                await self._check(place)
            except Exception as error:  # noqa: BLE001 - the others are watched all the same
                _LOG.warning("The files of model %r could not be looked at: %s", place.name, error)
        await change_in(self._folders(), self._closing)
        return 0.0

    def _folders(self) -> frozenset[Path]:
        files = [_files_of(place) for place in self._shelf.places.values()]
        return frozenset(folder for each in files if each for folder in each.folders if folder.is_dir())

    async def _check(self, place: Place) -> None:
        files = _files_of(place)
        if files is None:
            return
        found = await asyncio.to_thread(files.differences, self._digests)
        if _files_of(place) is not files:
            return  # it was loaded again meanwhile
        self._tell(place, found)
        place.changed = found
        if found and self.policy == "reload" and (place.model is None or await self._retire(place.name)):
            place.changed = ()  # the next load reads the files of that time

    def _tell(self, place: Place, found: tuple[str, ...]) -> None:
        if found and not place.changed:
            _LOG.warning("The files of model %r have changed under it: %s", place.name, ", ".join(found))
            self._bus.publish(ModelFilesChanged(None, place.name, self.policy))
        elif place.changed and not found:
            self._bus.publish(ModelFilesRestored(None, place.name))


def _files_of(place: Place) -> LoadedFiles | None:
    """The files to compare: of a model that is loaded, or was when its files changed."""
    model = place.model or (place.facts if place.changed else None)
    return model.files if model is not None else None


CHECK_EVERY_S: Final = 5.0
"""How often to look without a notification: the system gives none for network changes, for files behind links, or
without free watches."""

_DEBOUNCE_MS: Final = 400


async def change_in(folders: Collection[Path], closing: asyncio.Event) -> None:
    """Return after a possible change in one of the folders, at the time to look, or when closing."""
    try:
        if folders:
            await _told(folders, closing)
            return
    except Exception as error:  # noqa: BLE001 - no such folder any more, no more watches to be had, and the like
        _LOG.info("%s: looked at every %g s only: %s", ", ".join(map(str, folders)), CHECK_EVERY_S, error)
    with suppress(TimeoutError):
        await asyncio.wait_for(closing.wait(), CHECK_EVERY_S)


async def _told(folders: Collection[Path], closing: asyncio.Event) -> None:
    changes = watchfiles.awatch(
        *folders,
        watch_filter=None,
        debounce=_DEBOUNCE_MS,
        stop_event=closing,
        rust_timeout=round(CHECK_EVERY_S * 1000),
        yield_on_timeout=True,
        recursive=False,
    )
    async with aclosing(changes):
        async for _ in changes:
            return
