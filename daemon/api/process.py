"""Verbs about the daemon as a whole: models, memory, status, events and stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, field
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from ...memvid.answers import Finding
from ...records import Count, Listed, Result
from .events import Listener, Reporting
from .limits import MAX_EVENT_NAME_CHARS, MAX_EVENT_NAMES
from .records import ModelName, ProcessId, Request, Seconds, SessionText


class ModelInfo(Result):
    """A served model. resident: whether it is loaded; facts known only from a load are None before the first load.

    adapter: as in its identity. loading: whether a load is under way; loads: how many there were. ttl_s: it is unloaded
    after so many seconds without use; weights_bytes: the memory that it takes now; sessions_awake: how many use it.
    idle_s: seconds since its last use. problem: why the last load failed.
    changed: the parts of its identity whose files have changed since they were loaded.
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


class MemoryInfo(Result):
    """The use of the memory budget by models and sessions, in bytes.

    sessions_bytes: the memory of sessions after their last requests; reserved_bytes: the further memory that running
        requests may take. waiting: requests that wait for memory. slept_by_pressure, slept_by_idling: how many sleeps
        made room, and how many followed disuse, since the daemon began. branches_bytes: the memory of all branches.
    """

    budget_bytes: Count
    weights_bytes: Count
    sessions_bytes: Count
    reserved_bytes: Count
    waiting: Count
    slept_by_pressure: Count
    slept_by_idling: Count
    branches_bytes: Count = 0


class QueueInfo(Result):
    """Requests that neither read nor write at the moment: they wait for a turn, memory or the engine, or are new.
    background: how many of them stand back. limit: how many may wait."""

    waiting: Count
    background: Count
    limit: Count


class ScrubInfo(Result):
    """The idle scrub since the daemon began: sessions that it read, their bytes, and how many had damage. Of these and
    of sessions that share their blocks: how many were computed again (`healed`), and how many could not be. last_ns:
    when it last read a session, in this run or an earlier one; None for never."""

    bytes_per_s: Count
    sessions: Count
    bytes_read: Count
    damaged: Count
    healed: Count
    unhealed: Count
    last_ns: int | None


class ConfigInfo(Result):
    """A configuration file. reloads: how often it was applied since the start. problem: why the last reading was not
    applied; the earlier settings hold. waits_for_restart: settings that a running daemon cannot change.
    waits_for_disuse: models that stay in memory with earlier settings until no request uses them."""

    path: str
    reloads: Count
    problem: str | None
    waits_for_restart: tuple[str, ...]
    waits_for_disuse: tuple[str, ...] = ()


class StoreCoins(Result):
    """What the store holds in the four coins, as of `UsageReport`, and the rest of its files, in bytes. counted_ns:
    when that was counted."""

    logical_bytes: Count
    stored_bytes: Count
    shared_bytes: Count
    alone_bytes: Count
    rest_bytes: Count
    counted_ns: int


class DiskInfo(Result):
    """The disk of the store, and the budgets of the store, in bytes; None: no bound. free_bytes: room for this user.
    keep_free_bytes: the part of it that no sleep may take. held_bytes: what the store's budget bounds, the manifests
    and packs, where it has one. coins: counted every ten minutes at most, as long as somebody asks; None before
    that."""

    free_bytes: Count
    total_bytes: Count
    store_budget_bytes: Count | None
    daily_write_budget_bytes: Count | None
    keep_free_bytes: Count
    held_bytes: Count | None = None
    coins: StoreCoins | None = None


class RemoteUse(Result):
    """What was used of the remote at `url` since midnight UTC: bytes that were sent, and requests. dollars: what list
    prices of S3 Standard say of these, with a month of storage for the bytes. daily_budget: None: no bound. waiting:
    sessions of which nothing is sent before the next day. problem: why the last request there failed; None: it did
    not. sealed: whether what is there is encrypted, by a key of the daemon."""

    url: str
    bytes_sent: Count
    requests: Count
    dollars: float
    daily_budget: str | None = None
    waiting: Count = 0
    problem: str | None = None
    sealed: bool = False


class HttpInfo(Result):
    """Where the daemon serves HTTP. url: on its loopback port, without the path of an API; tokens: the file of its
    tokens; both None without a port. socket: its Unix socket for HTTP; None without one."""

    url: str | None = None
    tokens: str | None = None
    socket: str | None = None


class StatusResult(Result):
    """The daemon as a whole. prefix_hits, prefix_misses: new sessions since the start that shared a prefix with another
    session, and those that did not; cached_tokens: tokens the hits did not prefill; batched_tokens: tokens that several
    sessions wrote in one model call; scrub: None where it is off; config: None without a file; aliases: other names of
    models, maybe with `*` and `?`, each with the name it stands for; disk: None where the system does not tell;
    unreadable: as in `WakeResult`; http: None where it is not served; remote: None without one."""

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
    aliases: tuple[tuple[str, str], ...] = ()
    disk: DiskInfo | None = None
    unreadable: tuple[Finding, ...] = ()
    http: HttpInfo | None = None
    remote: RemoteUse | None = None

    def model_named(self, name: str) -> ModelInfo | None:
        """A served model by its name, or by an alias."""
        models = {each.name: each for each in self.models}
        return models.get(name) or models.get(meant_by(name, self.aliases))


def meant_by(name: str, aliases: Iterable[tuple[str, str]]) -> str:
    """The name for which the first fitting alias stands; without one the name itself."""
    return next((own for alias, own in aliases if fnmatchcase(name, alias)), name)


class SubscribeResult(Result):
    """The end of a subscription, when the daemon has stopped: how many events it was sent, and how many it lost."""

    delivered: Count
    lost: Count


class ShutdownResult(Result):
    """The result of a stop, by session URI: those put to sleep, and those that could not be, with why.

    empty: sessions that had read nothing. They end with their daemon, by design: no computed state is lost.
    ledgers: sessions whose tokens are all kept, but not all keys and values, with why; the next request for one
        computes these again.
    unsent: sessions whose newest version the remote is not known to have. Another machine may go on from an older one
        until the next daemon of this store sends it.
    The process ends after this is sent.
    """

    slept: tuple[str, ...]
    failed: dict[str, str]
    empty: tuple[str, ...] = ()
    ledgers: dict[str, str] = field(default_factory=dict)
    unsent: tuple[str, ...] = ()


class StatusRequest(Request):
    """The daemon as a whole."""


class LoadModelRequest(Reporting):
    """Load a model, if it is not; idle sessions and models make room for it. One of the hub is downloaded before."""

    model: ModelName
    _: KW_ONLY
    on_event: Listener = None


class UnloadModelRequest(Request):
    """Put the sessions on a model to sleep, and free its memory until it is needed again."""

    model: ModelName


EventName = Annotated[str, Field(min_length=1, max_length=MAX_EVENT_NAME_CHARS)]
EventNames = Annotated[Sequence[EventName], Listed(or_one=True), Field(min_length=1, max_length=MAX_EVENT_NAMES)]


class SubscribeRequest(Request):
    """Events of the daemon from now on, until the subscription is closed or the daemon stops: sleeps, wakes, evictions,
    reads and writes, with sizes and times. A slow reader is told how many events were `lost`.

    names: only events of these names (docs/reference/protocol.md); session, namespace: only events about these.
    """

    names: EventNames | None = None
    _: KW_ONLY
    session: SessionText | None = None
    namespace: SessionText | None = None


class ShutdownRequest(Request):
    """Stop the daemon. When this returns, it has put its sessions to sleep, and its process ends.

    If a session cannot be put to sleep, this fails with the code `stop_refused`, and the daemon goes on. With `force`
    it stops all the same. `failed` of the result names the sessions whose ledger could not be written either. The next
    start brings back what was answered, or only their last sleep with `--durability sleep`.
    """

    _: KW_ONLY
    force: bool = False
