"""The awake sessions by their URIs, and the looks that have left memory.

Owns how a session leaves memory: other objects may still refer to it, but without its state.

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
    """The position of a look that has left memory.

    version, bundle_id: the version; token_count: how many tokens it had. at_token: the same, but None for the whole
    version.
    """

    uri: SessionUri
    version: int
    bundle_id: bytes
    token_count: int
    at_token: int | None

    @classmethod
    def of(cls, live: Session) -> LeftLook | None:
        """The position of a look; None for a session that is no look."""
        if not live.is_mere_look:
            return None
        assert live.durable is not None, "what is looked at has slept"
        count = len(live.state.tokens)
        return cls(live.uri, live.durable.version, live.durable.bundle_id, count, count if live.is_cut_short else None)

    def find_in(self, versions: Sequence[IndexRow]) -> IndexRow | None:
        """The row of its version; None if that is not stored any more."""
        return next((row for row in versions if row.bundle_id == self.bundle_id), None)

    def row_in(self, versions: Sequence[IndexRow]) -> IndexRow:
        """As `find_in`. Raises SessionNotFound: it is not stored any more."""
        row = self.find_in(versions)
        if row is None:
            raise SessionNotFound(
                f"{self.uri} was awake for a look at version {self.version}, token {self.token_count}, which is not "
                "stored any more. Put the session to sleep: that ends the look, and you find its newest version.",
                session=str(self.uri),
                version=self.version,
            )
        return row

    def token_in(self, row: IndexRow) -> int | None:
        """The look's token in the version; None for all of it. Raises NoSuchPosition: the version has state for fewer
        tokens, because a heal has moved the rest into a ledger."""
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


class AwakeSessions(dict[SessionUri, Session]):
    """The sessions that are awake. looks: those that have left memory, at which the next use finds a session. An entry
    counts while its session is not awake; without one the next use finds the newest version."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[SessionUri, LeftLook] = {}

    def lead_on(self, uri: SessionUri, bundle_id: bytes, healed: Receipt) -> None:
        """Move a look at a damaged version to the version that replaces it."""
        look = self.looks.get(uri)
        if look is not None and look.bundle_id == bundle_id:
            self.looks[uri] = replace(look, version=healed.version, bundle_id=healed.bundle_id)

    def admit(self, session: Session) -> None:
        self[session.uri] = session

    def drop(self, uri: SessionUri) -> None:
        """Free a session's memory, if it is awake, and end its look: its next use finds its newest version."""
        self.free(uri)
        self.looks.pop(uri, None)

    def set_aside(self, live: Session) -> None:
        """As `drop`, but the next use finds a look at its position."""
        self.leave(live.uri, LeftLook.of(live))

    def leave(self, uri: SessionUri, look: LeftLook | None) -> None:
        """Free a session's memory, if it is awake: its next use finds that look; None: its newest version."""
        self.drop(uri)
        if look is not None:
            self.looks[uri] = look

    def free(self, uri: SessionUri) -> None:
        """Free a session's memory. Other objects keep the session without its state."""
        session = self.pop(uri, None)
        if session is not None:
            session.let_go()

    def drop_if_lost(self, uri: SessionUri) -> bool:
        """Drop a session that lost its state for lack of memory: what is durable of it is left. Gives whether it was
        dropped."""
        live = self.get(uri)
        if live is None or not live.state.is_lost:
            return False
        self.set_aside(live)
        return True

    def on(self, model: str) -> list[Session]:
        return [session for session in self.values() if session.model.name == model]
