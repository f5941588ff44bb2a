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
from ...memvid.answers import VersionInfo
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

    source: a folder, or a name on the hub; adapter: what is loaded on top of it; kv: how it quantizes keys and values.
    at_start: whether it is loaded at the daemon's start, not at its first use. pinned: whether it stays in memory once
    loaded. ttl_s: after how many unused seconds it is unloaded; None: only to free memory.
    """

    source: str
    adapter: AdapterChoice | None = None
    kv: KvChoice | None = None
    at_start: bool = True
    pinned: bool = False
    ttl_s: float | None = None

    def is_same_model(self, other: ModelChoice) -> bool:
        """Whether another choice loads the same model."""
        return (self.source, self.adapter, self.kv) == (other.source, other.adapter, other.kv)


@dataclass(slots=True, eq=False)
class Place:
    """One name, and the model in memory under it.

    model: the loaded model. facts: the last loaded model without its weights.
    loading: ends with the running load, with its error if it failed; None without one. holders: the claims that need it
    now. last_used: when one last released it, by the monotonic clock. problem: why the last load failed, as a sentence.
    changed: the parts of its files that have changed since the load; no new work begins on it then. leaving: it is
    served no more, and goes with its last use. loaded_as: the choice of the loaded model, or of the running load.
    stays_for: why it stayed when it was last to go, as a sentence; None if it was in use.
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
        """Whether the model in memory, or in the running load, is another one than its choice."""
        loaded_as = self.loaded_as
        return loaded_as is not None and not loaded_as.is_same_model(self.choice)

    @property
    def is_to_go(self) -> bool:
        """Whether it leaves memory once no request uses it: it is served no more, or its choice has changed."""
        return self.leaving or self.is_outdated


class Shelf:
    """The places, by name; the first is the default."""

    def __init__(self, choices: Mapping[str, ModelChoice]) -> None:
        self.places = {name: Place(name, choice) for name, choice in choices.items()}
        # By the id of the reference: a network is a dict, so it and its references cannot be keys.
        self._lingering: dict[int, tuple[weakref.ref[object], int, float]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.places and not self.places[str(name)].leaving

    def place(self, name: str | None) -> Place:
        """The place of a model; None means the default. Raises UnknownModel: no model of that name is served."""
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
        """Serve these models from now on, in this order. A loaded model with another choice, or with none, stays until
        it is dropped."""
        earlier = dict(self.places)
        self.places.clear()
        for name, choice in choices.items():
            place = earlier.pop(name, None) or Place(name, choice)
            if place.loaded_as is None and not choice.is_same_model(place.choice):
                place.facts, place.problem, place.changed = None, None, ()
            place.choice, place.leaving = choice, False
            self.places[name] = place
        for name, place in earlier.items():
            place.leaving = True
            self.places[name] = place

    def to_go(self) -> list[str]:
        """The names of models that leave memory once no request uses them."""
        return [place.name for place in self.places.values() if place.is_to_go]

    def forget(self, place: Place) -> None:
        """Remove the place of a model that is served no more."""
        if self.places.get(place.name) is place:
            del self.places[place.name]

    def loaded(self) -> Iterator[LoadedModel]:
        return (place.model for place in self.places.values() if place.model is not None)

    def loaded_of(self, row: VersionInfo) -> LoadedModel | None:
        """The own model of a version, under any name; None if it is not in memory."""
        return next((model for model in self.loaded() if model.identity.digest.hex() == row.identity), None)

    def facts(self, name: str) -> LoadedModel | None:
        """A model, maybe without its weights; None if it has never been loaded, or is not served."""
        place = self.places.get(name)
        return None if place is None else place.model or place.facts

    @contextmanager
    def coming(self, place: Place) -> Iterator[ModelChoice]:
        """Run a load: gives the choice for it, even if another is made meanwhile."""
        place.loaded_as = place.choice
        try:
            yield place.choice
        finally:
            if place.model is None:
                place.loaded_as = None

    def put(self, place: Place, model: LoadedModel) -> None:
        place.model, place.facts, place.problem, place.changed = model, None, None, ()
        place.loads += 1
        place.last_used = time.monotonic()

    def drop(self, place: Place, facts: LoadedModel, freed: Callable[[], None]) -> None:
        """Drop a model's weights. facts: stay in its place. Other code may hold the weights for a moment: they count
        until they are gone, and then `freed` is called, on any thread.
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

    def weights_bytes(self) -> int:
        """Bytes of the weights in memory, with dropped ones that other code still holds."""
        lingering = (size for network, size, _ in list(self._lingering.values()) if network() is not None)
        return sum(lingering) + sum(model.weights_bytes for model in self.loaded())

    def let_go_last(self) -> float:
        """When such weights were last dropped, by the monotonic clock; minus infinity if there are none."""
        there = (at for network, _, at in list(self._lingering.values()) if network() is not None)
        return max(there, default=-math.inf)

    def staying_bytes(self, needed: Container[str], claim: Claim) -> int:
        """Bytes of weights that cannot make room for a claim: pinned ones, those it holds itself, and `needed` ones."""
        return sum(
            place.model.weights_bytes
            for place in self.places.values()
            if place.model is not None and (place.choice.pinned or claim in place.holders or place.name in needed)
        )

    def residents(self, yielding: Container[Claim] = ()) -> Iterator[ResidentModel]:
        """The models in memory. yielding: claims that may lose the models they hold."""
        for place in self.places.values():
            if place.model is not None:
                is_held = any(claim not in yielding for claim in place.holders)
                size = place.model.weights_bytes
                yield ResidentModel(place.name, size, place.last_used, place.choice.pinned or is_held)

    def _gone(self, freed: Callable[[], None]) -> Callable[[weakref.ref[object]], None]:
        def gone(network: weakref.ref[object]) -> None:
            if self._lingering.pop(id(network), None) is not None:
                freed()

        return gone
