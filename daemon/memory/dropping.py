"""Drops the weights of a model, so that their memory is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...memvid.uri import SessionUri
from ..engine.buffers import Buffers
from ..events.bus import Bus
from ..events.events import ModelUnloaded, UnloadCause
from ..sessions.encoding import Encoder
from ..sessions.sessions import Session
from .model_registry import Shelf


@dataclass(eq=False, repr=False)
class Dropping:
    """Frees the memory of models that no request needs. The event loop's."""

    _shelf: Shelf
    _awake: Mapping[SessionUri, Session]
    _encoder: Encoder
    _buffers: Buffers
    _bus: Bus

    async def drop(self, name: str, cause: UnloadCause, freed: Callable[[], None]) -> None:
        """Free the memory of a model. Sessions on it that have read nothing stay, and get it back at their next use. It
        is dropped before anything is waited for, so no request can begin to need it. freed: called once it is dropped,
        and again when other code has let the weights go that it held for a moment.
        """
        place = self._shelf.places[name]
        assert place.model is not None
        facts = place.model.without_weights()
        for session in self._awake.values():
            if session.model.name == name:
                assert not session.state.tokens, "a context is not left without its model"
                session.model = facts
        self._shelf.drop(place, facts, _in_this_loop(freed))
        self._encoder.let_go()
        self._bus.publish(ModelUnloaded(None, name, facts.weights_bytes, cause))
        freed()
        await self._buffers.hand_back()


def _in_this_loop(call: Callable[[], None]) -> Callable[[], None]:
    """A function that any thread may call, to have another called in the running loop, while there is one."""
    loop = asyncio.get_running_loop()

    def from_any_thread() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return from_any_thread
