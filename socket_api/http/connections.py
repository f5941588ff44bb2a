"""One HTTP connection: uvicorn's with httptools, within named limits (threats 39, 41 to 43).

uvicorn bounds neither the bytes and the number of headers, nor the time in which they come, and does not look at the
peer of a Unix socket. This does, before the request is known to anything else. uvicorn also reads on while the client
takes no answers, and waits for such a client for ever. This reads nothing meanwhile, and ends the connection in time.

It mends three things besides. httptools drops the body of a request that offers another protocol, as the JDK's client
and `curl --http2` do in their first one. uvicorn takes the trailers of a body for headers, and sends chunks to clients
of HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections import deque
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..wire.peer import FindPeerUid, peer_uid

_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
"""The beginning of a target as proxies get it, with the host."""

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Of one request: the limit of Anthropic's API, and some eight million tokens of text."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of connections; an argument, so that tests need not wait for the real deadlines."""

    max_connections: int = 512
    """To each address. A client keeps several. Beyond it, the one gives way that has waited longest for its client: for
    a request, the rest of one, or until an answer is taken. If none waits, the new one gets 503."""

    max_pipelined: int = 64
    """Requests that wait on one connection behind the one in work; about 4 KiB each."""

    max_head_bytes: int = 32 * 1024
    """A request line and its headers; clients send 1 to 4 KiB. One read of the socket may add to it."""

    max_headers: int = 128

    head_timeout_s: float = 10.0
    """From the accept, or from the first byte of a further request, to the end of its headers."""

    body_timeout_s: float = 60.0
    """From the headers to the last byte of the body; a local client needs a second for 32 MiB."""

    keep_alive_s: float = 75.0
    """How long a connection may be idle between two requests."""

    max_bodies_bytes: int = 4 * MAX_BODY_BYTES
    """Bodies of all requests that are read or carried out, but for the first `free_body_bytes` of each. Beyond it, a
    body waits to be read."""

    free_body_bytes: int = 128 * 1024
    """So much of each body waits for no other: the number of connections bounds it."""

    stall_timeout_s: float = 30.0
    """The longest time in which a client takes none of the waiting bytes."""

    max_waiting_event_bytes: int = 8 * 1024 * 1024
    """Events that wait for a slow client; some 50,000 tokens."""

    first_event_s: float = 0.5
    """A stream whose request fits begins after so long, if nothing has refused it: a busy daemon does so at once."""

    silence_s: float = 10.0
    """A stream with nothing to tell sends an empty event after so long: clients give up after minutes of silence."""

    goodbye_timeout_s: float = 2.0
    """How long a stopping server waits for its clients to take their last bytes."""


class Config(uvicorn.Config):
    """uvicorn's settings, and the limits of its connections."""

    def __init__(self, app: Any, limits: HttpLimits, find_peer_uid: FindPeerUid = peer_uid) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # a number for `call_later`
            timeout_graceful_shutdown=limits.goodbye_timeout_s,  # type: ignore[arg-type]  # and one for `wait_for`
        )
        self.limits = limits
        self.find_peer_uid = find_peer_uid


class _Refused(Exception):
    """A head that is not taken. Never leaves the parser."""


class _Cycle(RequestResponseCycle):
    """A request and its answer."""

    async def send(self, message: Any) -> None:
        if self.scope["http_version"] == "1.0":  # it knows no chunks: the end of the connection ends the answer
            self.chunked_encoding = False
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Flow(FlowControl):
    """Reads nothing while requests wait for their turn, or answers for their client."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self.write_paused and not self._pipeline:
            super().resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading()


class Connection(HttpToolsProtocol):
    """One connection; a request finds it as `scope["state"]["connection"]`."""

    config: Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        peer = transport.get_extra_info("socket")
        self.on_unix: bool = peer.family == socket.AF_UNIX
        self._limits = self.config.limits
        self._waits_since = self.loop.time()
        self._stalls: asyncio.TimerHandle | None = None
        self._loose_bytes = 0  # of what nothing else bounds: a head that is not whole, the sizes of chunks, trailers
        self._is_bounded = False  # whether the last bytes had more than such
        self._is_head = True
        self._refusal = 400, "This is no HTTP request."
        self._deadline: asyncio.TimerHandle | None = None
        self._set_deadline()
        if self.on_unix and not self._is_of_our_user(peer):
            self._refuse(403, f"This daemon serves user {os.geteuid()} only. Start your own.")
        elif len(self._beside()) >= self._limits.max_connections and not self._make_room():
            limit = self._limits.max_connections
            self._refuse(503, f"{limit} connections are open, and all of them work. Close or share one.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        self._drop_stall()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End it at once: the client takes no bytes."""
        self.transport.abort()

    @property
    def waits_since(self) -> float | None:
        """Since when it waits for its client, on the loop's clock: for a request or the rest of one, or until the
        client takes its answer. None if it does not wait."""
        unsent = self.transport.get_write_buffer_size() > 0
        if self.transport.is_closing() or self.flow.write_paused:
            return self._waits_since if unsent else None
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return None if is_answering or self.pipeline else self._waits_since

    def _beside(self) -> list[Connection]:
        """The other connections to the same address: each address has places of its own."""
        others = (each for each in self.connections if each is not self and isinstance(each, Connection))
        return [each for each in others if each.on_unix == self.on_unix]

    def _make_room(self) -> bool:
        """End the connection that has waited longest for its client, for this one."""
        waiting = [(since, id(each), each) for each in self._beside() if (since := each.waits_since) is not None]
        if waiting:
            min(waiting)[2].abort()
        return bool(waiting)

    # --- the answers that wait for the client

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waits_since = self.loop.time()
        self._time_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drop_stall()

    def _time_stall(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stalls = self.loop.call_later(self._limits.stall_timeout_s, self._look_for_stall, waiting)

    def _look_for_stall(self, waiting: int) -> None:
        """End the connection if its client has taken nothing since so many bytes waited."""
        if self.transport.get_write_buffer_size() < waiting:
            self._time_stall()
        else:
            self.abort()

    def _drop_stall(self) -> None:
        if self._stalls is not None:
            self._stalls.cancel()
            self._stalls = None

    def _is_of_our_user(self, peer: Any) -> bool:
        try:
            return self.config.find_peer_uid(peer) == os.geteuid()
        except OSError:
            return False

    # --- the head of a request

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_bounded = False
        self._feed(data)
        self._loose_bytes = 0 if self._is_bounded else self._loose_bytes + len(data)
        if self._loose_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refuse(*self._too_long())

    def _feed(self, data: bytes) -> None:
        """Parse bytes. A request that offers another protocol is parsed anew, without its offer: its first parser has
        taken what follows its head for the other protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            data = self._head_without_offer() + data[offer.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(*self._refusal)

    def _head_without_offer(self) -> bytes:
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode("ascii")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._is_head = True
        if self._deadline is None:
            self._set_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_head_bytes:
            self._refusal = self._too_long()
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head:
            return  # a trailer
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_headers:
            limit = self._limits.max_headers
            self._refusal = 431, f"The request has more than {limit} headers. Send fewer."
            raise _Refused
        if sum(len(name) + len(value) for name, value in self.headers) > self._limits.max_head_bytes:
            self._refusal = self._too_long()
            raise _Refused

    def on_headers_complete(self) -> None:
        self._is_bounded, self._is_head = True, False
        if self.parser.get_method() == b"CONNECT":
            self._refusal = 405, "This is no proxy. Ask for a path of this server."
            raise _Refused
        if (problem := self._contradiction()) is not None:
            self._refusal = 400, problem
            raise _Refused
        if self.parser.should_upgrade():
            return  # it is parsed anew
        if len(self.pipeline) >= self._limits.max_pipelined:
            limit = self._limits.max_pipelined
            self._refusal = 429, f"{limit} requests wait on this connection. Take their answers before you send more."
            raise _Refused
        self._drop_deadline()
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode("ascii"))]
        super().on_headers_complete()
        self.cycle.__class__ = _Cycle  # uvicorn lets nobody name another class; its task has not begun

    def _contradiction(self) -> str | None:
        """What a proxy before us may have read in another way; None in most heads."""
        hosts = [value.lower() for name, value in self.headers if name == b"host"]
        coded = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        named = _AUTHORITY.match(self.url)
        if len(hosts) > 1 or (named is not None and hosts not in ([], [named[1].lower()])):
            return "The request names two hosts. Name one."
        if coded not in ([], [b"chunked"]):
            return "The body has a Transfer-Encoding beside chunked. Send it as plain JSON."
        return None

    def on_body(self, body: bytes) -> None:
        self._is_bounded = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_bounded = True
        if not self.parser.should_upgrade():
            self._drop_deadline()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:
            self._waits_since = self.loop.time()
        if self.cycle.more_body and self._deadline is None:  # a body that no route waits for
            self._deadline = self.loop.call_later(self._limits.body_timeout_s, self.transport.close)
        super().on_response_complete()

    def _too_long(self) -> tuple[int, str]:
        return 431, f"The headers of the request have more than {self._limits.max_head_bytes} bytes. Send fewer."

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._loose_bytes:
            self._refuse(408, f"The headers of the request took more than {self._limits.head_timeout_s:g} s.")
        else:
            self.transport.close()

    # --- answers of its own

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is not, or not yet, a request, and close."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode("ascii") + b"connection: close\r\n\r\n" + body)
        self.transport.close()
