"""The awake sessions by their URIs.

Owns how a session leaves memory: other objects may still refer to it, but without its state.

A look is a session that was woken at an earlier version or token, and in which nothing has happened since
(`Session.is_mere_look`). All of it is the beginning of a stored version, so when it leaves memory nothing is written,
and the look ends: its next use finds the newest version.
"""

from __future__ import annotations

from ...memvid.uri import SessionUri
from ..sessions.sessions import Session


class AwakeSessions(dict[SessionUri, Session]):
    """The sessions that are awake."""

    def admit(self, session: Session) -> None:
        self[session.uri] = session

    def drop(self, uri: SessionUri) -> None:
        """Free a session's memory, if it is awake. Other objects keep the session without its state."""
        session = self.pop(uri, None)
        if session is not None:
            session.let_go()

    def drop_if_lost(self, uri: SessionUri) -> bool:
        """Drop a session that lost its state for lack of memory, or whose last turn was refused: what is durable of it
        is left. Gives whether it was dropped."""
        live = self.get(uri)
        if live is None or not live.state.is_lost:
            return False
        self.drop(uri)
        return True

    def on(self, model: str) -> list[Session]:
        return [session for session in self.values() if session.model.name == model]
