"""A running daemon takes over its configuration file, all of it or nothing.

The file is read again on request (SIGHUP). A faulty file changes nothing, and its fault is reported until a sound one
comes. Options that a running daemon cannot change are reported too, and wait for the next start.
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
from ..events.bus import Bus, code_of
from ..events.events import ConfigurationRefused, ConfigurationTakenOver
from ..memory.memory import Memory, require_models_fit
from ..memory.model_registry import Shelf
from ..models.models import look_at
from ..options.current import CurrentOptions
from ..options.serve_options import SERVE_OPTIONS
from ..residency.weights import Weights
from .settings import Settings

_LOG = logging.getLogger(__name__)

AT_NEXT_START: Final = tuple(name for name, each in SERVE_OPTIONS.items() if each.option.changes == "at the next start")
"""The options that a running daemon does not change; all others hold at once."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The path of the configuration, and its reader, which puts the command line over it and may raise a
    TorporError."""

    path: Path
    read: Callable[[], Settings]


@dataclass(eq=False, repr=False)
class Configuring:
    """Applies the file to a daemon until it is closed. settings: those of the start. current: gets the options that
    hold now: those of the file, and of the start where only a start changes them."""

    _file: ConfigFile
    _settings: Settings
    _current: CurrentOptions
    _shelf: Shelf
    _memory: Memory
    _weights: Weights
    _bus: Bus

    def __post_init__(self) -> None:
        self._begun_with = self._settings.options
        self._budget = self._begun_with.memory_budget
        self._problem: str | None = None
        self._reloads = 0
        self._turn = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()

    def info(self) -> ConfigInfo:
        options = self._settings.options
        waits = [name for name in AT_NEXT_START if getattr(options, name) != getattr(self._begun_with, name)]
        if self._budget is not None and options.memory_budget is None:
            waits.append("memory_budget")  # the default is a share of the memory at the start
        return ConfigInfo(
            str(self._file.path), self._reloads, self._problem, tuple(sorted(waits)), tuple(self._shelf.to_go())
        )

    async def close(self) -> None:
        """Cancel running loads, and wait for their end."""
        for load in self._loads:
            load.cancel()
        if self._loads:
            await asyncio.wait(self._loads)

    async def reload(self) -> None:
        """Read the file and apply it, or report its fault."""
        async with self._turn:
            try:
                settings = await asyncio.to_thread(self._file.read)
                await asyncio.to_thread(self._require_possible, settings)
                require_models_fit(self._needed_bytes(settings), settings.options.memory_budget or self._memory.budget)
                await self._apply(settings)
            except Exception as error:  # noqa: BLE001 - the daemon goes on with its settings
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

    def _require_possible(self, settings: Settings) -> None:
        for name, choice in settings.models.items():
            before = self._settings.models.get(name)
            if before is None or not choice.is_same_model(before):
                look_at(name, choice.source, choice.adapter)

    def _needed_bytes(self, settings: Settings) -> int:
        """The bytes of all loaded pinned models together, or of the largest loaded model if that is more."""
        loaded = {model.name: model.weights_bytes for model in self._shelf.loaded() if model.name in settings.models}
        pinned = sum(size_bytes for name, size_bytes in loaded.items() if settings.models[name].pinned)
        return max(pinned, *loaded.values(), 0)

    async def _apply(self, settings: Settings) -> None:
        """Apply the settings at once. Waits for no sleep, as one may fail."""
        before, self._settings, self._problem = self._settings, settings, None
        self._shelf.take_over(settings.models)
        options = settings.options
        begun_with = {name: getattr(self._begun_with, name) for name in AT_NEXT_START}
        self._current.now = replace(options, **begun_with)
        if options.memory_budget is not None and options.memory_budget != self._budget:
            self._budget = options.memory_budget
            await self._memory.resize(options.memory_budget)
        for name, choice in settings.models.items():
            earlier = before.models.get(name)
            if choice.at_start and (earlier is None or not choice.is_same_model(earlier)):
                self._begin(name)

    def _begin(self, name: str) -> None:
        async def load() -> None:
            try:
                await self._weights.load(name)
            except TorporError as error:  # `status` reports it
                _LOG.warning("Model %r of the configuration is not loaded: %s", name, error.message)

        task = asyncio.ensure_future(load())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
