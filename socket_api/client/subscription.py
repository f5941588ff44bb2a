"""The events of the daemon for a client: a subscription that goes on until it is closed or the daemon stops.

Owns the two iterators, blocking and asynchronous; the clients make them.
"""

from __future__ import annotations

from typing import Self

from ...daemon.api.events import NoticeEvent
from ...daemon.api.process import SubscribeResult
from ..errors import LocalProtocolError
from ..wire.asking import Call, remote_error
from ..wire.messages import ErrorMessage, EventMessage, ResultMessage, ServerMessage
from .alink import AsyncLink
from .link import Link


class _Ending:
    """The end of a subscription."""

    def __init__(self, call: Call[SubscribeResult]) -> None:
        self._call = call
        self._ended = False
        self._result: SubscribeResult | None = None

    @property
    def result(self) -> SubscribeResult:
        """The result, once the daemon has stopped. Raises LocalProtocolError before."""
        if self._result is None:
            raise LocalProtocolError("This subscription has not ended with its daemon.")
        return self._result

    def _take(self, message: ServerMessage) -> NoticeEvent | None:
        """The event in a message; None for the last message."""
        if isinstance(message, EventMessage) and isinstance(message.event, NoticeEvent):
            return message.event
        self._ended = True
        if isinstance(message, ErrorMessage):
            raise remote_error(message.error)
        assert isinstance(message, ResultMessage)
        self._result = self._call.load_result(message.result)
        return None


class Subscription(_Ending):
    """Iterate over the daemon's events. The end of `with`, or `close`, ends the subscription. Iteration waits while
    nothing happens, and stops when the daemon has stopped. Other requests can be made on the client between two
    events."""

    def __init__(self, link: Link, call: Call[SubscribeResult]) -> None:
        super().__init__(call)
        self._link = link
        self._ended = True  # until a request has begun, a finaliser has nothing to stop
        self._id = link.begin(call)
        self._ended = False
        try:
            self.first = self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it; late events are dropped. Idempotent."""
        self._ended = True
        self._link.abandon(self._id)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoticeEvent:
        if self._ended or (event := self._next()) is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._link.drop(self._id)

    def _next(self) -> NoticeEvent | None:
        return self._take(self._link.wait_for(self._id, silence_is_fine=True))


class AsyncSubscription(_Ending):
    """As `Subscription`, for `async with` and `async for`; it begins when first entered or iterated."""

    def __init__(self, link: AsyncLink, call: Call[SubscribeResult]) -> None:
        super().__init__(call)
        self._link = link
        self._id: int | None = None
        self.first: NoticeEvent | None = None

    async def close(self) -> None:
        """End it; late events are dropped. Idempotent."""
        self._ended = True
        if self._id is not None:
            self._link.abandon(self._id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NoticeEvent:
        await self._begin()
        if self._ended or (event := await self._next()) is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and self._id is not None:
            self._link.drop(self._id)

    async def _begin(self) -> None:
        if self._id is None and not self._ended:
            self._id = self._link.begin(self._call)
            try:
                await self._link.flush()
                self.first = await self._next()
            except BaseException:
                await self.close()
                raise

    async def _next(self) -> NoticeEvent | None:
        assert self._id is not None
        return self._take(await self._link.wait_for(self._id, silence_is_fine=True))
