"""A proxy on loopback between a client of an object store and the store, which does wrong what a plan says.

    with FaultProxy(server_port) as proxy:
        proxy.plan = {3: "lost"}                                # the fourth request lands, and its answer is lost
        proxy.plan = dict.fromkeys(range(5, 9), "error_503")    # a storm
        proxy.plan = insisting(3, "cut_before")                 # and each time that the client tries it again
        proxy.plan = lambda asked: "slow" if asked.method == "GET" else None

Requests are counted from 0 as they arrive, whatever connection they come by; `asked` keeps them. What hangs ("silent",
"late", "stalled") does so until the client goes away or the proxy is closed.
"""

from __future__ import annotations

import http.client
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Literal

from torpor.tests.memvid.remote.loopback import Loopback

Fault = Literal[
    "cut_before",  # the connection ends before anything goes on to the server
    "cut_in_request",  # half of the body goes on, and then both connections end
    "lost",  # the server has done it; the connection ends without an answer
    "cut_in_answer",  # half of the answer's body comes
    "silent",  # nothing goes on, and no answer comes
    "late",  # the server has done it, and no answer comes
    "stalled",  # half of the answer's body comes, and then nothing
    "slow",  # the answer's body comes in small pieces
    "error_500",  # an answer of the proxy's own; nothing goes on
    "error_503",
    "error_403",
    "conflict",  # 409, as S3 says it of two writes that met
    "landed_500",  # the server has done it, and the client is told of a failure
    "flipped",  # a bit of the answer's body is another
    "flipped_request",  # a bit of the request's body is another
    "swapped",  # the answer is that to another read
    "replayed",  # the answer is the first one that was ever given to this question: an old object, an old listing
]
FAULTS: Final[tuple[Fault, ...]] = Fault.__args__
HANGING: Final = ("silent", "late", "stalled")

_OWN: Final = {
    "error_500": (500, "InternalError"),
    "error_503": (503, "SlowDown"),
    "error_403": (403, "AccessDenied"),
    "conflict": (409, "ConditionalRequestConflict"),
    "landed_500": (500, "InternalError"),
}
_PIECES: Final = 16
_PIECE_S: Final = 0.005
_HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
_TIMEOUT_S: Final = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. target: path and query; span: its Range, or empty."""

    number: int
    method: str
    target: str
    span: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Plan = Mapping[int, Fault] | Callable[[Asked], Fault | None]


def insisting(number: int, fault: Fault) -> Callable[[Asked], Fault | None]:
    """A plan: the fault meets one request, and each later one that asks for the same."""
    met: list[tuple[str, str, str]] = []

    def plan(asked: Asked) -> Fault | None:
        question = (asked.method, asked.target, asked.span)
        if asked.number == number:
            met.append(question)
        return fault if question in met else None

    return plan


class FaultProxy(Loopback):
    """Between clients and the server at a port of loopback, until it is closed."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.plan: Plan = {}
        self.asked: list[Asked] = []
        self.closing = threading.Event()
        self._first: dict[tuple[str, str, str], _Answer] = {}
        self._reads: dict[tuple[str, str, str], _Answer] = {}
        self._lock = threading.Lock()
        super().__init__(type("Handler", (_Handler,), {"proxy": self}))
        self._server.handle_error = lambda *args: None  # a client that went away is what this is for

    def __exit__(self, *exc_info: object) -> None:
        self.closing.set()
        super().__exit__(*exc_info)

    def fault_of(self, method: str, target: str, span: str, size_bytes: int) -> tuple[Asked, Fault | None]:
        with self._lock:
            asked = Asked(len(self.asked), method, target, span, size_bytes)
            self.asked.append(asked)
            return asked, self.plan(asked) if callable(self.plan) else self.plan.get(asked.number)

    def another(self, asked: Asked, answer: _Answer, fault: Fault | None) -> _Answer:
        """The answer that goes to the client, whole."""
        question = (asked.method, asked.target, asked.span)
        with self._lock:
            first = self._first.setdefault(question, answer)
            others = [each for key, each in self._reads.items() if key[0] == asked.method and key[1:] != question[1:]]
            if asked.method == "GET" and answer.status < 300:
                self._reads[question] = answer
        if fault == "replayed":
            return first
        if fault == "swapped" and others:
            return others[0]
        if fault == "flipped":
            return _Answer(answer.status, answer.headers, _flipped(answer.body))
        if fault == "landed_500":
            return _own(fault)
        return answer


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :] if data else data


def _own(fault: Fault) -> _Answer:
    status, code = _OWN[fault]
    body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    return _Answer(status, [("Content-Type", "application/xml")], body)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small body waits for the client to have acknowledged the headers

    def log_message(self, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked, fault = self.proxy.fault_of(self.command, self.path, self.headers.get("Range", ""), len(body))
        if fault == "cut_before":
            return self._cut()
        if fault == "silent":
            return self._hang()
        if fault == "cut_in_request":
            self._send_half(body)
            return self._cut()
        if fault in _OWN and fault != "landed_500":
            return self._answer(_own(fault))
        if fault == "flipped_request":
            body = _flipped(body)
        answer = self.proxy.another(asked, self._asked_of_server(body), fault)
        if fault == "lost":
            return self._cut()
        if fault == "late":
            return self._hang()
        return self._answer(answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 - the names of HTTP

    def _asked_of_server(self, body: bytes) -> _Answer:
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.server_port, timeout=_TIMEOUT_S)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body or None)
            answer = server.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            if self.command == "HEAD":
                headers += [(name, value) for name, value in answer.getheaders() if name.lower() == "content-length"]
            return _Answer(answer.status, headers, answer.read())
        finally:
            server.close()

    def _send_half(self, body: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.proxy.server_port), timeout=_TIMEOUT_S) as server:
            lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {of}" for name, of in self.headers.items())]
            server.sendall("\r\n".join([*lines, "", ""]).encode() + body[: len(body) // 2])

    def _answer(self, answer: _Answer, fault: Fault | None = None) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        half = len(answer.body) // 2
        if fault in ("cut_in_answer", "stalled"):
            self.wfile.write(answer.body[:half])
            self.wfile.flush()
            self._cut() if fault == "cut_in_answer" else self._hang()
        elif fault == "slow":
            step = max(1, -(-len(answer.body) // _PIECES))
            for first in range(0, len(answer.body), step):
                self.wfile.write(answer.body[first : first + step])
                self.wfile.flush()
                self.proxy.closing.wait(_PIECE_S)
        else:
            self.wfile.write(answer.body)

    def _cut(self) -> None:
        """The connection ends at once."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _hang(self) -> None:
        """Until the client goes away."""
        self.close_connection = True
        while not self.proxy.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return
