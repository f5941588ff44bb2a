"""What the daemon answers, as typed, frozen models with the field names of the wire.

Owns the shapes of results and events. Does not know how they travel nor what computed them. Fields that a newer daemon
adds are ignored, so that an older client goes on; a missing or mistyped field is a breach.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..limits import MAX_SEED, MAX_TOKEN_ID

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
ProcessId = Annotated[int, Field(gt=1, lt=2**31)]
"""Something may be done to the process of that id, so it is never 0, 1 or a group."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class Reply(BaseModel):
    """Base of everything that comes from the daemon. A schema is built when it is first used: a command uses few."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)


Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=1e-3, le=100)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class Sampling(BaseModel):
    """How the next token is drawn. The defaults are greedy; the same seed draws the same tokens.

    In a request, only what was given to the constructor is named, and overrides what the session has."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0


class ProgressEvent(Reply):
    """How far a stage is: tokens for prefill and sleep, bytes for wake and analyse."""

    kind: Literal["progress"] = "progress"
    stage: Literal["prefill", "sleep", "wake", "analyse"]
    done: Count
    total: Count


class TokenEvent(Reply):
    """One token that has been committed; `text` is what it adds to the text, and may be empty.

    `token` is None at most once, at the end: text that had been held back, so that the pieces make up the whole.
    """

    kind: Literal["token"] = "token"
    token: TokenId | None
    text: str


class NoticeEvent(Reply):
    """Something that happened in the daemon: an event of a subscription. docs/protocol.md has the names, and the facts
    of each; there may be more of either than a client knows.

    number: grows by one with each event that a subscriber could be told. monotonic_s, time_ns: when, by the daemon's
    monotonic clock and by the Unix clock. request: what it was done for, the same number for all that one request did;
    None where nobody asked. session: a URI; None where it is about none.
    """

    kind: Literal["notice"] = "notice"
    name: str
    number: Count
    monotonic_s: float
    time_ns: int
    request: int | None
    session: str | None
    facts: dict[str, str | int | float | bool | None]


Event = Annotated[ProgressEvent | TokenEvent | NoticeEvent, Field(discriminator="kind")]


class ModelInfo(Reply):
    """A model that the daemon serves. What only a load tells is None before the first."""

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


class MemoryInfo(Reply):
    """What models and sessions take of the memory budget, and how often sessions went to sleep by themselves."""

    budget_bytes: Count
    weights_bytes: Count
    sessions_bytes: Count
    reserved_bytes: Count
    waiting: Count
    slept_by_pressure: Count
    slept_by_idling: Count


class QueueInfo(Reply):
    """Requests that want the engine or memory and neither read nor write at the moment, how many of them stand back for
    others, and how many may wait."""

    waiting: Count
    background: Count
    limit: Count


class ScrubInfo(Reply):
    """What the idle scrub did since the daemon began: sessions and bytes that it read, how many sessions had damage,
    and how many were computed again (`healed`) or could not be. `last_ns`: when it last read a session, if ever."""

    bytes_per_s: Count
    sessions: Count
    bytes_read: Count
    damaged: Count
    healed: Count
    unhealed: Count
    last_ns: int | None


class ConfigInfo(Reply):
    """The daemon's configuration file: how often it was taken over, and why it was not when it was last read."""

    path: str
    reloads: Count
    problem: str | None
    waits_for_restart: tuple[str, ...]
    waits_for_disuse: tuple[str, ...] = ()


class StatusResult(Reply):
    """The daemon as a whole."""

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


class Recomputed(Reply):
    """What of `version` was computed again: `tokens` tokens from position `start`. `same_logits`: whether the logits
    behind them are to the bit those that were stored. `damaged`: whether they were lost with damaged blocks; if not,
    a stop had not written them, or computing them was the faster way."""

    version: int
    start: Count
    tokens: Count
    same_logits: bool
    damaged: bool = True


class Salvaged(Reply):
    """What a repair saved of a session: the first `tokens` tokens `of` so many, which is None where nothing tells. What
    stood behind them is lost, whatever was read there since."""

    tokens: Count
    of: Count | None


class Lossy(Reply):
    """What a session has lost: the keys and values of its first `tokens` tokens were kept in `bits` bits once, and what
    was read behind them was computed from those."""

    bits: Count
    tokens: Count


class Look(Reply):
    """Where a session was woken before its end: at `version`, with `token_count` tokens. The newest version, with
    `newest_tokens`, stays the newest until something is read or written; then history branches here."""

    version: Count
    token_count: Count
    newest_version: Count
    newest_tokens: Count


class SessionInfo(Reply):
    """A session as a listing shows it; `session` is its URI, `stored_bytes` the sum over all its bundles. `salvaged` is
    None unless a repair saved its beginning out of a damaged version. `unread_tokens` of its tokens have no state in
    its last version, and are computed again at the next use. `lossy`: None for one that is exact. `look`: None unless
    it was woken before its end, with nothing read or written there; it may have left memory since."""

    session: str
    namespace: str
    name: str
    state: Literal["awake", "asleep"]
    model: str
    token_count: Count
    version: int | None
    bundle_id: str | None
    resident_bytes: Count
    stored_bytes: Count
    dirty: bool
    labels: tuple[str, ...]
    slept_ns: int | None
    sampling: Sampling | None
    salvaged: Salvaged | None = None
    unread_tokens: Count = 0
    lossy: Lossy | None = None
    look: Look | None = None


class VersionInfo(Reply):
    """One sleep of a session, with its marks."""

    version: int
    bundle_id: str
    parent: str | None
    token_count: Count
    bundle_bytes: Count
    logical_bytes: Count
    created_ns: int
    tags: tuple[str, ...] = ()
    pinned: bool = False


class Origin(Reply):
    """Where a fork or a fold comes from: the version of the other session, and how many of its tokens it began with, or
    with a summary of."""

    session: str
    version: int
    bundle_id: str
    tokens: Count


class SessionDetail(Reply):
    """Everything that `show` knows of one session; `lossy` is None for one that is exact, `forked_from` for one that is
    no fork, `folded_from` for one that did not begin with a summary of another."""

    info: SessionInfo
    versions: tuple[VersionInfo, ...]
    tail_text: str
    layers: tuple[str, ...]
    lineage: tuple[str, ...]
    identity: dict[str, str]
    backend: dict[str, str] = Field(default_factory=dict)
    lossy: Lossy | None = None
    forked_from: Origin | None = None
    folded_from: Origin | None = None


class ListResult(Reply):
    """The sessions of a namespace, or all."""

    sessions: tuple[SessionInfo, ...]


class SleepResult(Reply):
    """The receipt of a sleep: it exists only once the state is durable, and tells what the next wake gives.

    `already_asleep`: it slept already. `looked_at`: the token at which the session was only looked at; it sleeps as the
    version that goes on behind it. None else.
    """

    session: str
    version: int
    bundle_id: str
    parent: str | None
    token_count: Count
    bytes_written: Count
    logical_bytes: Count
    blocks_new: Count
    blocks_reused: Count
    seconds: Seconds
    already_asleep: bool = False
    looked_at: Count | None = None


class ForkResult(Reply):
    """The receipt of a fork, which sleeps and is durable. `tokens_prefilled` is what was computed for it: zero, unless
    it was forked at an earlier token."""

    session: str
    forked_from: Origin
    version: int
    bundle_id: str
    token_count: Count
    tokens_prefilled: Count
    bytes_written: Count
    logical_bytes: Count
    blocks_new: Count
    blocks_reused: Count
    seconds: Seconds


class FoldResult(Reply):
    """The receipt of a fold: of the new session, which is awake and durable. `folded_from` is what the other stays as,
    `tail_tokens` how many of its last tokens the new one has as they are, `summary` what stands for the others."""

    session: str
    folded_from: Origin
    version: int
    bundle_id: str
    token_count: Count
    tail_tokens: Count
    summary: str
    prefilled_tokens: Count
    cached_tokens: Count
    bytes_written: Count
    seconds: Seconds


class PartDiffers(Reply):
    """A part of the identity that may differ, and does; None where the snapshot, or what serves it, has none."""

    field: str
    stored: str | None
    live: str | None


class WakeResult(Reply):
    """The report of a wake. `tokens_prefilled` is zero, for nothing is read again, unless an earlier token was asked
    for, the snapshot had been salvaged, or the daemon computes what it can compute faster. `differs`: what computed the
    snapshot otherwise than what computes now. `canary`: what proved that the state computes what the slept one did.
    `lossy`: None where all of it is exact. `salvaged`: None unless a repair saved its beginning out of a damaged
    version. `recomputed`: None unless some of it was computed again, and is not sure to be what it was. `look`: None
    unless it is awake before its end, with nothing read or written there."""

    session: str
    version: int | None
    bundle_id: str | None
    token_count: Count
    tokens_prefilled: Count
    bytes_read: Count
    seconds: Seconds
    already_awake: bool
    differs: tuple[PartDiffers, ...] = ()
    verified: bool = True
    canary: Literal["same_bits", "within_tolerance", "not_run"] = "not_run"
    canary_seconds: Seconds = 0.0
    lossy: Lossy | None = None
    salvaged: Salvaged | None = None
    recomputed: Recomputed | None = None
    look: Look | None = None


class PlannedFile(Reply):
    """A bundle's file, and what a wake would read of it; `bytes_to_read` are those of state, decoded."""

    bundle_id: str
    blocks: Count
    bytes_to_read: Count


class MeasuredRate(Reply):
    """What the daemon has measured on its machine, `name` says in what unit; `value` is None without a sample."""

    name: str
    value: Seconds | None
    samples: Count


class WakePlanResult(Reply):
    """What a wake would do; nothing was done. `way` says whether it would restore the state from the disk or compute
    the tokens again, `reason` why; None where there is nothing to do. Seconds are by the `rates`, and None where one
    that they need has not been measured."""

    session: str
    version: int | None
    bundle_id: str | None
    token_count: Count
    already_awake: bool
    model: str
    model_loaded: bool
    way: Literal["restore", "recompute"] | None
    reason: str
    bytes_to_read: Count = 0
    blocks: Count = 0
    files: tuple[PlannedFile, ...] = ()
    files_left_out: Count = 0
    restored_tokens: Count = 0
    computed_tokens: Count = 0
    verified: bool = True
    memory_bytes: Count = 0
    restore_seconds: Seconds | None = None
    recompute_seconds: Seconds | None = None
    recompute: Literal["off", "exact", "fastest"] = "off"
    rates: tuple[MeasuredRate, ...] = ()
    differs: tuple[PartDiffers, ...] = ()


class AppendResult(Reply):
    """What reading new text or tokens did. `woken` is the report of the wake that the request was the cause of;
    `branched`: the look that it ended, where the session goes on from there."""

    session: str
    tokens_added: Count
    token_count: Count
    prefilled_tokens: Count
    seconds: Seconds
    woken: WakeResult | None = None
    cached_tokens: Count = 0
    branched: Look | None = None


class GenerateResult(Reply):
    """What a generation produced, whole. `logits_blake3` is there when `prove` was asked for. `woken` is the report of
    the wake that the request was the cause of; None where the session was awake. `rewound_to`: at which token the
    session went on, where it went back for a transcript that had diverged."""

    session: str
    text: str
    tokens: tuple[TokenId, ...]
    finish_reason: Literal["stop", "length"]
    token_count: Count
    prefilled_tokens: Count
    time_to_first_token_s: Seconds | None
    seconds: Seconds
    logits_blake3: tuple[str, ...] | None = None
    final_logits_blake3: str | None = None
    woken: WakeResult | None = None
    cached_tokens: Count = 0
    rewound_to: Count | None = None
    branched: Look | None = None


class Reuse(Reply):
    """What became of the prefix of one request: `hit`, `diverged` at `position`, or `none`. The texts are of both sides
    around that place, with the class of cause and what can be done; they are None unless it diverged. `became` is
    `refused` or `rewound` of a transcript that diverged from its own session. `cached_tokens` were taken over from
    another session, and not read."""

    verb: str
    at_ns: int
    outcome: Literal["hit", "diverged", "none"]
    source: str | None = None
    common_tokens: Count = 0
    stored_tokens: Count = 0
    position: Count | None = None
    message_index: Count | None = None
    expected_text: str | None = None
    found_text: str | None = None
    cause: str | None = None
    remedy: str | None = None
    became: Literal["refused", "rewound"] | None = None
    cached_tokens: Count = 0


class WhyResult(Reply):
    """What became of the prefixes of the last requests for a session, the latest last."""

    session: str
    requests: tuple[Reuse, ...]


class AnalysisResult(Reply):
    """What a stored version holds; `artifact` is the JSON document, `awake_tokens` what the session has in memory."""

    session: str
    version: int
    bundle_id: str
    token_count: Count
    awake_tokens: Count | None
    artifact: str
    seconds: Seconds


class LabelFigures(Reply):
    """All sessions of a label together; `label` is None for all that were looked at. `hits`: how often one of them was
    awake when it was to be warmed, or another session took over what it had read, since the daemon began."""

    label: str | None
    sessions: Count
    awake: Count
    tokens: Count
    resident_bytes: Count
    stored_bytes: Count
    hits: Count


class StatsResult(Reply):
    """Figures of all sessions, and of those of each label; one with several labels counts in each."""

    total: LabelFigures
    labels: tuple[LabelFigures, ...]


class Warmed(Reply):
    """What became of one session that was to be warmed: `hit` if it was awake already; `left`, if it still sleeps, is
    `no_room`, `model_not_loaded`, or the code of an error."""

    info: SessionInfo
    hit: bool
    left: str | None
    hits: Count


class WarmResult(Reply):
    """What became of all that were to be warmed."""

    sessions: tuple[Warmed, ...]


class SubscribeResult(Reply):
    """The end of a subscription, when the daemon has stopped: how many events it was sent, and how many it lost."""

    delivered: Count
    lost: Count


class ShutdownResult(Reply):
    """What a stop did with the sessions (their URIs): put to sleep, could not be (and why), had read nothing, are kept
    as ledgers whose tokens the next request computes again (and why).

    The process ends after this is sent.
    """

    slept: tuple[str, ...]
    failed: dict[str, str]
    empty: tuple[str, ...] = ()
    ledgers: dict[str, str] = Field(default_factory=dict)


class MaintenanceProblem(Reply):
    """Something that an operation could not put right: where, the code of the error it is, and a sentence."""

    path: str
    code: str
    message: str


class DeleteResult(Reply):
    """What a delete removed. `problems` are files in quarantine that it could not mark as deleted, and bundles
    beside which nothing could be removed, and what to do; `problems_left_out` counts what was cut off at their end."""

    session: str
    versions_deleted: Count
    bundles_deleted: Count
    bytes_freed: Count
    problems: tuple[MaintenanceProblem, ...] = ()
    problems_left_out: Count = 0


class ClearResult(Reply):
    """What a clear removed, or with `dry_run` would remove, and what of it could not be (`failed`: URI to reason).
    `stored_bytes` are those of its files, of which `bytes_freed` are free now: others may share some."""

    label: str
    dry_run: bool
    sessions: tuple[str, ...]
    tokens: Count
    resident_bytes: Count
    stored_bytes: Count
    bytes_freed: Count
    failed: dict[str, str]
    problems: tuple[MaintenanceProblem, ...] = ()
    problems_left_out: Count = 0


class MaintenanceAction(Reply):
    """One thing that an operation did, or with `dry_run` would do; `keep` says why something stays."""

    kind: str
    path: str
    session: str | None
    version: int | None
    size_bytes: Count
    reason: str


class MaintenanceResult(Reply):
    """What an operation on the store did, or with `dry_run` would do.

    The lists are bounded; `actions_left_out` and `problems_left_out` count what was cut off at their ends.
    """

    operation: str
    dry_run: bool
    actions: tuple[MaintenanceAction, ...]
    actions_left_out: Count
    bytes_freed: Count
    bytes_written: Count
    problems: tuple[MaintenanceProblem, ...]
    problems_left_out: Count


class MarksResult(Reply):
    """The marks of one version: it stays whatever a prune keeps while it has any."""

    session: str
    version: int | None
    bundle_id: str
    tags: tuple[str, ...]
    pinned: bool
