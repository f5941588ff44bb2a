"""Which requests bring the parts of an object that are asked for: neighbors together, long ones in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fetch:
    """One request, for the bytes from `first` up to `end`, which stays behind it. shares: what it brings of the parts
    asked for, in their order: (which part, first byte, end)."""

    first: int
    end: int
    shares: list[tuple[int, int, int]] = field(default_factory=list)


def fetches(spans: Sequence[tuple[int, int]], most_bytes: int) -> Iterator[Fetch]:
    """Requests of `most_bytes` each at most, which bring the spans in their order. spans: (first byte, how many bytes)
    each."""
    fetch = None
    for part, (start, size) in enumerate(spans):
        first, end = start, start + size
        while first < end:
            if fetch is None or fetch.end != first or fetch.end - fetch.first == most_bytes:
                if fetch is not None:
                    yield fetch
                fetch = Fetch(first, first)
            upto = min(end, fetch.first + most_bytes)
            fetch.shares.append((part, first, upto))
            fetch.end = first = upto
    if fetch is not None:
        yield fetch
