"""Figures since the daemon began, for `/metrics`: how long things took, how many bytes, how many tokens and why.

Fed from every event, also while nobody is told of them, and from the account of every request that has ended. All
labels are words of the daemon's own, so there are few: never a session's name. The event loop's alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from . import events

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BYTES: Final = tuple(float(1 << power) for power in range(12, 37, 3))
"""From 4 KiB to 64 GiB."""

Begun = Literal["cold", "reused", "woken"]
"""How a request found its session: with none of its tokens; with some, its own or taken over from another; asleep."""


@dataclass(slots=True)
class Histogram:
    """Values by upper bound: counts has one more than `bounds`, for what is above all."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histograms:
    """One kind of figure by the values of a label. sentence: what it says; label: its name, empty for none."""

    def __init__(self, sentence: str, bounds: Sequence[float], label: str = "") -> None:
        self.sentence = sentence
        self.label = label
        self.of: dict[str, Histogram] = defaultdict(lambda: Histogram(bounds))

    def add(self, value: float, label: str = "") -> None:
        self.of[label].add(value)


class Figures:
    """All of them. histograms, counters: by their names in `/metrics`, without `torpor_`."""

    def __init__(self) -> None:
        self.first_token = Histograms(
            "Seconds from a request to the first token of its answer, by how it found the session: cold (all was to be "
            "read), reused (it had some tokens, or took them over from another) or woken.",
            SECONDS,
            "begun",
        )
        self.sleep = Histograms("Seconds of sleeps and saves, by cause.", SECONDS, "cause")
        self.wake = Histograms("Seconds of wakes, by cause.", SECONDS, "cause")
        self.waited = Histograms("Seconds that a request waited for its turn and for memory.", SECONDS)
        self.bytes_written = Histograms("Bytes that a sleep or a save wrote.", BYTES)
        self.bytes_read = Histograms("Bytes that a wake read.", BYTES)
        self.tokens: Counter[str] = Counter()
        self.read_again: Counter[str] = Counter()

    @property
    def histograms(self) -> Mapping[str, Histograms]:
        return {
            "time_to_first_token_seconds": self.first_token,
            "sleep_seconds": self.sleep,
            "wake_seconds": self.wake,
            "waited_seconds": self.waited,
            "sleep_written_bytes": self.bytes_written,
            "wake_read_bytes": self.bytes_read,
        }

    @property
    def counters(self) -> Mapping[str, tuple[str, str, Mapping[str, int]]]:
        """A sentence, the label, and the counts by its values."""
        return {
            "tokens": ("Tokens of requests: read by a model, taken over from a session, written.", "kind", self.tokens),
            "tokens_read_again": (
                "Tokens that were read again though a session had them, by the cause of the miss.",
                "cause",
                self.read_again,
            ),
        }

    def take(self, event: events.Event) -> None:
        """Count an event."""
        if isinstance(event, events.SleepEnded):
            self.sleep.add(event.seconds, event.cause)
            self.bytes_written.add(event.bytes_written)
        elif isinstance(event, events.WakeEnded):
            self.wake.add(event.seconds, event.cause)
            self.bytes_read.add(event.bytes_read)
