"""From a checked request to a call of the service, and from its answer to the map that crosses the wire.

Owns the one table from method name to call. Server half: it knows the daemon's records, through the `Backend` shape
that a service has, and so can be driven by a double. Does not know frames or sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ...daemon.api import results as daemon
from ...daemon.api.sampling import Sampling as DaemonSampling
from ...daemon.engine.admission import Priority
from ...daemon.engine.pieces import in_pieces
from ...daemon.events.events import Notice
from ...daemon.sessions.transcripts import OnDivergence
from ..wire import methods
from ..wire.methods import METHODS, Method, Params
from .wire_map import wire_map


class Events(Protocol):
    """What a service tells of itself until it ends; to be entered, and left. delivered, lost: how many so far."""

    delivered: int
    lost: int

    def __enter__(self) -> AsyncIterator[Notice]: ...

    def __exit__(self, *exc: object) -> None: ...


class Backend(Protocol):
    """What the server needs of a service; `torpor.daemon.service.Service` has this shape.

    Every call raises TorporError for expected failures. `emit` is called on the event loop. Cancelling the task that
    awaits append, generate or chat stops the work within one token and undoes nothing that was committed; that of one
    that awaits analyse stops it; that of one that awaits load_model gives up its wait for memory.
    """

    async def status(self) -> daemon.Status: ...

    async def create(
        self,
        *,
        session: str,
        model: str | None = None,
        labels: Sequence[str] = (),
        sampling: DaemonSampling | None = None,
        system: str | None = None,
    ) -> daemon.SessionInfo: ...

    async def append(
        self,
        *,
        session: str,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        create: bool = False,
        priority: Priority = "normal",
        emit: daemon.Emit,
    ) -> daemon.AppendResult: ...

    async def generate(
        self,
        *,
        session: str,
        max_tokens: int | None = None,
        text: str | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        emit: daemon.Emit,
    ) -> daemon.GenerateResult: ...

    async def chat(
        self,
        *,
        session: str,
        message: str | None = None,
        role: str = "user",
        messages: Sequence[Mapping[str, str]] | None = None,
        on_divergence: OnDivergence = "refuse",
        max_tokens: int | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        emit: daemon.Emit,
    ) -> daemon.GenerateResult: ...

    async def set(
        self, *, session: str, sampling: Mapping[str, float | int], emit: daemon.Emit
    ) -> daemon.SessionInfo: ...

    async def sleep(self, *, session: str, emit: daemon.Emit) -> daemon.SleepResult: ...

    async def wake(
        self,
        *,
        session: str,
        version: int | None = None,
        at_token: int | None = None,
        strict: bool = False,
        emit: daemon.Emit,
    ) -> daemon.WakeResult: ...

    async def plan_wake(
        self, *, session: str, version: int | None = None, at_token: int | None = None, strict: bool = False
    ) -> daemon.WakePlanResult: ...

    async def fork(
        self,
        *,
        session: str,
        name: str,
        at_token: int | None = None,
        labels: Sequence[str] | None = None,
        emit: daemon.Emit,
    ) -> daemon.ForkResult: ...

    async def load_model(self, *, model: str) -> daemon.ModelInfo: ...

    async def unload_model(self, *, model: str) -> daemon.ModelInfo: ...

    async def list_sessions(self, *, namespace: str | None = None) -> list[daemon.SessionInfo]: ...

    async def show(self, *, session: str) -> daemon.SessionDetail: ...

    async def fold(
        self,
        *,
        session: str,
        name: str,
        summary: str | None = None,
        summarise: int | None = None,
        tail: int = 0,
        labels: Sequence[str] | None = None,
        priority: Priority = "normal",
        emit: daemon.Emit,
    ) -> daemon.FoldResult: ...

    async def why(self, *, session: str) -> daemon.WhyResult: ...

    async def analyse(
        self, *, session: str, kind: str | None = None, labels: Sequence[str] | None = None, emit: daemon.Emit
    ) -> daemon.AnalysisResult: ...

    async def delete(self, *, session: str) -> daemon.DeleteResult: ...

    async def maintain(
        self,
        *,
        operation: str,
        session: str | None = None,
        dry_run: bool = False,
        keep_last: int | None = None,
        keep_days: float | None = None,
        cold_after_days: float | None = None,
        bits: int | None = None,
        after_days: float | None = None,
    ) -> daemon.MaintenanceResult: ...

    async def mark(
        self,
        *,
        session: str,
        tag: str | None = None,
        untag: str | None = None,
        pinned: bool | None = None,
        move: bool = False,
    ) -> daemon.MarksResult: ...

    async def import_bundle(self, *, bundle_id: str, session: str | None = None) -> daemon.SleepResult: ...

    async def stats(self, *, label: str | None = None, namespace: str | None = None) -> daemon.StatsResult: ...

    async def warm(
        self, *, sessions: Sequence[str] = (), label: str | None = None, namespace: str | None = None, emit: daemon.Emit
    ) -> daemon.WarmResult: ...

    async def clear(self, *, label: str, namespace: str | None = None, dry_run: bool = False) -> daemon.ClearResult: ...

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Events: ...

    async def prepare_close(self) -> daemon.CloseReport: ...


class ShutDown(Protocol):
    """Asks the process to stop, and returns what became of the sessions. Not the service's affair, so not a backend's.

    Raises StopRefused where a session cannot be put to sleep, unless with `force`.
    """

    async def __call__(self, *, force: bool) -> daemon.CloseReport: ...


Tell = Callable[[Notice], Awaitable[None]]


async def call(
    backend: Backend, shut_down: ShutDown, method: Method, params: Params, emit: daemon.Emit, tell: Tell
) -> dict[str, Any]:
    """Carry out a request and return its result's wire map. tell: sends an event of the daemon, at the client's pace.

    Raises:
        TorporError: whatever the service raises.
    """
    if isinstance(params, methods.ShutdownParams):
        result: object = await shut_down(force=params.force)
    elif isinstance(params, methods.SubscribeParams):
        result = await _subscribe(backend, params, tell)
    else:
        result = await _CALLS[method.name](backend, params, emit)
    return await in_pieces(wire_map(method.result, result))


def event_map(event: daemon.Event) -> dict[str, Any]:
    """Return the wire map of an event."""
    if isinstance(event, daemon.Token):
        return {"kind": "token", "token": event.token, "text": event.text}
    return {"kind": "progress", "stage": event.stage, "done": event.done, "total": event.total}


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


async def _subscribe(backend: Backend, params: methods.SubscribeParams, tell: Tell) -> object:
    events = backend.subscribe(names=params.names, session=params.session, namespace=params.namespace)
    with events as notices:
        async for notice in notices:
            await tell(notice)
    return {"delivered": events.delivered, "lost": events.lost}


async def _status(backend: Backend, params: methods.StatusParams, emit: daemon.Emit) -> object:
    return await backend.status()


async def _create(backend: Backend, params: methods.CreateParams, emit: daemon.Emit) -> object:
    return await backend.create(
        session=params.session,
        model=params.model,
        labels=params.labels,
        sampling=None if params.sampling is None else DaemonSampling().changed(params.sampling.named()),
        system=params.system,
    )


async def _append(backend: Backend, params: methods.AppendParams, emit: daemon.Emit) -> object:
    return await backend.append(
        session=params.session,
        text=params.text,
        tokens=params.tokens,
        create=params.create,
        priority=params.priority,
        emit=emit,
    )


async def _generate(backend: Backend, params: methods.GenerateParams, emit: daemon.Emit) -> object:
    return await backend.generate(
        session=params.session,
        max_tokens=params.max_tokens,
        text=params.text,
        sampling=_sampling(params.sampling),
        stop=params.stop,
        prove=params.prove,
        create=params.create,
        priority=params.priority,
        emit=emit,
    )


async def _chat(backend: Backend, params: methods.ChatParams, emit: daemon.Emit) -> object:
    return await backend.chat(
        session=params.session,
        message=params.message,
        role=params.role,
        messages=None if params.messages is None else [_message(each) for each in params.messages],
        on_divergence=params.on_divergence,
        max_tokens=params.max_tokens,
        sampling=_sampling(params.sampling),
        stop=params.stop,
        prove=params.prove,
        create=params.create,
        priority=params.priority,
        emit=emit,
    )


async def _set(backend: Backend, params: methods.SetParams, emit: daemon.Emit) -> object:
    return await backend.set(session=params.session, sampling=params.sampling.named(), emit=emit)


async def _sleep(backend: Backend, params: methods.SessionParams, emit: daemon.Emit) -> object:
    return await backend.sleep(session=params.session, emit=emit)


async def _wake(backend: Backend, params: methods.WakeParams, emit: daemon.Emit) -> object:
    return await backend.wake(
        session=params.session, version=params.version, at_token=params.at_token, strict=params.strict, emit=emit
    )


async def _plan_wake(backend: Backend, params: methods.WakeParams, emit: daemon.Emit) -> object:
    return await backend.plan_wake(
        session=params.session, version=params.version, at_token=params.at_token, strict=params.strict
    )


async def _fork(backend: Backend, params: methods.ForkParams, emit: daemon.Emit) -> object:
    return await backend.fork(
        session=params.session, name=params.name, at_token=params.at_token, labels=params.labels, emit=emit
    )


async def _load_model(backend: Backend, params: methods.ModelParams, emit: daemon.Emit) -> object:
    return await backend.load_model(model=params.model)


async def _unload_model(backend: Backend, params: methods.ModelParams, emit: daemon.Emit) -> object:
    return await backend.unload_model(model=params.model)


async def _stats(backend: Backend, params: methods.StatsParams, emit: daemon.Emit) -> object:
    return await backend.stats(label=params.label, namespace=params.namespace)


async def _warm(backend: Backend, params: methods.WarmParams, emit: daemon.Emit) -> object:
    return await backend.warm(sessions=params.sessions, label=params.label, namespace=params.namespace, emit=emit)


async def _clear(backend: Backend, params: methods.ClearParams, emit: daemon.Emit) -> object:
    return await backend.clear(label=params.label, namespace=params.namespace, dry_run=params.dry_run)


async def _list(backend: Backend, params: methods.ListParams, emit: daemon.Emit) -> object:
    return {"sessions": await backend.list_sessions(namespace=params.namespace)}


async def _show(backend: Backend, params: methods.SessionParams, emit: daemon.Emit) -> object:
    return await backend.show(session=params.session)


async def _fold(backend: Backend, params: methods.FoldParams, emit: daemon.Emit) -> object:
    return await backend.fold(
        session=params.session,
        name=params.name,
        summary=params.summary,
        summarise=params.summarise,
        tail=params.tail,
        labels=params.labels,
        priority=params.priority,
        emit=emit,
    )


async def _why(backend: Backend, params: methods.SessionParams, emit: daemon.Emit) -> object:
    return await backend.why(session=params.session)


async def _analyse(backend: Backend, params: methods.AnalyseParams, emit: daemon.Emit) -> object:
    return await backend.analyse(session=params.session, kind=params.kind, labels=params.labels, emit=emit)


async def _delete(backend: Backend, params: methods.SessionParams, emit: daemon.Emit) -> object:
    return await backend.delete(session=params.session)


async def _maintain(backend: Backend, params: methods.MaintainParams, emit: daemon.Emit) -> object:
    return await backend.maintain(
        operation=params.operation,
        session=params.session,
        dry_run=params.dry_run,
        keep_last=params.keep_last,
        keep_days=params.keep_days,
        cold_after_days=params.cold_after_days,
        bits=params.bits,
        after_days=params.after_days,
    )


async def _mark(backend: Backend, params: methods.MarkParams, emit: daemon.Emit) -> object:
    return await backend.mark(
        session=params.session, tag=params.tag, untag=params.untag, pinned=params.pinned, move=params.move
    )


async def _import_bundle(backend: Backend, params: methods.ImportParams, emit: daemon.Emit) -> object:
    return await backend.import_bundle(bundle_id=params.bundle_id, session=params.session)


_NOT_OF_THE_TABLE = frozenset({"shutdown", "subscribe"})
_Call = Callable[[Backend, Any, daemon.Emit], Awaitable[object]]
_CALLS: Mapping[str, _Call] = MappingProxyType(
    {
        "status": _status,
        "create": _create,
        "append": _append,
        "generate": _generate,
        "chat": _chat,
        "set": _set,
        "sleep": _sleep,
        "wake": _wake,
        "plan_wake": _plan_wake,
        "fork": _fork,
        "load_model": _load_model,
        "unload_model": _unload_model,
        "list": _list,
        "stats": _stats,
        "warm": _warm,
        "clear": _clear,
        "show": _show,
        "fold": _fold,
        "why": _why,
        "analyse": _analyse,
        "delete": _delete,
        "maintain": _maintain,
        "mark": _mark,
        "import_bundle": _import_bundle,
    }
)
assert _CALLS.keys() | _NOT_OF_THE_TABLE == METHODS.keys(), "every method of the protocol has exactly one call"


def _message(message: methods.Message) -> dict[str, str]:
    # There may be thousands, and `model_dump` of each would take the loop several times as long.
    return {"role": message.role, "content": message.content}


def _sampling(wire: methods.SamplingFields | None) -> dict[str, float | int] | None:
    return None if wire is None else wire.named()
