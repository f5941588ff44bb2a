"""The remote: what it has, and what goes there and comes from there."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from ...memvid.answers import Finding, Standing
from ...records import Count, Result
from .records import Request, Seconds, SessionText

Place = Literal["free", "asleep", "held"]
"""free: no machine has it. asleep: it sleeps at a machine. Both may be taken. held: only that machine may use it. It is
awake there, or on its way to the remote."""


class RemoteSession(Result):
    """A session of the remote. place, machine: where it is. versions: how many the remote keeps. bundle_id: the newest.
    here: what this store has of it. ours: whether this store has it. epoch: how often it has changed hands."""

    session: str
    place: Place
    machine: str | None
    versions: Count
    bundle_id: str | None
    here: Standing
    ours: bool
    epoch: Count


class RemoteSessionsResult(Result):
    """The sessions of the remote at `url`, by name. problems: heads that cannot be read. sealed: whether what is there
    is encrypted, by a key of the daemon."""

    url: str
    sessions: tuple[RemoteSession, ...]
    problems: tuple[Finding, ...] = ()
    sealed: bool = False


class PushResult(Result):
    """The second receipt of a version: it is durable in the remote at `url`, as the newest one of its session.
    blocks_sent, bytes_sent: what the remote lacked; 0 if it was there."""

    session: str
    version: int
    bundle_id: str
    url: str
    blocks: Count
    blocks_sent: Count
    bytes_sent: Count
    seconds: Seconds


class PullResult(Result):
    """The newest version that the remote has of a session is one of this store. bytes_written: 0 if it was already.
    ahead: the session has gone on here from what the remote has, and is left as it is; the version is that here."""

    session: str
    version: int
    bundle_id: str
    url: str
    bytes_written: Count
    seconds: Seconds
    ahead: bool = False


class RemoteRequest(Request):
    """List the sessions of the remote, and where each is."""

    _: KW_ONLY
    namespace: SessionText | None = None


class PushRequest(Request):
    """Send the newest version of a session to the remote, and wait until it is durable there. The daemon sends each
    version by itself; this is for who wants to know."""

    session: SessionText


class PullRequest(Request):
    """Take the newest version that the remote has of a session into this store. The session stays where it is: a wake
    takes it."""

    session: SessionText
