"""The rows of a session's versions, and the check that a name is free. Reads the index; changes nothing."""

from __future__ import annotations

from ...memvid.answers import VersionInfo
from ...memvid.errors import SessionNotFound
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..errors import SessionExists
from ..sessions.sessions import Session
from .awake import AwakeSessions


class Standing:
    def __init__(self, store: Store, awake: AwakeSessions) -> None:
        self._store = store
        self._awake = awake

    def row_of(self, uri: SessionUri, version: int | None) -> VersionInfo:
        """The row of a version; of the newest if the index does not have it (the wake then refuses it)."""
        newest = self.require_row(uri)
        if version in (None, newest.version):
            return newest
        return next((row for row in self._store.versions(uri) if row.version == version), newest)

    def find_row(self, uri: SessionUri, version: int | None) -> VersionInfo | None:
        """The row of a version, by default of the newest; None for a session that has no version. Raises
        SessionNotFound: it has others, and not that one."""
        return None if self._store.find_session(uri) is None else self._store.require_session(uri, version)

    def row_of_awake(self, live: Session) -> VersionInfo:
        """The version that an awake session is durable as; for a look this is not the newest. Raises SessionNotFound:
        it is a look, and that version is not stored any more."""
        durable, rows = live.durable, self._store.versions(live.uri)
        assert durable is not None, "it has slept"
        row = next((row for row in rows if row.bundle_id == durable.bundle_id), None)
        if row is None:
            raise SessionNotFound(
                f"{live.uri} is awake for a look at version {durable.version}, which is not stored any more. Append to "
                "it and put it to sleep to keep its state; or put it to sleep as it is, and you find the newest "
                "version.",
                session=str(live.uri),
                version=durable.version,
            )
        return row

    def is_in_ledger_alone(self, uri: SessionUri, version: int | None, at_token: int | None) -> bool:
        """Whether the newest version of a sleeping session has a token in its ledger alone, as after a crash: a wake
        there computes the ledger and sleeps first. version: None or that of the newest; else it is not."""
        newest = self._store.find_session(uri)
        if newest is None or at_token is None or version not in (None, newest.version):
            return False
        return newest.block_tokens < at_token <= newest.token_count

    def is_free(self, uri: SessionUri) -> bool:
        """Whether a new session may have a name: no session has it, awake, asleep or in the journal."""
        return uri not in self._awake and not self._store.can_be_deleted(uri)

    def require_new(self, uri: SessionUri) -> None:
        """Refuse a name that is not free. Raises SessionExists."""
        if not self.is_free(uri):
            raise session_exists(uri)

    def require_row(self, uri: SessionUri, version: int | str | None = None) -> VersionInfo:
        """The row of a session's version, the newest if none is named. Raises SessionNotFound: there is none, or it was
        deleted while this request waited for its turn. JournalWaits: it could not be made of the journal's turns."""
        return self._store.require_session(uri, version)


def session_exists(uri: SessionUri) -> SessionExists:
    return SessionExists(f"{uri} exists already; use it, delete it, or choose another name.", session=str(uri))
