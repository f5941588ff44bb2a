"""The daemon as a whole: its models, its memory, what it tells of itself, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from pydantic import Field

from .limits import MAX_EVENT_NAME_CHARS, MAX_EVENT_NAMES
from .records import Count, Listed, ModelName, ProcessId, Request, Result, Seconds, SessionText


@dataclass(frozen=True, slots=True)
class ModelInfo(Result):
    """A model that is served. resident: whether it is loaded; what only a load tells is None before the first.

    adapter: as its identity has it. loading: whether a load is under way; loads: how many there were. ttl_s: after how
    many seconds without use it is unloaded; weights_bytes: the memory that it takes now; sessions_awake: how many are
    on it. idle_s: how long it has not been used. problem: why it could not be loaded when that was last tried.
    changed: the parts that its files say otherwise than when they were loaded.
    """

    name: str
    path: str
    identity: str | None
    compute_dtype: str | None
    parameters: Count | None
    resident: bool
    context_tokens: Count | None
    adapter: str | None = "none"
    loading: bool = False
    pinned: bool = False
    ttl_s: Seconds | None = None
    weights_bytes: Count = 0
    sessions_awake: Count = 0
    loads: Count = 0
    idle_s: Seconds = 0.0
    problem: str | None = None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryInfo(Result):
    """What models and sessions take of the memory budget.

    sessions_bytes: what sessions took when they were last let go of; reserved_bytes: what requests under way may take
        beyond. waiting: requests that wait for memory. slept_by_pressure, slept_by_idling: how often a session has gone
        to sleep to make room, and because it was not used, since the daemon began.
    """

    budget_bytes: Count
    weights_bytes: Count
    sessions_bytes: Count
    reserved_bytes: Count
    waiting: Count
    slept_by_pressure: Count
    slept_by_idling: Count


@dataclass(frozen=True, slots=True)
class QueueInfo(Result):
    """Requests that want the engine or memory, and neither read nor write at the moment: they wait for a turn, memory
    or the engine, or have just come. background: how many of them stand back. limit: how many may wait."""

    waiting: Count
    background: Count
    limit: Count


@dataclass(frozen=True, slots=True)
class ScrubInfo(Result):
    """What the idle scrub did since the daemon began: sessions that it read, bytes of them, how many of them had
    damage; of those, and of what shares their blocks, how many were computed again (`healed`) and how many could not
    be. last_ns: when it last read a session, in this run or an earlier one; None for never."""

    bytes_per_s: Count
    sessions: Count
    bytes_read: Count
    damaged: Count
    healed: Count
    unhealed: Count
    last_ns: int | None


@dataclass(frozen=True, slots=True)
class ConfigInfo(Result):
    """A configuration file. reloads: how often it was taken over since the start. problem: why it was not when it was
    last read, so that what stood there before holds. waits_for_restart: what a running daemon cannot change.
    waits_for_disuse: models that are still in memory as they were before, until no request uses them."""

    path: str
    reloads: Count
    problem: str | None
    waits_for_restart: tuple[str, ...]
    waits_for_disuse: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusResult(Result):
    """The daemon as a whole. prefix_hits and prefix_misses: of sessions that began to read since the start, those that
    found another which begins alike, and those that did not; cached_tokens: what the first need not read;
    batched_tokens: what sessions have written beside each other, in one model call; scrub: None where it is off;
    config: None without a file."""

    version: str
    pid: ProcessId
    store: str
    models: tuple[ModelInfo, ...]
    sessions_awake: Count
    sessions_asleep: Count
    memory: MemoryInfo
    blas: str
    uptime_s: Seconds
    queue: QueueInfo
    prefix_hits: Count = 0
    prefix_misses: Count = 0
    cached_tokens: Count = 0
    batched_tokens: Count = 0
    scrub: ScrubInfo | None = None
    config: ConfigInfo | None = None


@dataclass(frozen=True, slots=True)
class SubscribeResult(Result):
    """The end of a subscription, when the daemon has stopped: how many events it was sent, and how many it lost."""

    delivered: Count
    lost: Count


@dataclass(frozen=True, slots=True)
class ShutdownResult(Result):
    """What a stop did with the sessions (their URIs): those put to sleep, and those that could not be, with why.

    empty: sessions that had read nothing. They end with their daemon, by design: nothing is lost that was computed.
    ledgers: sessions of which all that was read and said is kept, but not all keys and values, with why; the next
        request for one computes these again.
    The process ends after this is sent.
    """

    slept: tuple[str, ...]
    failed: dict[str, str]
    empty: tuple[str, ...] = ()
    ledgers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatusRequest(Request):
    """The daemon as a whole."""


@dataclass(frozen=True, slots=True)
class LoadModelRequest(Request):
    """Load a model, if it is not; idle sessions and models make room for it."""

    model: ModelName


@dataclass(frozen=True, slots=True)
class UnloadModelRequest(Request):
    """Put the sessions on a model to sleep, and free its memory until it is needed again."""

    model: ModelName


EventName = Annotated[str, Field(min_length=1, max_length=MAX_EVENT_NAME_CHARS)]
EventNames = Annotated[Sequence[EventName], Listed(or_one=True), Field(min_length=1, max_length=MAX_EVENT_NAMES)]


@dataclass(frozen=True, slots=True)
class SubscribeRequest(Request):
    """What happens in the daemon from now on, until the subscription is closed or the daemon stops: sleeps, wakes,
    evictions, what is read and written, with sizes and times. Who reads too slowly is told how many were `lost`.

    names: only events of these names (docs/reference/protocol.md); session, namespace: only events about these.
    """

    names: EventNames | None = None
    _: KW_ONLY
    session: SessionText | None = None
    namespace: SessionText | None = None


@dataclass(frozen=True, slots=True)
class ShutdownRequest(Request):
    """Stop the daemon. When this returns, it has put its sessions to sleep, and its process ends.

    Where a session cannot be put to sleep, this fails with the code `stop_refused`, and the daemon goes on. With
    `force` it stops all the same, and `failed` of the result names such sessions: what they did since their last sleep
    is lost.
    """

    _: KW_ONLY
    force: bool = False
