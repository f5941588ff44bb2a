"""How both clients handle received messages: the answer to a request, and a generation in progress.

Does not wait.
"""

from __future__ import annotations

from typing import Any

from ...daemon.api.events import NoticeEvent, OnEvent, TokenEvent
from ...daemon.api.reading import GenerateResult
from ..errors import LocalProtocolError
from ..wire.asking import Call, R, remote_error
from ..wire.messages import ErrorMessage, EventMessage, ResultMessage, ServerMessage
from .alink import AsyncLink
from .link import Link


def answer_in(message: ServerMessage, call: Call[R], emit: OnEvent) -> R | None:
    """The answer in a message; None for an event, which is emitted. Raises RemoteError for a failure."""
    if isinstance(message, EventMessage):
        if not isinstance(message.event, NoticeEvent):
            emit(message.event)
        return None
    if isinstance(message, ResultMessage):
        return call.load_result(message.result)
    assert isinstance(message, ErrorMessage)
    raise remote_error(message.error)


class Generation:
    """The state of a generation."""

    def __init__(self, link: Link | AsyncLink, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        self._link = link
        self._call = call
        self._on_event = on_event
        self._result: GenerateResult | None = None
        self._id: int | None = None
        self._ended = False
        self._cancelled = False
        self._committed: dict[str, Any] = {}

    @property
    def result(self) -> GenerateResult:
        """The whole generation, once the stream has ended.

        Raises:
            LocalProtocolError: it has not ended, or was cancelled before it had a result. The details then tell the
                work that stays, if any (docs/reference/protocol.md, `cancelled`).
        """
        if self._result is None:
            raise LocalProtocolError(
                "This stream was cancelled before it had a result."
                if self._ended
                else "This stream has not ended. Iterate to its end, or call cancel and iterate on.",
                **self._committed,
            )
        return self._result

    def cancel(self) -> None:
        """Ask the daemon to stop. Iterate on until it has: a few more pieces may come. Idempotent."""
        if self._ended or self._cancelled:
            return
        self._cancelled = True
        if self._id is None:
            self._ended = True
        else:
            self._link.cancel(self._id)

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and self._id is not None:  # else there is nothing to stop
            self._link.drop(self._id)

    def _take(self, message: ServerMessage) -> str:
        """The piece of text in a message, if any. Raises RemoteError for a failure other than our own cancel."""
        if isinstance(message, EventMessage):
            if self._on_event is not None and not isinstance(message.event, NoticeEvent):
                self._on_event(message.event)
            event = message.event
            return event.text if isinstance(event, TokenEvent) and event.channel == "text" else ""
        self._end()
        if isinstance(message, ResultMessage):
            self._result = self._call.load_result(message.result)
        elif isinstance(message, ErrorMessage):
            if not (self._cancelled and message.error.code == "cancelled"):
                raise remote_error(message.error)
            self._committed = message.error.details
        return ""

    def _end(self) -> None:
        self._ended = True
        if self._id is not None:
            self._link.abandon(self._id)
