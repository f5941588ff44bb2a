"""An answer and how it comes: at once, or piece by piece, as a generation and the daemon's events do.

Written once, as coroutines over a link; `client.py` and `aclient.py` give them the manners of their iterators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from ...daemon.api.events import NoticeEvent, OnEvent, TokenEvent
from ...daemon.api.process import SubscribeResult
from ...daemon.api.reading import GenerateResult
from ..errors import ApiError, LocalProtocolError
from ..wire.asking import Call, R, remote_error
from ..wire.messages import ErrorMessage, EventMessage, ResultMessage, ServerMessage
from .link import Link

T = TypeVar("T")


async def answered(link: Link, call: Call[R], emit: OnEvent) -> R:
    """Send a request, and wait for its answer; the events before it are emitted."""
    request_id = await link.begin(call)
    try:
        while (answer := answer_in(await link.wait_for(request_id), call, emit)) is None:
            pass
        return answer
    finally:
        link.abandon(request_id)


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


class Pieces(ABC, Generic[T]):
    """An answer that comes piece by piece, and is asked for once."""

    def __init__(self, link: Link, call: Call[Any]) -> None:
        self._link = link
        self._call = call
        self._id: int | None = None
        self._ended = False

    async def _begin(self) -> None:
        """Ask for it, unless that is done."""
        if self._id is None and not self._ended:
            self._id = await self._link.begin(self._call)

    @abstractmethod
    async def _piece(self) -> T | None:
        """Wait for the next piece; None: it has ended."""

    @abstractmethod
    async def _close(self) -> None:
        """End it, and stop the daemon's work for it. Idempotent."""

    def _end(self) -> None:
        self._ended = True
        if self._id is not None:
            self._link.abandon(self._id)

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and self._id is not None:  # else there is nothing to stop
            self._link.drop(self._id)


class Generation(Pieces[str]):
    """The text of a generation."""

    def __init__(self, link: Link, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        super().__init__(link, call)
        self._on_event = on_event
        self._result: GenerateResult | None = None
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

    async def _piece(self) -> str | None:
        while not self._ended:
            if piece := self._take(await self._message()):
                return piece
        return None

    async def _message(self) -> ServerMessage:
        try:
            await self._begin()
            assert self._id is not None, "a stream that has not ended has begun"
            return await self._link.wait_for(self._id)
        except KeyboardInterrupt:
            raise  # it may be iterated on
        except BaseException:
            self._end()  # also when a task is cancelled while it waits: the daemon stops with its reader
            raise

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

    async def _close(self) -> None:
        """Cancel if unfinished, and wait for the end."""
        if self._ended:
            return
        try:
            self.cancel()
            while await self._piece() is not None:
                pass
        except ApiError:
            pass  # the generation is over either way, and the caller did not wait for its failure
        finally:
            self._end()


class Notices(Pieces[NoticeEvent]):
    """The daemon's events. It goes on until it is closed or the daemon stops. first: the event that it began with."""

    def __init__(self, link: Link, call: Call[SubscribeResult]) -> None:
        super().__init__(link, call)
        self.first: NoticeEvent | None = None
        self._result: SubscribeResult | None = None

    @property
    def result(self) -> SubscribeResult:
        """The result, once the daemon has stopped. Raises LocalProtocolError before."""
        if self._result is None:
            raise LocalProtocolError("This subscription has not ended with its daemon.")
        return self._result

    async def _begin(self) -> None:
        if self._id is not None:
            return
        await super()._begin()
        try:
            self.first = await self._next()
        except BaseException:
            self._end()
            raise

    async def _piece(self) -> NoticeEvent | None:
        await self._begin()
        return await self._next()

    async def _next(self) -> NoticeEvent | None:
        if self._ended or self._id is None:
            return None
        message = await self._link.wait_for(self._id, silence_is_fine=True)
        if isinstance(message, EventMessage) and isinstance(message.event, NoticeEvent):
            return message.event
        self._ended = True
        if isinstance(message, ErrorMessage):
            raise remote_error(message.error)
        assert isinstance(message, ResultMessage)
        self._result = self._call.load_result(message.result)
        return None

    async def _close(self) -> None:
        self._end()
