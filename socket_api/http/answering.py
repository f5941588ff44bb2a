"""The answer of a model, whole or as a stream of server-sent events.

A stream begins once the request is known to fit, its session is chosen, and nothing has refused it for a moment: until
then an error has its own HTTP status. Behind that it is an event. A stream with nothing to tell sends an empty event by
a clock, and begins by that clock, too: clients give up after minutes of silence, and some do not count comments. A
stream that begins before its session is chosen names none.

Owns the pace: tokens come from a generation that cannot wait, so a client that takes too few of them is dropped, and
its request cancelled (threat 44).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Send

from ...daemon.api.conversing import MeasureResult
from ...daemon.api.events import ProgressEvent, SessionEvent, TokenEvent, WorkEvent
from ...errors import TorporError
from ..errors import InternalError
from .errors import told_to
from .requests import IGNORED_HEADER, ClientLeft, has_left, told_names
from .routing import EventStream
from .telling import Telling
from .turns import SESSION_HEADER, Answered, Asked, Turn, measure, name_for
from .work import desk_of

_LOG = logging.getLogger(__name__)
_EVENT_BYTES = 256
"""Of an event around its text, about."""


@dataclass(frozen=True, slots=True)
class Order:
    """All that is kept of a request for an answer. ignored: the names of fields that had no effect. echoed: the fields
    that the answer repeats."""

    asked: Asked
    telling: Telling
    streamed: bool
    ignored: str
    echoed: Mapping[str, Any] = field(default_factory=dict)


async def answer(request: Request, send: Send, order: Order) -> None:
    """Let a model answer.

    Raises:
        ClientLeft: nothing was sent, and the request was cancelled.
        TorporError: nothing was sent.
    """
    exchange = _Exchange(request, send, order)
    await exchange.prepare()
    await (exchange.stream() if order.streamed else exchange.whole())


async def measured(request: Request, turn: Turn) -> MeasureResult:
    """The tokens of a turn before its answer. Raises ClientLeft, and as `measure` of the service."""
    desk = desk_of(request)
    model = turn.model or await desk.default_model()
    turn, name = turn.under(request.headers), turn.session or name_for(request.headers, turn.named)
    work = measure(desk.backend, request.state.caller, turn, name.text, model)
    return await desk.works.settle(desk.works.begin(work, cancellable=True), request.receive)


class _Exchange:
    def __init__(self, request: Request, send: Send, order: Order) -> None:
        self._desk = desk_of(request)
        self._request = request
        self._send = send
        self._telling = order.telling
        self._streamed = order.streamed
        self._ignored = order.ignored
        self._events: deque[WorkEvent] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._opened = False
        self._sent = EventStream(request, send)
        self._quiet_since = time.monotonic()
        self._asked = order.asked

    async def prepare(self) -> None:
        """Choose the names of the session and the model."""
        model = self._asked.model or await self._desk.default_model()
        caller = self._request.state.caller
        self._asking = self._asked.asking(self._desk.backend, caller, self._request.headers, model, self._take)
        self._telling.asking = self._asking

    async def whole(self) -> None:
        """Answer when the model has ended."""
        works = self._desk.works
        answered = await works.settle(works.begin(self._asking.answer(), cancellable=True), self._request.receive)
        self._count(answered)
        body = JSONResponse(dict(self._telling.whole(answered)), headers=self._headers())
        await body(self._request.scope, self._request.receive, self._send)

    async def stream(self) -> None:
        """Tell each event when it comes."""
        works = self._desk.works
        work = works.begin(self._asking.answer(), cancellable=True)
        leaving = asyncio.create_task(has_left(self._request.receive))
        for each in (work, leaving):
            each.add_done_callback(lambda _: self._wake.set())
        try:
            await self._tell_until_end(work, leaving)
            answered = works.result_of(work)
            self._count(answered)
            await self._tell(self._opening() + self._telling.closing(answered), last=True)
        except ClientLeft:
            if not self._sent.begun:
                raise
        except TorporError as error:
            if not self._sent.begun:
                raise
            await self._tell_failure(error)
        except Exception as error:
            if not self._sent.begun:
                raise
            _LOG.error("fault in a stream", exc_info=error)
            problem = f"The answer failed by a fault of the daemon ({type(error).__name__}). See its log."
            await self._tell_failure(InternalError(problem))
        finally:
            leaving.cancel()
            await works.give_up(work)

    async def _tell_until_end(self, work: asyncio.Task[Answered], leaving: asyncio.Task[None]) -> None:
        """Tell events until the work has ended. Raises ClientLeft."""
        while self._events or not work.done():
            self._wake.clear()
            if not (self._events or work.done() or leaving.done()):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._due_in_s()):
                        await self._wake.wait()
            if leaving.done():
                raise ClientLeft
            events = self._taken_events()
            if not events and not work.done() and self._due_in_s() <= 0:
                events = self._opening() or self._telling.silence()
            if events:
                await self._tell(events)

    def _due_in_s(self) -> float:
        """When an event is due at the latest. Not all that happens is told: a long reading may be silent."""
        limits, fits = self._desk.limits, self._asking.measured is not None and self._asking.chosen is not None
        pause_s = limits.first_event_s if fits and not self._sent.begun else limits.silence_s
        return self._quiet_since + pause_s - time.monotonic()

    def _taken_events(self) -> bytes:
        """What is told of the events that have come; often nothing."""
        events = bytearray()
        while self._events:
            event = self._events.popleft()
            if isinstance(event, TokenEvent):
                events += self._opening() + self._telling.token(event)
            elif isinstance(event, ProgressEvent) and event.stage == "prefill":
                # A wake may come before; only behind it is the dialogue measured.
                events += self._opening() + self._telling.progress(event)
        self._waiting_bytes = 0
        return bytes(events)

    def _opening(self) -> bytes:
        """The first events, unless they were told."""
        if self._opened:
            return b""
        self._opened = True
        return self._telling.opening()

    def _take(self, event: WorkEvent) -> None:
        if isinstance(event, TokenEvent) and event.channel == "reasoning" and event.token is not None:
            self._telling.reasoning_tokens += 1
        if isinstance(event, SessionEvent):
            self._asking.chosen, self._quiet_since = event.session, time.monotonic()
            self._asking.recomputed_tokens = event.recomputed_tokens
            self._wake.set()
            return
        if not self._streamed:
            if isinstance(event, TokenEvent):
                self._telling.note(event)
            return
        if isinstance(event, TokenEvent):
            likelihoods = 0 if event.logprobs is None else 1 + len(event.logprobs.top)
            self._waiting_bytes += len(event.text) * 4 + _EVENT_BYTES * (1 + likelihoods)
            if self._waiting_bytes > self._desk.limits.max_waiting_event_bytes:
                self._sent.drop()
        self._events.append(event)
        self._wake.set()

    async def _tell(self, events: bytes, *, last: bool = False) -> None:
        """Send events, with the answer's head before the first. Raises ClientLeft: the client takes no bytes."""
        await self._sent.tell(events, self._headers(), last=last)
        self._quiet_since = time.monotonic()

    async def _tell_failure(self, error: TorporError) -> None:
        try:
            await self._tell(self._telling.failure(told_to(self._request.state.caller, error)), last=True)
        except ClientLeft:
            _LOG.info("a client left before it was told of %s", error.code)

    def _headers(self) -> dict[str, str]:
        headers = {SESSION_HEADER: self._asking.chosen} if self._asking.chosen is not None else {}
        unheld = self._asking.measured.unheld if self._asking.measured is not None else ()
        ignored = [self._ignored] * bool(self._ignored) + [f"tools.{name}.strict" for name in told_names(unheld)]
        return headers | ({IGNORED_HEADER: ", ".join(ignored)} if ignored else {})

    def _count(self, answered: Answered) -> None:
        tokens = self._desk.counters.tokens
        tokens.labels(answered.model, "reused").inc(answered.cached_tokens)
        tokens.labels(answered.model, "read").inc(answered.computed_tokens)
        tokens.labels(answered.model, "recomputed").inc(answered.recomputed_tokens)
        tokens.labels(answered.model, "written").inc(len(answered.result.tokens))
