"""The protocol as two state machines without I/O. Both clients and the server are shells around them.

Owns the order of messages, the ids in flight, and the death of a connection at the first breach. Does not know sockets,
clocks, tasks or methods.

To use one: write the bytes that a `send_…` returns; `feed` received bytes and call `next_message` until it gives None;
call `require_clean_end` when the peer's stream ends. After a `ProtocolError` the connection is dead: tell the peer why
(`ServerConnection.send_fatal`), then close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...daemon.api.records import Request as Asked
from ...daemon.api.verb import Verb
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ...spellings import EARLIER, present
from .. import limits
from ..errors import DuplicateId, LocalProtocolError, MalformedMessage, ProtocolError, TooManyRequests, UnknownMethod
from .checking import load_request_in_pieces
from .framing import Frame, FrameDecoder, Pieces, encode_frame, encode_in_pieces, whole
from .messages import (
    Cancel,
    ErrorMessage,
    EventMessage,
    Hello,
    HelloLimits,
    HelloReply,
    Request,
    ServerMessage,
    error_body,
    load_client_message,
    load_server_message,
    to_map,
)


class ClientConnection:
    """The client's side. Ids are counted up and never used twice."""

    def __init__(self, *, client_name: str) -> None:
        self._client_name = client_name
        self._decoder = FrameDecoder(limits.REPLY_LIMITS)
        self._max_frame_bytes = limits.MAX_REQUEST_FRAME_BYTES
        self._in_flight: set[int] = set()
        self._next_id = 1
        self._breach: ProtocolError | None = None
        self.hello: HelloReply | None = None

    def renewed(self) -> ClientConnection:
        """A new connection of the same client; its ids go on."""
        after = ClientConnection(client_name=self._client_name)
        after._next_id = self._next_id
        return after

    def send_hello(self) -> bytes:
        """The first bytes of the connection."""
        hello = Hello(protocol=limits.PROTOCOL_VERSION, client=self._client_name)
        return encode_frame(to_map(hello), max_frame_bytes=self._max_frame_bytes)

    def send_request(self, method: str, params: Mapping[str, Any]) -> tuple[int, bytes]:
        """Begin a request.

        Returns:
            Its id, and the bytes to send.

        Raises LocalProtocolError: the connection is dead, or the request too large; nothing has changed."""
        request_id = self._next_id
        data = self.send_again(request_id, method, params)
        self._next_id += 1
        return request_id, data

    def send_again(self, request_id: int, method: str, params: Mapping[str, Any]) -> bytes:
        """As `send_request`, for a request that an earlier connection sent and the daemon did not begin."""
        self._require_alive()
        request = Request(id=request_id, method=method, params=dict(params))
        data = encode_frame(to_map(request), max_frame_bytes=self._max_frame_bytes)
        self._in_flight.add(request_id)
        return data

    def send_cancel(self, request_id: int) -> bytes:
        """Ask that a request be stopped. Gives empty bytes if it has been answered already."""
        self._require_alive()
        if request_id not in self._in_flight:
            return b""
        return encode_frame(to_map(Cancel(id=request_id)), max_frame_bytes=self._max_frame_bytes)

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._decoder.feed(data)

    def next_message(self) -> ServerMessage | None:
        """Return the next message, or None until more bytes are fed. Raises ProtocolError: the server broke the
        protocol; later calls raise it again."""
        if self._breach is not None:
            raise self._breach
        try:
            frame = self._decoder.next_frame()
            return None if frame is None else self._accept(load_server_message(frame))
        except ProtocolError as error:
            self._breach = error
            raise

    def require_clean_end(self) -> None:
        """Check that the server's stream did not end inside a frame. Raises TruncatedFrame."""
        self._decoder.require_empty()

    def _require_alive(self) -> None:
        if self._breach is not None:
            raise LocalProtocolError("This connection is dead: the daemon broke the protocol on it. Open a new one.")

    def _accept(self, message: ServerMessage) -> ServerMessage:
        if isinstance(message, HelloReply):
            if self.hello is not None:
                raise MalformedMessage("The daemon said hello twice.")
            self.hello = message
            self._max_frame_bytes = min(self._max_frame_bytes, message.limits.max_request_frame_bytes)
            return message
        if isinstance(message, ErrorMessage) and message.id is None:
            return message
        if self.hello is None:
            raise MalformedMessage("The daemon answered before it said hello.")
        if message.id not in self._in_flight:
            raise MalformedMessage(f"The daemon answered request {message.id}, which is not in flight.")
        if not isinstance(message, EventMessage):
            self._in_flight.discard(message.id)
        return message


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A checked request, in flight until its result or error is sent."""

    id: int
    verb: Verb[Any, Any]
    asked: Asked


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was never in flight: answer it with `send_refusal`."""

    id: int
    error: TorporError


ServerInput = Hello | AcceptedRequest | RefusedRequest | Cancel


class ServerConnection:
    """The server's side of one connection."""

    def __init__(self, *, max_in_flight: int) -> None:
        self._decoder = FrameDecoder(limits.REQUEST_LIMITS)
        self._max_in_flight = max_in_flight
        self._in_flight: dict[int, str] = {}  # with the method as the client spells it
        self.greeted = False

    @property
    def in_flight(self) -> frozenset[int]:
        """Ids of requests without a result or error yet."""
        return frozenset(self._in_flight)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of an incomplete frame."""
        return self._decoder.waiting_bytes

    @property
    def next_frame_bytes(self) -> int:
        """Size of the next frame once its prefix is there; else 0."""
        return self._decoder.next_frame_bytes

    @property
    def is_large_frame_whole(self) -> bool:
        """Whether the next frame is whole, and large enough to be decoded and checked in pieces."""
        return self._decoder.is_frame_whole and self.next_frame_bytes > limits.MAX_FRAME_BYTES_AT_ONCE

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._decoder.feed(data)

    def next_message(self) -> ServerInput | None:
        """Return the client's next message, or None until more bytes are fed. Raises ProtocolError: the client broke
        the protocol; the connection is dead."""
        return whole(self.next_message_in_pieces())

    def next_message_in_pieces(self) -> Pieces[ServerInput | None]:
        """As `next_message`; a frame above `limits.MAX_FRAME_BYTES_AT_ONCE` is decoded and checked in pieces."""
        if not self.is_large_frame_whole:
            frame = self._decoder.next_frame()
        else:
            frame = yield from self._decoder.next_frame_in_pieces()
        return None if frame is None else (yield from self._accept(frame))

    def require_clean_end(self) -> None:
        """Check that the client's stream did not end inside a frame. Raises TruncatedFrame."""
        self._decoder.require_empty()

    def send_hello(self, *, server: str, pid: int) -> bytes:
        """Answer the client's hello."""
        reply = HelloReply(
            protocol=limits.PROTOCOL_VERSION,
            server=server,
            pid=pid,
            limits=HelloLimits(
                max_request_frame_bytes=limits.MAX_REQUEST_FRAME_BYTES,
                max_reply_frame_bytes=limits.MAX_REPLY_FRAME_BYTES,
                max_in_flight=self._max_in_flight,
            ),
        )
        return _reply_frame(to_map(reply))

    def send_event(self, request_id: int, event: Mapping[str, Any]) -> bytes:
        """Send an event, given as its wire map: this is the hot path. Raises LocalProtocolError if not in flight.

        Who asks by the earlier spelling of a verb knows no other of its stage, and would give the connection up."""
        self._require_in_flight(request_id)
        method = self._in_flight[request_id]
        if method in EARLIER and event.get("stage") == EARLIER[method]:
            event = {**event, "stage": method}
        return _reply_frame({"type": "event", "id": request_id, "event": event})

    def send_result(self, request_id: int, result: Mapping[str, Any]) -> Pieces[bytes]:
        """Send a result; the request is over. A large one is encoded in pieces. Raises LocalProtocolError: not in
        flight; or too large for a frame, and then still in flight."""
        self._require_in_flight(request_id)
        message = {"type": "result", "id": request_id, "result": dict(result)}
        data = yield from encode_in_pieces(message, max_frame_bytes=limits.MAX_REPLY_FRAME_BYTES)
        del self._in_flight[request_id]
        return data

    def send_error(self, request_id: int, error: TorporError) -> bytes:
        """Send a failure; the request is over."""
        self._require_in_flight(request_id)
        del self._in_flight[request_id]
        return _error_frame(request_id, error)

    def send_refusal(self, refused: RefusedRequest) -> bytes:
        """Answer a request that was never in flight. A request in flight with the same id goes on."""
        return _error_frame(refused.id, refused.error)

    def send_fatal(self, error: TorporError) -> bytes:
        """The last frame of a connection: why it ends."""
        return _error_frame(None, error)

    def _accept(self, frame: Frame) -> Pieces[ServerInput]:
        message = load_client_message(frame)
        if isinstance(message, Hello):
            if self.greeted:
                raise MalformedMessage("A second hello. A connection begins with one, and only one.")
            self.greeted = True
            return message
        if not self.greeted:
            raise MalformedMessage(f"A {message.type} before hello. Send hello first.")
        if isinstance(message, Cancel):
            return message
        try:
            return (yield from self._begin(message))
        except TorporError as error:
            return RefusedRequest(message.id, error)

    def _begin(self, request: Request) -> Pieces[AcceptedRequest]:
        if request.id in self._in_flight:
            raise DuplicateId(f"Request id {request.id} is in flight already. Count ids up.", id=request.id)
        if len(self._in_flight) >= self._max_in_flight:
            raise TooManyRequests(
                f"{self._max_in_flight} requests are in flight on this connection. Wait for one to be answered.",
                limit=self._max_in_flight,
            )
        verb = VERBS.get(present(request.method))
        if verb is None:
            raise UnknownMethod(
                f"There is no method {request.method[:64]!r}. This daemon has: {', '.join(VERBS)}.",
                method=request.method[:64],
            )
        asked = yield from load_request_in_pieces(verb, request.params)
        self._in_flight[request.id] = request.method
        return AcceptedRequest(request.id, verb, asked)

    def _require_in_flight(self, request_id: int) -> None:
        if request_id not in self._in_flight:
            raise LocalProtocolError(f"Request {request_id} is not in flight: it was answered, or never asked.")


def _reply_frame(message: Mapping[str, Any]) -> bytes:
    return encode_frame(dict(message), max_frame_bytes=limits.MAX_REPLY_FRAME_BYTES)


def _error_frame(request_id: int | None, error: TorporError) -> bytes:
    """Encode a failure. Details that are too large are dropped: a failure must always arrive."""
    body = error_body(error)
    try:
        data = _reply_frame(to_map(ErrorMessage(id=request_id, error=body)))
    except LocalProtocolError:
        data = b""
    if 0 < len(data) <= limits.MAX_ERROR_FRAME_BYTES:
        return data
    bare = body.model_copy(update={"details": {"details_dropped": True}})
    return _reply_frame(to_map(ErrorMessage(id=request_id, error=bare)))
