"""Reaching a busy daemon: repeated connects when many clients come at once, and requests without an answer yet.

Owns the pauses, the number of attempts, and a request's inbox. Does not wait.
"""

from __future__ import annotations

import errno
import itertools
import math
import random
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ...daemon.api.events import NoticeEvent
from ..errors import RemoteError
from ..wire.asking import Call
from ..wire.messages import ErrorMessage, EventMessage, ServerMessage
from ..wire.peer import peer_uid, require_own_peer

if TYPE_CHECKING:
    import asyncio

CONNECT_TIMEOUT_S: Final = 30.0
"""To connect and be greeted: a daemon answers within milliseconds, in a crowd within seconds."""

MOST_REPEATS: Final = 40
"""How often in a row a request is sent again because the daemon had no place for it, and did not begin it."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25


@dataclass(slots=True)
class Unanswered:
    """A request that the daemon has not answered yet. owed_at: when to send it again (monotonic); infinity: never."""

    call: Call[Any]
    is_cancelled: bool = False
    refusals: int = 0
    owed_at: float = math.inf

    def is_put_off_by(self, message: ServerMessage) -> bool:
        """Whether to send it again after a pause: the daemon did not begin it, as this connection is in reserve. Counts
        these refusals."""
        if self.is_cancelled or not isinstance(message, ErrorMessage) or message.error.code != "daemon_busy":
            return False
        self.refusals += 1
        return self.refusals <= MOST_REPEATS


def pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt, without end; random, so that clients do not retry together."""
    for attempt in itertools.count():
        yield pause_s(attempt)


def pause_s(attempt: int) -> float:
    """Seconds to wait after this attempt; the first is 0."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)  # noqa: S311


def try_to_connect(path: str) -> socket.socket | None:
    """A connected, non-blocking socket; None if the listener's backlog is full.

    Raises:
        OSError: no process listens there, or we may not connect.
        PeerRefused: another user's process listens.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.connect(path)
        require_own_peer(connected, path, peer_uid)
    except OSError as error:
        connected.close()
        if error.errno == errno.EAGAIN:  # Linux: the backlog is full. A Unix socket is never "in progress"
            return None
        raise
    except BaseException:
        connected.close()
        raise
    return connected


def is_eviction(failure: BaseException | None) -> bool:
    """Whether the daemon closed a connection because it needed the place: it had begun no unanswered request."""
    return isinstance(failure, RemoteError) and failure.code == "connection_evicted"


def is_crowded(failure: BaseException) -> bool:
    """Whether a connection was refused because too many are open now."""
    return isinstance(failure, RemoteError) and failure.code in ("too_many_connections", "connection_evicted")


MAX_WAITING_NOTICES: Final = 8192
"""Events of a subscription that wait in a client: some megabytes."""

LOST: Final = "lost"
"""The event that reports dropped ones; its fact `count` is their number."""


class Inbox:
    """Messages about one request, in their order. news: set when there is a message, or the connection has ended."""

    def __init__(self) -> None:
        self.news: asyncio.Event | None = None
        self._messages: deque[ServerMessage] = deque()
        self._lost = 0
        self._last_lost: tuple[EventMessage, NoticeEvent] | None = None

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, message: ServerMessage) -> None:
        """Keep a message, and drop the oldest event of a subscription if too many wait."""
        self._messages.append(message)
        self.wake()
        oldest = self._messages[0]
        if not isinstance(oldest, EventMessage) or not isinstance(oldest.event, NoticeEvent):
            return
        if len(self._messages) > MAX_WAITING_NOTICES:
            self._messages.popleft()
            self._lost += _told_by(oldest.event)
            self._last_lost = oldest, oldest.event

    def wake(self) -> None:
        """Tell a task that waits that there is news."""
        if self.news is not None:
            self.news.set()

    def take(self) -> ServerMessage:
        """The oldest message; after dropped events, first the one that reports them. The inbox must not be empty."""
        if self._last_lost is None:
            return self._messages.popleft()
        message, event = self._last_lost
        told = replace(event, name=LOST, request=None, session=None, facts={"count": self._lost})
        self._lost, self._last_lost = 0, None
        return message.model_copy(update={"event": told})


def _told_by(event: NoticeEvent) -> int:
    """The number of events that this one stands for."""
    count = event.facts.get("count")
    return count if event.name == LOST and isinstance(count, int) else 1
