"""The room in the journal that is taken for records before they come.

Owns whose it is. `journal.py` has the bytes on the disk.
"""

from __future__ import annotations

from collections.abc import Collection

from ..format.journal import size_of
from ..uri import SessionUri


class JournalRoom:
    """The room of each session for its next record. Waits for no flush, on any thread."""

    def __init__(self) -> None:
        self._of: dict[SessionUri, int] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def take(self, uri: SessionUri, payload_bytes: int) -> None:
        """For one record, in the place of what the session had."""
        self._of[uri] = payload_bytes

    def give_back(self, uri: SessionUri) -> int | None:
        """What a session had is for others again; how much it was."""
        return self._of.pop(uri, None)

    def bytes_but(self, uris: Collection[SessionUri]) -> int:
        """All that is taken for other sessions than these, in the file."""
        return sum(size_of(count) for uri, count in list(self._of.items()) if uri not in uris)

    def clear(self) -> None:
        self._of.clear()
