"""How fast this daemon reads its store and computes, for each model: measured in its ordinary work.

Owns the samples, the rates, and the file that keeps them for the next daemon. `choosing.py` decides by them.

A rate belongs to one model on one backend: its identity, and the device, processor, BLAS and versions. A rate of
another machine or library version is not used. No sample, no rate.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from blake3 import blake3

from ...errors import TorporError
from ...memvid.folder.rates_file import MAX_SUBJECTS, Figure
from ...memvid.store import Store
from .models import LoadedModel

_LOG = logging.getLogger(__name__)

RateName = Literal["prefill", "decode", "restore", "fixed"]
RATE_NAMES: Final[tuple[RateName, ...]] = ("prefill", "decode", "restore", "fixed")
"""The rates: tokens read in chunks, the last one alone; tokens read one by one, as a session writes them; bytes of a
wake read, hashed and placed; and the rest of a wake, once each."""

WINDOW: Final = 16
"""The last samples of a rate that count."""
_SHORTEST_S: Final = 1e-9
_SUBJECT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate: seconds for one token, one byte, or one wake. samples: how many it rests on."""

    seconds: float
    samples: int

    @property
    def per_second(self) -> float:
        return 1 / self.seconds


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a model; None where nothing was measured."""

    prefill: Rate | None = None
    decode: Rate | None = None
    restore: Rate | None = None
    fixed: Rate | None = None


@dataclass(slots=True)
class _Window:
    """The last samples of one rate: amounts and their seconds. seen: how many there were in all."""

    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seen: int = 0

    def add(self, amount: float, seconds: float) -> None:
        self.samples.append((amount, max(seconds, _SHORTEST_S)))
        self.seen += 1

    def rate(self) -> Rate:
        """The median of the samples, weighted by their amounts: a sample that was held up does not count, and a small
        one, mostly overhead, counts little."""
        ordered = sorted((seconds / amount, amount) for amount, seconds in self.samples)
        half, passed = sum(amount for _, amount in ordered) / 2, 0.0
        for each, amount in ordered:
            passed += amount
            if passed >= half:
                return Rate(each, min(self.seen, WINDOW))
        raise AssertionError("unreachable")

    def figure(self) -> Figure:
        """The first sample of the next daemon, of a usual size."""
        amount = statistics.fmean(amount for amount, _ in self.samples)
        return amount, amount * self.rate().seconds, min(self.seen, WINDOW)


class Measured:
    """The rates of all models. The event loop's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, dict[RateName, _Window]] = {}
        for subject, figures in store.load_rates().items():
            self._of[subject] = {
                name: _Window(deque([figures[name][:2]], maxlen=WINDOW), min(figures[name][2], WINDOW))
                for name in RATE_NAMES
                if name in figures
            }

    def add(self, model: LoadedModel, name: RateName, amount: float, seconds: float) -> None:
        """Add a sample. An amount of 0 is ignored."""
        if amount <= 0 or not math.isfinite(seconds):
            return
        subject = _subject_of(model)
        windows = self._of.pop(subject, {})
        self._of[subject] = windows  # the latest one is forgotten last
        windows.setdefault(name, _Window()).add(amount, seconds)
        while len(self._of) > MAX_SUBJECTS:
            del self._of[next(iter(self._of))]

    def of(self, model: LoadedModel) -> Rates:
        """The rates of a model, loaded or not."""
        windows = self._of.get(_subject_of(model), {})
        return Rates(**{name: window.rate() for name, window in windows.items()})

    def save(self) -> None:
        """Keep the rates for the next daemon. A failure costs nothing: they are measured again."""
        figures: dict[str, dict[str, Figure]] = {
            subject: {str(name): window.figure() for name, window in windows.items()}
            for subject, windows in self._of.items()
            if windows
        }
        if not figures:
            return
        try:
            self._store.save_rates(figures)
        except TorporError as error:
            _LOG.warning("the measured rates are not kept: %s: %s", error.code, error.message)


def _subject_of(model: LoadedModel) -> str:
    parts = [model.identity.digest.hex(), *(f"{name}={value}" for name, value in sorted(model.backend.items()))]
    return blake3("\n".join(parts).encode()).digest(_SUBJECT_BYTES).hex()
