"""How often the state of each session was found where it would else have been computed or read."""

from __future__ import annotations

from collections import Counter

from ...memvid.uri import SessionUri


class Hits:
    """Counts since the daemon began. A session that is gone has none."""

    def __init__(self) -> None:
        self._counts: Counter[SessionUri] = Counter()

    def add(self, uri: SessionUri) -> int:
        """Count one more; how many there are now."""
        self._counts[uri] += 1
        return self._counts[uri]

    def of(self, uri: SessionUri) -> int:
        """How many there were."""
        return self._counts.get(uri, 0)

    def forget(self, uri: SessionUri) -> None:
        """The session is gone."""
        self._counts.pop(uri, None)
