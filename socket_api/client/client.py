"""The synchronous client: the verbs of the daemon as blocking methods, from the table `DaemonVerbs`.

A thin shell: `link.py` owns the connection, `pieces.py` the answers, and `blocking.py` how a call waits. Imports no
MLX, no asyncio, and only the records of verbs from the daemon (tests/socket_api/test_imports.py).

Rules: nothing is ever sent twice. If a connection ends while a request is in flight, the daemon may or may not have
carried it out, and the caller is told so (`ConnectionLost`). A client is for one thread. Other requests may be made
while a stream is open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ...daemon.api.events import NoticeEvent, OnEvent, Reporting, ignore
from ...daemon.api.process import SubscribeRequest, SubscribeResult
from ...daemon.api.reading import ChatRequest, GenerateRequest, GenerateResult
from ...daemon.api.records import Request
from ...daemon.api.verb import Blocking, Opened, Verb
from ...daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs
from ..wire.address import default_socket_path
from ..wire.asking import Call, R, call_of
from ..wire.messages import HelloReply
from .blocking import blocking_link, wait
from .ensuring import ensure_daemon
from .link import DEFAULT_TIMEOUT_S, Link
from .pieces import Generation, Notices, Pieces, T, answered


def _stream(client: Client, request: GenerateRequest | ChatRequest) -> TextStream:
    verb = VERBS["chat" if isinstance(request, ChatRequest) else "generate"]
    return TextStream(client._link, client._call(verb, request), request.on_event)


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
        self._link = blocking_link(self.socket_path, timeout_s=timeout_s)

    @classmethod
    def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        models: Mapping[str, str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        on_event: OnEvent = ignore,
    ) -> Self:
        """Connect to the daemon on that socket. If none answers, start one in the background first, as `torpor ensure`
        does. store, config, models: for a daemon that is started; models are folders or hub names, by name. on_event:
        called with the progress of their download.

        Raises:
            DaemonNotStarted: with the reason; nothing is left running. Also where a daemon runs without these models.
        """
        socket = ensure_daemon(socket_path, store=store, config=config, models=models, on_event=on_event)
        return cls(socket, namespace=namespace, timeout_s=timeout_s)

    # --- asking

    stream_generate = Opened(GenerateRequest, _stream, "As `generate`, piece by piece.")
    stream_chat = Opened(ChatRequest, _stream, "As `chat`, piece by piece.")
    events = Opened(SubscribeRequest, _events)

    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send a request of the table of verbs; each method calls this with its record."""
        emit = request.emit if isinstance(request, Reporting) else ignore
        return wait(answered(self._link, self._call(verb, request), emit))

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
        wait(self._link.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Iterated(Pieces[T]):
    """Pieces for `for` and `with`."""

    def close(self) -> None:
        """End it; late events are dropped. A generation is cancelled if unfinished, and its end waited for: `result`
        may then hold the generated part. Idempotent."""
        wait(self._close())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        piece = wait(self._piece())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TextStream(_Iterated[str], Generation):
    """A generation as it happens: iterate for pieces of text, then read `result`.

    Use it as a context manager if you may leave it before its end (by `break` or an exception): the exit cancels an
    unfinished generation and waits for its end. Without one, a stream that is dropped unfinished asks the daemon to
    stop when it is collected (at once in CPython, later in other Pythons), and does not wait.
    """

    def __init__(self, link: Link, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        super().__init__(link, call, on_event)
        wait(self._begin())


class Subscription(_Iterated[NoticeEvent], Notices):
    """Iterate over the daemon's events. The end of `with`, or `close`, ends the subscription. Iteration waits while
    nothing happens, and stops when the daemon has stopped. Other requests can be made on the client between two
    events."""

    def __init__(self, link: Link, call: Call[SubscribeResult]) -> None:
        super().__init__(link, call)
        wait(self._begin())
