"""Loads models on threads of their own, once there is room.

A model's memory is estimated from its files (`models.estimate_bytes`) and reserved before the load; the real size
counts after it. One load of a model runs at a time, and other requests wait for it. If it fails, all of them get its
error, and the next request tries again.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from ...errors import TorporError
from ...snapshot.digests import DigestCache
from ...snapshot.memory import require_available
from ..engine.aside import Aside
from ..errors import ModelChanged, ModelUnavailable
from ..events.bus import Bus
from ..events.events import ModelDownloadProgress, ModelUnloaded
from ..models.models import LoadedModel, estimate_bytes, load_model, look_at
from ..sessions.tracing import tell_load
from ..tasks.cancellation import require_wanted, to_the_end
from .line import Claim
from .memory import Memory, require_models_fit
from .model_registry import ModelChoice, Place, Shelf

Result = TypeVar("Result")
_TOLD_EACH_S = 0.5
_ADVICE = "Serve a smaller model, end other programs on this machine, or put sessions to sleep"


class Loader:
    """Reads models from their files until `close`. The event loop's; several loads may run at once.

    Not on the engine's thread: a load takes seconds, and tokens of other models are drawn meanwhile. MLX demands that a
    loaded model is evaluated before another thread uses it.
    """

    def __init__(self, digests: DigestCache, bus: Bus) -> None:
        """bus: is told of downloads."""
        self.digests = digests
        self._bus = bus
        self._aside = Aside("torpor-load")

    async def estimate(self, name: str, choice: ModelChoice) -> int:
        """The memory of a model's weights, in bytes. A model of the hub is downloaded first, unless the caller is
        cancelled. Raises as `models.estimate_bytes`."""
        tell, unwanted, next_at = self._bus.from_any_thread(), threading.Event(), 0.0

        def on_bytes(done: int, total: int) -> None:
            nonlocal next_at
            if unwanted.is_set():
                raise asyncio.CancelledError
            if done == total or time.monotonic() >= next_at:
                next_at = time.monotonic() + _TOLD_EACH_S
                tell(ModelDownloadProgress(None, name, done, total))

        try:
            return await self._run(name, partial(estimate_bytes, name, choice.source, choice.adapter, on_bytes))
        finally:
            unwanted.set()

    async def load(self, name: str, choice: ModelChoice, expected: int) -> LoadedModel:
        """Load a model. expected: its memory in bytes.

        Raises:
            As `models.load_model`. NotEnoughMemory, before it is read: the system has less memory. ModelUnavailable:
            any other error.
        """
        return await self._run(name, partial(self._load, name, choice, expected))

    def close(self) -> None:
        self._aside.close()

    def _load(self, name: str, choice: ModelChoice, expected: int) -> LoadedModel:
        require_available(expected, f"Model {name!r}", _ADVICE)
        return load_model(name, choice.source, self.digests, choice.adapter, choice.kv)

    async def _run(self, name: str, work: Callable[[], Result]) -> Result:
        return await self._aside.run(work, partial(_told, name))


class Loading:
    """Gives requests their models. on_load: called when one is in memory."""

    def __init__(self, shelf: Shelf, memory: Memory, loader: Loader, bus: Bus, on_load: Callable[[], None]) -> None:
        self._bus = bus
        self._shelf = shelf
        self._memory = memory
        self._loader = loader
        self._on_load = on_load

    def place(self, name: str) -> Place:
        """The place of a model, loaded or not. Raises UnknownModel."""
        return self._shelf.place(name)

    @asynccontextmanager
    async def using(self, name: str, claim: Claim) -> AsyncIterator[LoadedModel]:
        """Hold a loaded model. The claim must not wait for memory meanwhile.

        Raises:
            UnknownModel. ModelChanged: its files have changed since its load. MemoryBudgetExceeded, MemoryBusy: there
            is no room for it. And the errors of `Loader.load`.
        """
        async with self.holding(name, claim) as place:
            assert place.model is not None
            yield place.model

    @asynccontextmanager
    async def holding(self, name: str, claim: Claim) -> AsyncIterator[Place]:
        """Hold the place of a loaded model. It stays loaded unless the claim itself waits for memory: then refer to the
        model only by its place, so that it can go. Raises as `using`."""
        place = self._shelf.place(name)
        if place.changed:
            raise has_changed(place)
        place.holders.append(claim)
        try:
            await self._make_ready(place, claim)
            yield place
        finally:
            place.holders.remove(claim)
            place.last_used = time.monotonic()
            self._memory.look_again()

    async def _make_ready(self, place: Place, claim: Claim) -> None:
        while place.model is None:
            under_way = place.loading
            if under_way is None:
                await self._load(place, claim)
                continue
            if not claim.request.stands_back():
                for holder in place.holders:  # one of them loads it
                    holder.request.lift()
            error = await self._end_of(under_way, claim)
            if error is not None:
                # Each waiter gets its own error: a traceback holds its frames.
                raise type(error)(error.message, **error.details)

    async def _end_of(self, under_way: asyncio.Future[TorporError | None], claim: Claim) -> TorporError | None:
        with self._memory.waiting_for_another(claim, lambda: not under_way.done()):
            await asyncio.wait([under_way])
        # After a cancelled load the first waiter begins a new one.
        return None if under_way.cancelled() else under_way.result()

    async def _load(self, place: Place, claim: Claim) -> None:
        under_way = place.loading = asyncio.get_running_loop().create_future()
        try:
            await self._load_within_budget(place, claim)
        except TorporError as error:
            place.problem = f"{error.code}: {error.message}"
            under_way.set_result(type(error)(error.message, **error.details))
            raise
        except BaseException:
            under_way.cancel()
            raise
        else:
            under_way.set_result(None)
        finally:
            place.loading = None

    async def _load_within_budget(self, place: Place, claim: Claim) -> None:
        reserved, before = 0, claim.reserved
        claim.what = f"Model {place.name!r}"
        try:
            wanted = await self._expected_bytes(place)
            while True:
                await self._memory.take(claim, wanted - reserved)
                reserved = wanted
                missing = await to_the_end(self._load_reserved(place, claim, reserved))
                if not missing:
                    return
                wanted += missing
        finally:
            claim.what = None
            self._memory.release(claim, claim.reserved - before)

    async def _expected_bytes(self, place: Place) -> int:
        """A model's size at its last load if its files were not touched since, else an estimate."""
        last = place.facts
        if last is not None and await asyncio.to_thread(last.files.are_untouched):
            return last.weights_bytes
        return await self._loader.estimate(place.name, place.choice)

    async def _load_reserved(self, place: Place, claim: Claim, reserved: int) -> int:
        """Load a model and put it in its place; returns 0. If it takes more than was reserved and the rest is not free,
        drop it and return the missing bytes: a waiting request must not hold uncounted memory."""
        with self._shelf.coming(place) as choice:
            with tell_load(self._bus, place.name, reserved) as tell_end:
                model = await self._loader.load(place.name, choice, reserved)
                tell_end(model.weights_bytes)
            size = model.weights_bytes
            missing = max(0, size - reserved)
            if missing and not self._memory.take_free(claim, missing):
                del model
                gc.collect()
                self._bus.publish(ModelUnloaded(None, place.name, size, "pressure"))
                return missing
            self._shelf.put(place, model)
            self._memory.release(claim, reserved + missing)  # at once: from now on it counts as loaded
            self._on_load()
            return 0


def has_changed(place: Place) -> ModelChanged:
    return ModelChanged(
        f"The files of model {place.name!r} have changed since they were loaded: {', '.join(place.changed)}. Sessions "
        "that are awake go on; nothing else is begun on it. Put the files back as they were, or take the new ones with "
        f"`torpor models unload {place.name}`: then sessions that slept with the old ones are refused.",
        model=place.name,
        changed=list(place.changed),
    )


async def load_first(shelf: Shelf, loader: Loader, memory_budget: int | None) -> None:
    """Load the models of the start, and check the files of the others.

    memory_budget: in bytes; None if not known yet. A cancellation ends it in a download and between two models.

    Raises as `Loader.load`. MemoryBudgetExceeded: they take more."""
    for place in shelf.places.values():
        choice = place.choice
        require_wanted()
        if not choice.at_start:
            await asyncio.to_thread(look_at, place.name, choice.source, choice.adapter)
            continue
        expected = await loader.estimate(place.name, choice)
        if memory_budget is not None:
            require_models_fit(shelf.weights_bytes() + expected, memory_budget)
        with shelf.coming(place):
            shelf.put(place, await to_the_end(loader.load(place.name, choice, expected)))


def _told(name: str, error: BaseException) -> TorporError:
    """The error for the requests, without its frames: they hold the loaded arrays."""
    if isinstance(error, TorporError):
        return error.with_traceback(None)
    return ModelUnavailable(
        f"Model {name!r} could not be loaded: {type(error).__name__}: {error}. Try again, or see to its files.",
        model=name,
    )
