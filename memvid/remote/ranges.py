"""Which requests bring the parts of objects that are asked for: neighbors together, long ones in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .objects import Span


@dataclass(slots=True)
class Fetch:
    """One request, for the bytes of an object from `first` up to `end`, which stays behind it. shares: what it brings
    of the parts asked for, in their order: (which part, first byte, end)."""

    key: str
    first: int
    end: int
    shares: list[tuple[int, int, int]] = field(default_factory=list)


def fetches(spans: Sequence[Span], most_bytes: int) -> Iterator[Fetch]:
    """Requests of `most_bytes` each at most, which bring the spans in their order."""
    fetch = None
    for part, (key, start, size) in enumerate(spans):
        first, end = start, start + size
        while first < end:
            if fetch is None or (fetch.key, fetch.end) != (key, first) or fetch.end - fetch.first == most_bytes:
                if fetch is not None:
                    yield fetch
                fetch = Fetch(key, first, first)
            upto = min(end, fetch.first + most_bytes)
            fetch.shares.append((part, first, upto))
            fetch.end = first = upto
    if fetch is not None:
        yield fetch
