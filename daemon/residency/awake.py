"""The sessions that are awake, by their URIs, and where the looks stood that have left memory.

Owns how a session leaves memory: whatever still knows it knows it without its state.
"""

from __future__ import annotations

from ...memvid.uri import SessionUri
from ..sessions.sessions import Session
from .looks import LeftLook, Looks


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
