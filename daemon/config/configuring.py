"""A running daemon takes over what its configuration file says, all of it or nothing.

The file is read anew when somebody asks, as SIGHUP does. One that is wrong changes nothing, and is told until a right
one comes. What a running daemon cannot change is told, too, and waits for the next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...errors import TorporError
from ..api.process import ConfigInfo
from ..engine.admission import Queue
from ..events.bus import Bus, code_of
from ..events.events import ConfigurationRefused, ConfigurationTakenOver
from ..memory.memory import require_models_fit
from ..memory.model_registry import Shelf
from ..models.models import look_at
from ..options.serve_options import SERVE_OPTIONS, ServeOptions
from ..residency.residency import Residency
from .settings import Settings

_LOG = logging.getLogger(__name__)

AT_NEXT_START: Final = tuple(name for name, each in SERVE_OPTIONS.items() if each.option.changes == "at the next start")
"""The options of a file that a running daemon does not change; all others hold at once."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Where the configuration lies, and how it is read, with what the command line says over it. Its reader may
    raise a TorporError."""

    path: Path
    read: Callable[[], Settings]


class Configuring:
    """Keeps a daemon to its file until it is closed. settings: those that it was started with."""

    def __init__(
        self, file: ConfigFile, settings: Settings, shelf: Shelf, residency: Residency, requests: Queue, bus: Bus
    ) -> None:
        self._file = file
        self._settings = settings
        self._begun_with = settings.options
        self._budget = settings.options.memory_budget
        self._shelf = shelf
        self._residency = residency
        self._requests = requests
        self._bus = bus
        self._problem: str | None = None
        self._reloads = 0
        self._turn = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()

    def info(self) -> ConfigInfo:
        """What the daemon has of the file."""
        said = self._settings.options
        waits = [name for name in AT_NEXT_START if getattr(said, name) != getattr(self._begun_with, name)]
        if self._budget is not None and said.memory_budget is None:
            waits.append("memory_budget")  # the share of what is available was never taken, and would be another by now
        return ConfigInfo(
            str(self._file.path), self._reloads, self._problem, tuple(sorted(waits)), tuple(self._shelf.to_go())
        )

    @property
    def options(self) -> ServeOptions:
        """Those that hold now: of the file, and of the start where they take a start to change."""
        begun_with = {name: getattr(self._begun_with, name) for name in AT_NEXT_START}
        return replace(self._settings.options, **begun_with)

    async def close(self) -> None:
        """Begin no more loads, and wait for the end of those that have begun."""
        for load in self._loads:
            load.cancel()
        if self._loads:
            await asyncio.wait(self._loads)

    async def reload(self) -> None:
        """Read the file and take over what it says, or tell what is wrong with it."""
        async with self._turn:
            try:
                settings = await asyncio.to_thread(self._file.read)
                await asyncio.to_thread(self._require_possible, settings)
                require_models_fit(
                    self._needed_bytes(settings), settings.options.memory_budget or self._residency.memory.budget
                )
                await self._apply(settings)
            except Exception as error:  # noqa: BLE001 - the daemon goes on with what it has
                expected = isinstance(error, TorporError)
                _LOG.warning("The configuration stays what it was: %s", error, exc_info=not expected)
                self._problem = f"{code_of(error)}: {error}"
                self._bus.publish(ConfigurationRefused(None, code_of(error)))
                return
            self._reloads += 1
            waits = self.info().waits_for_restart
            self._bus.publish(ConfigurationTakenOver(None, len(waits)))
            if waits:
                _LOG.warning("The configuration was taken over. Only a restart will change: %s.", ", ".join(waits))
            else:
                _LOG.info("The configuration was taken over.")
            await self._residency.weights.let_go()

    def _require_possible(self, settings: Settings) -> None:
        for name, choice in settings.models.items():
            before = self._settings.models.get(name)
            if before is None or not choice.is_same_model(before):
                look_at(name, choice.source, choice.adapter)

    def _needed_bytes(self, settings: Settings) -> int:
        """What all pinned models take together, or the largest of the others, as far as they are loaded."""
        loaded = {model.name: model.weights_bytes for model in self._shelf.loaded() if model.name in settings.models}
        pinned = sum(taken for name, taken in loaded.items() if settings.models[name].pinned)
        return max(pinned, *loaded.values(), 0)

    async def _apply(self, settings: Settings) -> None:
        """From now on all that the settings say holds, whatever is in memory still: no sleep is waited for, as one may
        fail."""
        before, self._settings, self._problem = self._settings, settings, None
        self._shelf.take_over(settings.models)
        options = settings.options
        self._residency.watching.policy = options.on_model_change
        self._requests.limit = options.max_waiting
        if options.idle_sleep != before.options.idle_sleep:
            await self._residency.set_idle(options.idle_sleep)
        if options.memory_budget is not None and options.memory_budget != self._budget:
            self._budget = options.memory_budget
            await self._residency.resize(options.memory_budget)
        for name, choice in settings.models.items():
            known = before.models.get(name)
            if choice.at_start and (known is None or not choice.is_same_model(known)):
                self._begin(name)

    def _begin(self, name: str) -> None:
        async def load() -> None:
            try:
                await self._residency.weights.load(name)
            except TorporError as error:  # its place tells of it
                _LOG.warning("Model %r of the configuration is not loaded: %s", name, error.message)

        task = asyncio.ensure_future(load())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
