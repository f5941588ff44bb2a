"""The synchronous client: the verbs of the daemon as blocking methods, from the table `DaemonVerbs`.

Owns the sending of a verb and the stream of a generation; `link.py` owns the connection. Imports no MLX, and only the
records of verbs from the daemon (tests/socket_api/test_imports.py).

Rules: nothing is ever sent twice. If a connection ends while a request is in flight, the daemon may or may not have
carried it out, and the caller is told so (`ConnectionLost`). A client is for one thread. Other requests may be made
while a stream is open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from ...daemon.api.events import OnEvent, Reporting, ignore
from ...daemon.api.process import SubscribeRequest
from ...daemon.api.reading import ChatRequest, GenerateRequest, GenerateResult
from ...daemon.api.records import Request
from ...daemon.api.verb import Blocking, Opened, Verb
from ...daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs
from ..errors import ApiError
from ..wire.address import default_socket_path
from ..wire.asking import Call, R, call_of
from ..wire.messages import HelloReply, ServerMessage
from .ensuring import ensure_daemon
from .generating import Generation, answer_in
from .link import DEFAULT_TIMEOUT_S, Link
from .subscription import Subscription


def _stream_generate(client: Client, request: GenerateRequest) -> TextStream:
    return TextStream(client._link, client._call(VERBS["generate"], request), request.on_event)


def _stream_chat(client: Client, request: ChatRequest) -> TextStream:
    return TextStream(client._link, client._call(VERBS["chat"], request), request.on_event)


def _events(client: Client, request: SubscribeRequest) -> Subscription:
    return Subscription(client._link, client._call(SUBSCRIBE, request))


class Client(DaemonVerbs, Blocking):
    """A connection to the daemon.

    Args:
        socket_path: as the daemon was told; the default is `default_socket_path()`.
        namespace: bare names are names in it, and lists, figures, events and labels are about its sessions. None: bare
        names are in `default`, and lists are about all sessions.
        timeout_s: the longest time without a message about a request; None waits forever.

    Raises:
        DaemonUnreachable: no daemon answers there.
        RemoteError: the daemon refused the connection (`code` says why).
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.socket_path = Path(default_socket_path() if socket_path is None else socket_path)
        self.namespace = namespace
        self._link = Link(self.socket_path, timeout_s=timeout_s)

    @classmethod
    def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Connect to the daemon on that socket. If none answers, start one in the background first, as `torpor ensure`
        does. store, config: for a daemon that is started.

        Raises:
            DaemonNotStarted: with the reason; nothing is left running.
        """
        socket = ensure_daemon(socket_path, store=store, config=config)
        return cls(socket, namespace=namespace, timeout_s=timeout_s)

    # --- asking

    stream_generate = Opened(GenerateRequest, _stream_generate, "As `generate`, piece by piece.")
    stream_chat = Opened(ChatRequest, _stream_chat, "As `chat`, piece by piece.")
    events = Opened(SubscribeRequest, _events)

    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send a request of the table of verbs; each method calls this with its record."""
        call = self._call(verb, request)
        emit = request.emit if isinstance(request, Reporting) else ignore
        request_id = self._link.begin(call)
        try:
            while (answer := answer_in(self._link.wait_for(request_id), call, emit)) is None:
                pass
            return answer
        finally:
            self._link.abandon(request_id)

    def _call(self, verb: Verb[Any, R], request: Request) -> Call[R]:
        """The message of a request: checked, and with names in this client's namespace."""
        return call_of(verb, request, self.namespace)

    # --- life

    @property
    def peer_pid(self) -> int | None:
        """The process that this client is connected to, by the kernel; None if it does not tell."""
        return self._link.peer_pid

    @property
    def hello(self) -> HelloReply:
        """The daemon's greeting at the start of the connection."""
        return self._link.hello

    def close(self) -> None:
        """Close the connection; the daemon stops its generations. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TextStream(Generation):
    """A generation as it happens: iterate for pieces of text, then read `result`.

    Use it as a context manager if you may leave it before its end (by `break` or an exception): the exit cancels an
    unfinished generation and waits for its end. Without one, a stream that is dropped unfinished asks the daemon to
    stop when it is collected (at once in CPython, later in other Pythons), and does not wait.
    """

    _link: Link

    def __init__(self, link: Link, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        super().__init__(link, call, on_event)
        self._id: int = link.begin(call)

    def close(self) -> None:
        """Cancel if unfinished, and wait for the end. `result` may then hold the generated part. Idempotent."""
        if self._ended:
            return
        try:
            self.cancel()
            for _ in self:
                pass
        except ApiError:
            pass  # the generation is over either way, and the caller did not wait for its failure
        finally:
            self._end()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            if piece := self._take(self._wait()):
                return piece
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self) -> ServerMessage:
        try:
            return self._link.wait_for(self._id)
        except ApiError:
            self._end()
            raise
