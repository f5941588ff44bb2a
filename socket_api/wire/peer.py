"""The process at the other end of a Unix socket, by the kernel.

The socket's folder and mode keep other users out already. This is the second lock, for a socket that was passed on or a
folder that was opened up (threat 39).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Protocol

from ..errors import PeerRefused

_UCRED = struct.Struct("3i")  # Linux: pid, uid, gid
_XUCRED_HEAD = struct.Struct("II")  # BSD and macOS: version, uid; groups follow
_XUCRED_BYTES = 76
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
_POLL_END = select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP
_PID = struct.Struct("i")


class CredentialSocket(Protocol):
    """The part of a socket used here; asyncio's wrapper has it too."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


class PollableSocket(Protocol):
    """A socket that can be polled for its end."""

    def fileno(self) -> int: ...


FindPeerUid = Callable[[CredentialSocket], int]


def peer_uid(connected: CredentialSocket, *, platform: str = sys.platform) -> int:
    """Return the user id of the peer. Raises OSError if the kernel does not tell."""
    if platform == "linux":
        uid: int = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
        return uid
    raw = connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
    return int(_XUCRED_HEAD.unpack_from(raw)[1])


def peer_pid(connected: CredentialSocket, *, platform: str = sys.platform) -> int | None:
    """Return the process that made the other end, or None if the kernel does not tell."""
    try:
        if platform == "linux":
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        else:
            raw = connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, _PID.size)
    except OSError:
        return None
    pid = int(_PID.unpack_from(raw)[0])  # both structs begin with it
    return pid if pid > 0 else None  # 0: in another namespace


def has_left(connected: PollableSocket) -> bool:
    """Whether the other end has closed at least one direction, even behind unread bytes."""
    descriptor = connected.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, _POLL_END)
    return any(events & (_POLL_END | select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def require_own_peer(connected: CredentialSocket, path: str, find_peer_uid: FindPeerUid) -> None:
    """Check, for a client, that the daemon belongs to this user: no other user may get its prompts.

    Raises:
        PeerRefused: it belongs to another user.
        OSError: the kernel does not tell.
    """
    uid = find_peer_uid(connected)
    if uid != os.geteuid():
        raise PeerRefused(
            f"The process that listens on {path} belongs to user {uid}, you are {os.geteuid()}. Nothing was sent."
            " Start a daemon of your own, or choose its socket.",
            path=path,
        )
