"""What a client has received of one request and not yet taken.

Owns its order and its bound. A request's own messages are as many as it asked for, and all are kept. A subscription
goes on for ever, so of its events only the newest are: in the place of those dropped stands one `lost` event that
counts them, as the daemon itself tells of those that it dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from ...daemon.api.events import NoticeEvent
from ..wire.messages import EventMessage, ServerMessage

MAX_WAITING_NOTICES: Final = 8192
"""Events of a subscription that wait in a client: some megabytes."""

LOST: Final = "lost"
"""The event that tells of dropped ones; its fact `count` is their number."""


class Inbox:
    """Messages about one request, in their order."""

    def __init__(self) -> None:
        self._messages: deque[ServerMessage] = deque()
        self._lost = 0
        self._last_lost: tuple[EventMessage, NoticeEvent] | None = None

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, message: ServerMessage) -> None:
        """Keep a message, and drop the oldest event of a subscription if too many wait."""
        self._messages.append(message)
        oldest = self._messages[0]
        if not isinstance(oldest, EventMessage) or not isinstance(oldest.event, NoticeEvent):
            return
        if len(self._messages) > MAX_WAITING_NOTICES:
            self._messages.popleft()
            self._lost += _told_by(oldest.event)
            self._last_lost = oldest, oldest.event

    def take(self) -> ServerMessage:
        """The oldest; where events were dropped before it, first the one that tells so. Not empty."""
        if self._last_lost is None:
            return self._messages.popleft()
        message, event = self._last_lost
        told = replace(event, name=LOST, request=None, session=None, facts={"count": self._lost})
        self._lost, self._last_lost = 0, None
        return message.model_copy(update={"event": told})


def _told_by(event: NoticeEvent) -> int:
    """How many events are dropped with this one."""
    count = event.facts.get("count")
    return count if event.name == LOST and isinstance(count, int) else 1
