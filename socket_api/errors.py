"""Errors of the wire, the server's socket and the clients.

Each kind has a stable `code`. A `ProtocolError` ends the connection; all others leave it usable. The daemon's own
failures cross the wire as code, message and details, and come out of a client as `RemoteError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from ..errors import TorporError

_SESSIONS_TOLD: Final = 5
"""In the message of a stop that could not keep them; its details have all sessions."""


class ApiError(TorporError):
    """Root of the errors of socket_api."""


# --- the connection is over ------------------------------------------------------------------------------------------


class ProtocolError(ApiError):
    """The peer broke the protocol; the connection is dead."""


class FrameTooLarge(ProtocolError):
    """A length prefix above the limit of its direction, refused before anything is allocated."""


class MalformedFrame(ProtocolError):
    """A frame whose bytes are not one bounded msgpack map."""


class TruncatedFrame(ProtocolError):
    """The peer went away in the middle of a frame."""


class MalformedMessage(ProtocolError):
    """A well-formed map that is no message, or one that may not come now."""


class UnsupportedProtocol(ProtocolError):
    """The two sides speak different versions of the protocol."""


class FrameTimeout(ProtocolError):
    """A frame was begun and not finished in time."""


class HelloTimeout(ProtocolError):
    """A connection was opened and no hello came in time."""


class TooManyConnections(ProtocolError):
    """The daemon serves as many connections as it allows."""


class ConnectionEvicted(ProtocolError):
    """An idle connection gave its place to a new one."""


class PeerRefused(ProtocolError):
    """The process at the other end belongs to another user."""


# --- one request failed, the connection goes on ----------------------------------------------------------------------


class InvalidRequest(ApiError):
    """Parameters that do not fit the method; `field` names the first one."""


class PreviousResponseNotFound(ApiError):
    """A response, or an item of one, by whose id a request over HTTP goes on, and which no session has."""


class UnknownMethod(ApiError):
    """A method that this protocol version does not have."""


class DuplicateId(ApiError):
    """A request id that is still in flight on this connection."""


class TooManyRequests(ApiError):
    """More requests in flight on one connection than allowed."""


class RequestCancelled(ApiError):
    """The request was cancelled by its client before it had a result."""

    code = "cancelled"


class DaemonBusy(ApiError):
    """All connections work, and this one is held in reserve for `status` and `shutdown`."""


class ShuttingDown(ApiError):
    """The daemon is stopping."""


class ReplyTooLarge(ApiError):
    """The work was done, but its result does not fit in a frame."""


class InternalError(ApiError):
    """A fault of the daemon's own code; its log has the trace."""


# --- the server's socket file ----------------------------------------------------------------------------------------


class SocketInUse(ApiError):
    """Another process answers on this socket."""


class SocketPathTooLong(ApiError):
    """The kernel cannot take a socket path of this length."""


class UnsafeSocketPath(ApiError):
    """The socket's path or directory is not ours alone, or is not a socket."""


class TooFewDescriptors(ApiError):
    """The system lets this process open too few files to serve anybody."""


class StopRefused(ApiError):
    """The daemon goes on although it was told to stop: sessions cannot be put to sleep, and `failed` says why."""

    @classmethod
    def of(cls, failed: Mapping[str, str]) -> StopRefused:
        """Name the sessions with the reasons, behind the advice."""
        return cls(
            f"{_count(failed)} cannot be put to sleep, so the daemon goes on. Solve the problem of each and stop it"
            f" again; or keep only their ledgers, with torpor stop --force. {_describe(failed)}",
            failed=failed,
        )


class StopIncomplete(ApiError):
    """The daemon stopped, but not every session could be put to sleep."""

    @classmethod
    def of(cls, failed: Mapping[str, str]) -> StopIncomplete:
        """Name the sessions with the reasons. Its answers are in the journal, unless the daemon kept none."""
        return cls(
            f"{_count(failed)} could not be put to sleep. The next start brings back what was answered, or only the"
            f" last sleep if the daemon ran with --durability sleep. {_describe(failed)}",
            failed=failed,
        )


def _count(failed: Mapping[str, str]) -> str:
    return f"{len(failed)} session{'' if len(failed) == 1 else 's'}"


def _describe(failed: Mapping[str, str]) -> str:
    """The first session of each code with its reason, which has advice; of others that fail alike, the code alone. The
    details have all reasons, and no message can hold those of a thousand sessions."""
    told: list[str] = []
    codes: set[str] = set()
    for session, reason in itertools.islice(failed.items(), _SESSIONS_TOLD):
        code = reason.partition(":")[0]
        told.append(f"{session}: {code}, too" if code in codes else f"{session}: {reason.rstrip('.')}")
        codes.add(code)
    if more := len(failed) - len(told):
        told.append(f"and {more} more")
    return "; ".join(told) + "."


class ExtraMissing(ApiError):
    """A package that is not installed: it comes with an extra of this one, `extra`."""


# --- HTTP -----------------------------------------------------------------------------------------------------------


class HttpRefused(ApiError):
    """A request over HTTP that was refused before it reached the daemon; `status` is that of its answer."""


class ReplicaLost(ApiError):
    """A replica of a cluster ended before its answer did. The session goes on with its last answered turn."""


class PortInUse(ApiError):
    """Another process listens on the port for HTTP."""


class UnsafeTokenFile(ApiError):
    """The file with the tokens for HTTP is not ours alone, or has a wrong line."""


# --- the clients -----------------------------------------------------------------------------------------------------


class DaemonUnreachable(ApiError):
    """No daemon answers on the socket."""


class DaemonNotStarted(ApiError):
    """No daemon answers, and `torpor ensure` or `torpor serve-ray` could not start one."""


class ConnectionLost(DaemonUnreachable):
    """The connection ended while it was needed. Whether the request in flight was carried out is unknown."""


class ClientClosed(ApiError):
    """The client was used after it was closed."""


class ClientBusy(ApiError):
    """The client is used from two threads at once; nothing was sent."""


class RequestTimeout(ApiError):
    """The daemon stayed silent for longer than the client was told to wait."""


class LocalProtocolError(ApiError):
    """Our own side was about to break the protocol; nothing was sent."""


class RemoteError(ApiError):
    """The daemon refused or failed a request; `code`, message and details are the daemon's."""

    def __init__(self, code: str, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the daemon's code replaces that of the class
        self.details = details
        self.add_note(f"code: {code}")  # a traceback tells it, too
