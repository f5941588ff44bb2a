"""All sessions, in memory and on disk, as they are listed and counted. There may be very many: all of them are looked
over in pieces (`pieces.py`), and what happens meanwhile is seen or not; but no session that is there all the time is
missed or told twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.session import SessionInfo
from ..engine.pieces import NAMES_AT_ONCE, SESSIONS_AT_ONCE, Pieces
from ..sessions.sessions import Session
from . import listing
from .looks import Looks


class Roll:
    """Looks at what is there. awake: the sessions in memory; looks: those that have left it."""

    def __init__(self, store: Store, awake: Mapping[SessionUri, Session], looks: Looks) -> None:
        self._store = store
        self._awake = awake
        self._looks = looks

    def infos(self, namespace: str | None = None) -> Pieces[list[SessionInfo]]:
        """All sessions of a namespace, or all, in the order of their URIs."""
        unlisted = list(self._awake)
        found: dict[SessionUri, SessionInfo] = {}
        for page in self._store.iter_listed(namespace, SESSIONS_AT_ONCE):
            for row, stored_bytes in page:
                live = self._awake.get(row.uri)
                if live is None and self._looks.find(row.uri) is not None:
                    unlisted.append(row.uri)  # by a version that the page has not
                elif live is None or live.gave_way_to(row, self._store.versions):
                    found[row.uri] = listing.info_of_asleep(row, stored_bytes)
                else:
                    found[row.uri] = listing.info_of_awake(live, row, stored_bytes)
            yield
        unlisted = [uri for uri in unlisted if uri not in found and namespace in (None, uri.namespace)]
        found.update((yield from self.of(unlisted)))
        return [found[uri] for uri in sorted(found, key=lambda uri: (uri.namespace, uri.name))]

    def of(self, uris: Iterable[SessionUri]) -> Pieces[dict[SessionUri, SessionInfo]]:
        """Those of these sessions that are there."""
        found = {}
        for looked_at, uri in enumerate(uris, 1):
            if (info := self.find(uri)) is not None:
                found[uri] = info
            if not looked_at % SESSIONS_AT_ONCE:
                yield
        return found

    def find(self, uri: SessionUri) -> SessionInfo | None:
        """One session; None if there is none of that name."""
        versions, live = self._store.versions(uri), self._awake.get(uri)
        newest = versions[-1] if versions else None
        stored_bytes = sum(row.bundle_bytes for row in versions)
        if live is not None and not live.gave_way_to(newest, lambda _: versions):
            return listing.info_of_awake(live, newest, stored_bytes)
        return listing.info_of_left(versions, self._looks.find(uri)) if versions else None

    def count_asleep(self) -> Pieces[int]:
        """How many sessions are on disk alone."""
        asleep = 0
        for page in self._store.iter_uris(NAMES_AT_ONCE):
            asleep += sum(uri not in self._awake for uri in page)
            yield
        return asleep
