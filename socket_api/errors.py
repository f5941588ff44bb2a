"""Errors of the wire, the server's socket and the clients.

Owns: one root, `ApiError`, and a stable `code` for each kind. Classes that derive from `ProtocolError` end the
connection they happen on; all others leave it usable. Does not know what the daemon's own failures are called: those
cross the wire as code, message and details and come out of a client as `RemoteError`.
"""

from __future__ import annotations

from typing import Any

from ..errors import TorporError


class ApiError(TorporError):
    """Root of everything that socket_api raises."""

    code = "api_error"


# --- the connection is over ------------------------------------------------------------------------------------------


class ProtocolError(ApiError):
    """The peer broke the protocol; the connection is dead."""

    code = "protocol_error"


class FrameTooLarge(ProtocolError):
    """A length prefix above the limit of its direction, refused before anything is allocated."""

    code = "frame_too_large"


class MalformedFrame(ProtocolError):
    """A frame whose bytes are not one bounded msgpack map."""

    code = "malformed_frame"


class TruncatedFrame(ProtocolError):
    """The peer went away in the middle of a frame."""

    code = "truncated_frame"


class MalformedMessage(ProtocolError):
    """A well-formed map that is no message, or one that may not come now."""

    code = "malformed_message"


class UnsupportedProtocol(ProtocolError):
    """The two sides speak different versions of the protocol."""

    code = "unsupported_protocol"


class FrameTimeout(ProtocolError):
    """A frame was begun and not finished in time."""

    code = "frame_timeout"


class HelloTimeout(ProtocolError):
    """A connection was opened and no hello came in time."""

    code = "hello_timeout"


class TooManyConnections(ProtocolError):
    """The daemon serves as many connections as it allows."""

    code = "too_many_connections"


class ConnectionEvicted(ProtocolError):
    """An idle connection gave its place to a new one."""

    code = "connection_evicted"


class PeerRefused(ProtocolError):
    """The process at the other end belongs to another user."""

    code = "peer_refused"


# --- one request failed, the connection goes on ----------------------------------------------------------------------


class InvalidRequest(ApiError):
    """Parameters that do not fit the method; `field` names the first one."""

    code = "invalid_request"


class UnknownMethod(ApiError):
    """A method that this protocol version does not have."""

    code = "unknown_method"


class DuplicateId(ApiError):
    """A request id that is still in flight on this connection."""

    code = "duplicate_id"


class TooManyRequests(ApiError):
    """More requests in flight on one connection than allowed."""

    code = "too_many_requests"


class RequestCancelled(ApiError):
    """The request was cancelled by its client before it had a result."""

    code = "cancelled"


class DaemonBusy(ApiError):
    """All connections work, and this one is held in reserve for `status` and `shutdown`."""

    code = "daemon_busy"


class ShuttingDown(ApiError):
    """The daemon is stopping."""

    code = "shutting_down"


class ReplyTooLarge(ApiError):
    """The work was done, but its result does not fit in a frame."""

    code = "reply_too_large"


class InternalError(ApiError):
    """A fault of the daemon's own code; its log has the trace."""

    code = "internal_error"


# --- the server's socket file ----------------------------------------------------------------------------------------


class SocketInUse(ApiError):
    """Another process answers on this socket."""

    code = "socket_in_use"


class SocketPathTooLong(ApiError):
    """The kernel cannot take a socket path of this length."""

    code = "socket_path_too_long"


class UnsafeSocketPath(ApiError):
    """The socket's path or directory is not ours alone, or is not a socket."""

    code = "unsafe_socket_path"


class TooFewDescriptors(ApiError):
    """The system lets this process open too few files to serve anybody."""

    code = "too_few_descriptors"


class StopRefused(ApiError):
    """The daemon goes on although it was told to stop: sessions cannot be put to sleep, and `failed` says why."""

    code = "stop_refused"


class StopIncomplete(ApiError):
    """The daemon stopped, but not every session could be put to sleep."""

    code = "stop_incomplete"


# --- the clients -----------------------------------------------------------------------------------------------------


class DaemonUnreachable(ApiError):
    """No daemon answers on the socket."""

    code = "daemon_unreachable"


class DaemonNotStarted(ApiError):
    """No daemon answers, and `torpor ensure` could not start one."""

    code = "daemon_not_started"


class ConnectionLost(DaemonUnreachable):
    """The connection ended while it was needed. Whether the request in flight was carried out is unknown."""

    code = "connection_lost"


class ClientClosed(ApiError):
    """The client was used after it was closed."""

    code = "client_closed"


class ClientBusy(ApiError):
    """The client is used from two threads at once; nothing was sent."""

    code = "client_busy"


class RequestTimeout(ApiError):
    """The daemon stayed silent for longer than the client was told to wait."""

    code = "request_timeout"


class LocalProtocolError(ApiError):
    """Our own side was about to break the protocol; nothing was sent."""

    code = "local_protocol_error"


class RemoteError(ApiError):
    """The daemon refused or failed a request; `code`, message and details are the daemon's."""

    code = "remote_error"

    def __init__(self, code: str, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the remote failure's code stands in place of the class's own
        self.details = details
