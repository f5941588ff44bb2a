"""The served models: how each is loaded, its memory, and the claims that hold it.

Values and accounts only; `loading.py` loads, and `residency.py` unloads. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...errors import TorporError
from ...snapshot.layout import KvChoice
from ..errors import UnknownModel
from ..models.adapters import AdapterChoice
from ..models.models import LoadedModel
from .eviction import ResidentModel
from .line import Claim

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """How a model is served.

    source: a folder, or a name on the hub; adapter: what is loaded on top of it; kv: how it quantises keys and values.
    at_start: whether it is loaded when the daemon starts, and not when it is first used.
    pinned: whether it stays in memory once it is there. ttl_s: after how many unused seconds it is
        unloaded; never if None, but for want of memory.
    """

    source: str
    adapter: AdapterChoice | None = None
    kv: KvChoice | None = None
    at_start: bool = True
    pinned: bool = False
    ttl_s: float | None = None

    def is_same_model(self, other: ModelChoice) -> bool:
        """Whether another choice would load the same."""
        return (self.source, self.adapter, self.kv) == (other.source, other.adapter, other.kv)


@dataclass(slots=True, eq=False)
class Place:
    """One name, and the model in memory under it.

    model: what is loaded; facts: the same without its weights, of the last load, for what can be told without them.
    loading: ends when the load that is under way does, with the error if it failed; None while there is none.
    holders: those that need it now. last_used: when one last let go of it, by the monotonic clock.
    problem: why the last load failed, as a sentence. changed: what the files say otherwise than when they were loaded,
        part by part; nothing is begun on the model then. leaving: it is served no more, and goes with its last use.
    loaded_as: by which choice it was loaded that is in memory, or comes into it. stays_for: what kept it there when it
        was last to go, as a sentence; None if somebody used it.
    """

    name: str
    choice: ModelChoice
    model: LoadedModel | None = None
    facts: LoadedModel | None = None
    loading: asyncio.Future[TorporError | None] | None = None
    holders: list[Claim] = field(default_factory=list)
    last_used: float = field(default_factory=time.monotonic)
    loads: int = 0
    problem: str | None = None
    changed: tuple[str, ...] = ()
    leaving: bool = False
    loaded_as: ModelChoice | None = None
    stays_for: str | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether what is in memory, or comes into it, is another model than the one that is to be served."""
        loaded_as = self.loaded_as
        return loaded_as is not None and not loaded_as.is_same_model(self.choice)

    @property
    def is_to_go(self) -> bool:
        """Whether it is to leave memory as soon as no request uses it: it is served no more, or otherwise."""
        return self.leaving or self.is_outdated


class Shelf:
    """The places, by name; the first is the default's. on_drop: told when a model has left its place."""

    def __init__(self, choices: Mapping[str, ModelChoice]) -> None:
        self.places = {name: Place(name, choice) for name, choice in choices.items()}
        self.on_drop: Callable[[], None] = _ignore
        # By the id of the reference: a network is a dict, so neither it nor what refers to it can be a key.
        self._lingering: dict[int, tuple[weakref.ref[object], int, float]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.places and not self.places[str(name)].leaving

    def place(self, name: str | None) -> Place:
        """The place of a model, of the default one if no name is given. Raises UnknownModel: no model of that name is
        served."""
        served = [place.name for place in self.places.values() if not place.leaving]
        name = served[0] if name is None else name
        if name not in served:
            raise UnknownModel(
                f"No model is served as {name!r}; there is {', '.join(map(repr, served))}. "
                f"Start the daemon with --model {name}=FOLDER.",
                model=name,
                served=served,
            )
        return self.places[name]

    def take_over(self, choices: Mapping[str, ModelChoice]) -> None:
        """Serve these from now on, in this order. What is in memory and is served no more, or is to be loaded from
        elsewhere, stays until it is dropped."""
        kept = dict(self.places)
        self.places.clear()
        for name, choice in choices.items():
            place = kept.pop(name, None) or Place(name, choice)
            if place.loaded_as is None and not choice.is_same_model(place.choice):
                place.facts, place.problem, place.changed = None, None, ()
            place.choice, place.leaving = choice, False
            self.places[name] = place
        for name, place in kept.items():
            place.leaving = True
            self.places[name] = place

    def to_go(self) -> list[str]:
        """The names of those that are to leave memory as soon as no request uses them."""
        return [place.name for place in self.places.values() if place.is_to_go]

    def forget(self, place: Place) -> None:
        """A model that is served no more has gone."""
        if self.places.get(place.name) is place:
            del self.places[place.name]

    def loaded(self) -> Iterator[LoadedModel]:
        """The models that are in memory."""
        return (place.model for place in self.places.values() if place.model is not None)

    def facts(self, name: str) -> LoadedModel | None:
        """A model, maybe without its weights; None if it has never been loaded, or is not served."""
        place = self.places.get(name)
        return None if place is None else place.model or place.facts

    @contextmanager
    def coming(self, place: Place) -> Iterator[ModelChoice]:
        """Around a load: the choice by which the model is loaded, whatever is chosen meanwhile."""
        place.loaded_as = place.choice
        try:
            yield place.choice
        finally:
            if place.model is None:
                place.loaded_as = None

    def put(self, place: Place, model: LoadedModel) -> None:
        """A model has been loaded, as it was to come."""
        place.model, place.facts, place.problem, place.changed = model, None, None, ()
        place.loads += 1
        place.last_used = time.monotonic()

    def drop(self, place: Place, facts: LoadedModel, freed: Callable[[], None]) -> None:
        """Let go of a model's weights; `facts` is what is left of it.

        Somebody else may have them still, for a moment: they count until they are gone, and then `freed` is called, on
        any thread.
        """
        model = place.model
        assert model is not None
        place.model, place.facts, place.stays_for = None, facts, None
        if place.is_outdated:
            place.facts, place.changed = None, ()
        place.loaded_as = None
        network = weakref.ref(model.network, self._gone(freed))
        self._lingering[id(network)] = (network, model.weights_bytes, time.monotonic())
        del model
        if network() is not None:
            gc.collect()
        if network() is None:
            self._lingering.pop(id(network), None)
        else:
            _LOG.warning("The weights of %r are still in use somewhere; they count until they are free", place.name)
        self.on_drop()

    def weights_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.lingering_bytes() + sum(model.weights_bytes for model in self.loaded())

    def lingering_bytes(self) -> int:
        """Bytes of the weights that were released, and that other code still holds."""
        return sum(size for network, size, _ in list(self._lingering.values()) if network() is not None)

    def let_go_last(self) -> float:
        """When the last of those was let go of, by the monotonic clock; long ago if there is none."""
        there = (at for network, _, at in list(self._lingering.values()) if network() is not None)
        return max(there, default=-math.inf)

    def staying_bytes(self, needed: Container[str], claim: Claim) -> int:
        """What the weights take that a claim could not have: of those that are pinned, that it holds itself, or that
        are `needed`."""
        return sum(
            place.model.weights_bytes
            for place in self.places.values()
            if place.model is not None and (place.choice.pinned or claim in place.holders or place.name in needed)
        )

    def residents(self, yielding: Container[Claim] = ()) -> Iterator[ResidentModel]:
        """The models in memory. yielding: claims that may lose what they hold."""
        for place in self.places.values():
            if place.model is not None:
                held = any(claim not in yielding for claim in place.holders)
                size = place.model.weights_bytes
                yield ResidentModel(place.name, size, place.last_used, place.choice.pinned or held)

    def _gone(self, freed: Callable[[], None]) -> Callable[[weakref.ref[object]], None]:
        def gone(network: weakref.ref[object]) -> None:
            if self._lingering.pop(id(network), None) is not None:
                freed()

        return gone


def _ignore() -> None:
    """Nobody is told."""
