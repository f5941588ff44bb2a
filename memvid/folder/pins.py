"""Blocks that this process uses now: no removal takes their packs. A reader pins those of its version, a sleep those
that it refers to."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable


class Pins:
    """Sets of block ids, each held until it is released. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[int, set[bytes]] = {}
        self._next = 0
        self._lock = threading.RLock()  # a generator that is collected within lets go of its pin

    def add(self, block_ids: Iterable[bytes] = ()) -> int:
        """Pin these; the number by which they are released."""
        with self._lock:
            self._next += 1
            self._held[self._next] = set(block_ids)
            return self._next

    def extend(self, number: int, block_ids: Iterable[bytes]) -> None:
        """Pin more under the same number."""
        with self._lock:
            self._held[number].update(block_ids)

    def release(self, number: int) -> None:
        with self._lock:
            self._held.pop(number, None)

    def blocks(self) -> Collection[bytes]:
        """All that are pinned now."""
        with self._lock:
            return set().union(*self._held.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)
