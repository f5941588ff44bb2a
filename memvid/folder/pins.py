"""Which bundles are open, so that a delete leaves their files until the last reader closes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Pins:
    """A count for each open bundle, and the retired bundles that go once theirs is zero. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._waiting: set[bytes] = set()
        self._lock = threading.Lock()

    def add(self, bundle_ids: Iterable[bytes]) -> None:
        with self._lock:
            self._counts.update(bundle_ids)

    def release(self, bundle_ids: Iterable[bytes]) -> None:
        with self._lock:
            self._counts.subtract(bundle_ids)
            self._counts = +self._counts

    def count(self, bundle_id: bytes) -> int:
        with self._lock:
            return self._counts[bundle_id]

    def wait_or_free(self, bundle_ids: Iterable[bytes]) -> list[bytes]:
        """Those of `bundle_ids`, and of the earlier ones that waited, without a reader; the others wait."""
        with self._lock:
            asked = self._waiting.union(bundle_ids)
            self._waiting = {bundle_id for bundle_id in asked if self._counts[bundle_id] > 0}
            return sorted(asked - self._waiting)

    @property
    def waiting(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def __len__(self) -> int:
        with self._lock:
            return len(self._counts)
