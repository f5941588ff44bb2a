"""The sessions that are awake, by their URIs, and where the looks stood that have left memory.

Owns how a session leaves memory: objects that still refer to it refer to it without its state.

A look is a session that was woken at an earlier version or token, and in which nothing has happened since
(`Session.is_mere_look`). All of it is the beginning of a stored version. So if others need its memory, nothing is
written: only the version and the token are remembered, and the next use finds it there again, to the bit. It ends as a
look in memory does: with a read or write there, with a requested sleep, and with the daemon.

A look does not keep its version. Only tags and pins keep versions from a prune: users set them and see them. A look may
last for weeks, and would hold bytes on the disk without a visible reason. If the version is gone, requests that need
the look are refused until a sleep has ended it. To go on from the newest version instead would read and write at
another place than the requested one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...memvid.errors import SessionNotFound
from ...memvid.store import IndexRow, Receipt
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...snapshot.errors import NoSuchPosition
from ..sessions.sessions import Session


@dataclass(frozen=True, slots=True)
class LeftLook:
    """Where a look stood that has left memory.

    version, bundle_id: the version; token_count: how many tokens it had. at_token: the same, None where that was all of
        the version.
    """

    uri: SessionUri
    version: int
    bundle_id: bytes
    token_count: int
    at_token: int | None

    @classmethod
    def of(cls, live: Session) -> LeftLook | None:
        """Where a look stands; None for a session that is no look."""
        if not live.is_mere_look:
            return None
        assert live.durable is not None, "what is looked at has slept"
        count = len(live.state.tokens)
        return cls(live.uri, live.durable.version, live.durable.bundle_id, count, count if live.is_cut_short else None)

    def find_in(self, versions: Sequence[IndexRow]) -> IndexRow | None:
        """The version, among all that its session has; None if it is not stored any more."""
        return next((row for row in versions if row.bundle_id == self.bundle_id), None)

    def row_in(self, versions: Sequence[IndexRow]) -> IndexRow:
        """As `find_in`. Raises SessionNotFound: it is not stored any more."""
        row = self.find_in(versions)
        if row is None:
            raise SessionNotFound(
                f"{self.uri} was awake for a look at version {self.version}, token {self.token_count}, which is not "
                "stored any more. Put the session to sleep: that ends the look, and its newest version is what you "
                "find then.",
                session=str(self.uri),
                version=self.version,
            )
        return row

    def token_in(self, row: IndexRow) -> int | None:
        """At which token of the version the look is to be found; None for all of it. Raises NoSuchPosition: the version
        has the state of fewer tokens, because a heal has made a ledger of the rest."""
        if self.at_token is None or self.at_token <= row.token_count:
            return self.at_token
        raise NoSuchPosition(
            f"{self.uri} was awake for a look at version {self.version}, token {self.at_token}. That version was "
            f"healed: it has the state of {format_plural(row.token_count, 'token')} and the others as a ledger alone, "
            "so the look cannot be had now. Put the session to sleep: that ends the look. Then wake it, which computes "
            "the others, and put it to sleep again: then it can be woken at that token.",
            session=str(self.uri),
            version=self.version,
            token_count=row.token_count,
            at=self.at_token,
        )


class Looks:
    """The looks that have left memory. An entry counts while its session is not awake."""

    def __init__(self) -> None:
        self._left: dict[SessionUri, LeftLook] = {}

    def find(self, uri: SessionUri) -> LeftLook | None:
        """Where the next use of a session finds it, if that is not the end of its newest version."""
        return self._left.get(uri)

    def remember(self, look: LeftLook) -> None:
        """A look leaves memory."""
        self._left[look.uri] = look

    def end(self, uri: SessionUri) -> LeftLook | None:
        """From now on the session is what its newest version has. What is given back is the look that has ended."""
        return self._left.pop(uri, None)

    def lead_on(self, uri: SessionUri, bundle_id: bytes, healed: Receipt) -> None:
        """A look at a damaged version is one at the version that takes its place."""
        look = self._left.get(uri)
        if look is not None and look.bundle_id == bundle_id:
            self._left[uri] = replace(look, version=healed.version, bundle_id=healed.bundle_id)


class AwakeSessions(dict[SessionUri, Session]):
    """The sessions that are awake."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()

    def admit(self, session: Session) -> None:
        """A new session is awake from now on."""
        self[session.uri] = session

    def drop(self, uri: SessionUri) -> None:
        """Let a session's memory go, if it is awake, and end its look: its next use finds its newest version."""
        self.free(uri)
        self.looks.end(uri)

    def set_aside(self, live: Session) -> None:
        """As `drop`; but the next use of a look finds it where it stood."""
        self.leave(live.uri, LeftLook.of(live))

    def leave(self, uri: SessionUri, look: LeftLook | None) -> None:
        """Let a session's memory go, if it is awake: its next use finds it where that look stood, at its newest version
        if None."""
        self.drop(uri)
        if look is not None:
            self.looks.remember(look)

    def free(self, uri: SessionUri) -> None:
        """Let a session's memory go. Code that knows the session still knows it without its state."""
        session = self.pop(uri, None)
        if session is not None:
            session.let_go()

    def drop_if_lost(self, uri: SessionUri) -> None:
        """Let a session go that there was no memory to keep; the next request finds its last sleep."""
        live = self.get(uri)
        if live is not None and live.state.is_lost:
            self.set_aside(live)

    def on(self, model: str) -> list[Session]:
        """Those on a model."""
        return [session for session in self.values() if session.model.name == model]
