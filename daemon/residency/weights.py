"""The weights in memory: models are loaded on request, and unloaded on request, when unused, when their files have
changed, and when others need the memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from ..errors import ModelInUse, sentence_of
from ..events.events import UnloadCause
from ..memory.dropping import Dropping
from ..memory.loading import Loading
from ..memory.memory import Memory
from ..memory.model_registry import Shelf
from ..sessions.sessions import Session, Turns
from ..tasks.cancellation import to_the_end
from ..tasks.door import Door
from .awake import AwakeSessions
from .idle_sleeps import IdleSleeps

_MAX_TOLD: Final = 4
"""Sessions that a refusal names."""


@dataclass(eq=False, repr=False)
class Weights:
    """Loads and unloads models."""

    _shelf: Shelf
    _loading: Loading
    _dropping: Dropping
    _awake: AwakeSessions
    _turns: Turns
    _memory: Memory
    _idle_sleeps: IdleSleeps
    _door: Door

    def last_use(self, name: str) -> float:
        """The last use of a model or of a session on it, by the monotonic clock."""
        place = self._shelf.places[name]
        sessions, in_use = self._awake.on(name), self._turns.in_use()
        if place.holders or any(each.uri in in_use for each in sessions):
            return time.monotonic()
        return max([place.last_used, *(each.stay.last_used for each in sessions if each.state.tokens)])

    async def load(self, name: str) -> None:
        """Load a model, if it is not loaded. Raises as `Loading.using`."""
        self._door.require_working()
        with self._memory.apart(next(self._memory.numbers)) as claim:
            async with self._loading.using(name, claim):
                return

    async def unload(self, name: str) -> None:
        """Put the sessions on a model to sleep, and free its memory. If its files have changed, the next load takes
        them. Raises UnknownModel, and the errors of a sleep. ModelInUse: a request needs it."""
        self._door.require_working()
        place = self._shelf.place(name)
        while place.loading is not None:
            await asyncio.wait([place.loading])
        for session in self._awake.on(name) if place.model is not None else ():
            self._door.require_working()  # a stop has an order of its own
            if session.uri not in self._turns.in_use():
                await to_the_end(self._idle_sleeps.put_away(session.uri, "asked"))
        if place.model is not None and self._is_needed(name):
            needed = [str(each.uri) for each in self._awake.on(name) if self._stays(each)]
            raise ModelInUse(
                f"Model {name!r} is in use{' by ' + ', '.join(needed[:_MAX_TOLD]) if needed else ''}; wait for "
                "running requests, put such sessions to sleep, and try again.",
                model=name,
                sessions=needed,
            )
        if place.model is not None:
            await self._dropping.drop(name, "asked", self._memory.look_again)
        place.changed = ()  # an unload accepts the present files

    async def retire(self, name: str, cause: UnloadCause) -> bool:
        """Put the sessions on a model to sleep and unload it, unless it is used now. Raises the error of a failed
        sleep; the other sessions sleep all the same."""
        place = self._shelf.places[name]
        unslept = None
        for session in self._awake.on(name):
            if session.state.tokens:
                try:
                    await self._idle_sleeps.put_away_idle(session.uri)
                except Exception as error:  # noqa: BLE001 - the others sleep all the same
                    unslept = unslept or error
                    place.stays_for = f"{session.uri} cannot be put to sleep ({sentence_of(error)})"
        if unslept is not None:
            raise unslept
        place.stays_for = None
        if place.loading is not None or self._is_needed(name):
            return False
        if place.model is not None:
            await self._dropping.drop(name, cause, self._memory.look_again)
        if place.leaving:
            self._shelf.forget(place)
        return True

    def _stays(self, session: Session) -> bool:
        return bool(session.state.tokens) or session.uri in self._turns.in_use()

    def _is_needed(self, name: str) -> bool:
        return bool(self._shelf.places[name].holders) or any(self._stays(each) for each in self._awake.on(name))
