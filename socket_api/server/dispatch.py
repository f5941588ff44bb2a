"""From a checked request to the service, and from its answer to the map on the wire.

Knows by name only the two verbs that are not the service's: the stop of the process, and the events until then. Server
half. Does not know frames or sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ...daemon.api.events import OnEvent, Reporting, SessionEvent, TokenEvent, WorkEvent
from ...daemon.api.process import ShutdownRequest, ShutdownResult, SubscribeRequest, SubscribeResult
from ...daemon.api.records import Request
from ...daemon.api.verb import R, Verb
from ...daemon.events.events import Notice
from ...daemon.events.figures import Figures
from ...daemon.tasks.cancellation import in_any_case
from ...daemon.tasks.pieces import in_pieces
from .wire_map import wire_map


class Events(Protocol):
    """The events of a service until it ends, as a context manager. delivered, lost: counts so far."""

    delivered: int
    lost: int

    def __enter__(self) -> AsyncIterator[Notice]: ...

    def __exit__(self, *exc: object) -> None: ...


class ResumableEvents(Events, Protocol):
    """Events that a reader may go on with on another connection."""

    @property
    def place(self) -> str: ...

    def id_of(self, notice: Notice) -> str | None: ...


class Backend(Protocol):
    """The service as the server sees it; `torpor.daemon.service.Service` has this shape.

    Every call raises TorporError for expected failures. A request's `on_event` is called on the event loop. To stop a
    cancellable verb, cancel the task that awaits it; committed work stays. figures: of its events, since it began.
    """

    @property
    def figures(self) -> Figures: ...

    async def ask(self, verb: Verb[Any, R], request: Request) -> R: ...

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Events: ...

    def resume(
        self, names: Sequence[str] | None, session: str | None, namespace: str | None, *, after: str | None
    ) -> ResumableEvents: ...

    async def prepare_close(self) -> ShutdownResult: ...


class ShutDown(Protocol):
    """Asks the process to stop, and returns the report on its sessions.

    Raises StopRefused if a session cannot be put to sleep, unless `force`.
    """

    async def __call__(self, *, force: bool) -> ShutdownResult: ...


Tell = Callable[[Notice], Awaitable[None]]


async def call(
    backend: Backend, shut_down: ShutDown, verb: Verb[Any, Any], request: Request, emit: OnEvent, tell: Tell
) -> dict[str, Any]:
    """Carry out a request, and return its result's wire map. tell: sends an event of the daemon, at the client's pace.
    Raises TorporError as the service does."""
    if isinstance(request, ShutdownRequest):
        result: Any = await shut_down(force=request.force)
    elif isinstance(request, SubscribeRequest):
        result = await _subscribe(backend, request, tell)
    else:
        if isinstance(request, Reporting):
            request = request.told_to(emit)
        result = await backend.ask(verb, request)
    # A cancellation comes too late: what was done is answered as done.
    return await in_any_case(in_pieces(wire_map(verb, result)))


def event_map(event: WorkEvent) -> dict[str, Any]:
    """Return the wire map of an event."""
    if isinstance(event, TokenEvent):
        told: dict[str, Any] = {"kind": "token", "token": event.token, "text": event.text}
        if event.channel != "text":
            told["channel"] = event.channel
        if event.call is not None:
            told["call"] = {"name": event.call.name, "arguments": event.call.arguments, "id": event.call.id}
        if event.logprobs is not None:
            told["logprobs"] = asdict(event.logprobs)
        if event.branch is not None:
            told["branch"] = event.branch
        return told
    if isinstance(event, SessionEvent):
        told = {"kind": "session", "session": event.session}
        return told | ({"recomputed_tokens": event.recomputed_tokens} if event.recomputed_tokens else {})
    told = {"kind": "progress", "stage": event.stage, "done": event.done, "total": event.total}
    return told if event.machine is None else told | {"machine": event.machine}


def notice_map(notice: Notice) -> dict[str, Any]:
    """Return the wire map of an event of the daemon."""
    event = notice.event
    return {
        "kind": "notice",
        "name": event.name,
        "number": notice.number,
        "monotonic_s": notice.monotonic_s,
        "time_ns": notice.time_ns,
        "request": notice.request,
        "session": None if event.session is None else str(event.session),
        "facts": event.facts(),
    }


async def _subscribe(backend: Backend, request: SubscribeRequest, tell: Tell) -> SubscribeResult:
    events = backend.subscribe(names=request.names, session=request.session, namespace=request.namespace)
    with events as notices:
        async for notice in notices:
            await tell(notice)
    return SubscribeResult(events.delivered, events.lost)
