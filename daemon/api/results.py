"""What the service answers: records of plain data (str, int, float, bool, None, tuples of them), ids as hex.

Knows nothing of how they travel; the wire half has models with the same field names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...memvid.format.lossy import Lossy
from ...memvid.format.salvaged import Salvaged
from .origin import Origin
from .recomputed import Recomputed, RecomputePolicy, WakeWay
from .sampling import Sampling
from .why import Cause

SessionState = Literal["awake", "asleep"]
FinishReason = Literal["stop", "length"]
CanaryVerdict = Literal["same_bits", "within_tolerance", "not_run"]
Verb = Literal["append", "generate", "chat"]
PrefixOutcome = Literal["hit", "diverged", "none"]
Stage = Literal["prefill", "sleep", "wake", "analyse"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is; `done` and `total` are tokens for prefill and sleep, bytes for wake and analyse."""

    stage: Stage
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """One token that has been committed to the ledger; `text` is what it adds to the text (may be empty).

    `token` is None once, at the end, when there is text left that had been held back: a beginning of a stop string,
    or half a character.
    """

    token: int | None
    text: str


Event = Progress | Token
Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Look:
    """Where a session was woken before its end: at `version`, at its token `token_count`. The newest version, with
    `newest_tokens`, stays the newest until something is read or written; then history branches here."""

    version: int
    token_count: int
    newest_version: int
    newest_tokens: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as a listing shows it.

    stored_bytes: the bundle files of all its versions together.
    slept_ns: when its last version became durable, None if none has.
    sampling: None for a session that sleeps and whose bundle was not read for it.
    salvaged: None unless a repair saved its beginning out of a damaged version. unread_tokens: how many of its tokens
        have no state in its last version, and are computed again at the next use.
    lossy: None for a session that is exact. look: None unless it was woken before its end, with nothing read or written
        there; it may have left memory since.
    """

    session: str
    namespace: str
    name: str
    state: SessionState
    model: str
    token_count: int
    version: int | None
    bundle_id: str | None
    resident_bytes: int
    stored_bytes: int
    dirty: bool
    labels: tuple[str, ...]
    slept_ns: int | None
    sampling: Sampling | None
    salvaged: Salvaged | None = None
    unread_tokens: int = 0
    lossy: Lossy | None = None
    look: Look | None = None


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One sleep of a session, with its marks."""

    version: int
    bundle_id: str
    parent: str | None
    token_count: int
    bundle_bytes: int
    logical_bytes: int
    created_ns: int
    tags: tuple[str, ...] = ()
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class SessionDetail:
    """Everything that an inspector shows about one session. backend: what computes it, or computed it last; those parts
    of the identity that may differ. lossy: None for a session that is exact. forked_from: None for one that is no
    fork; folded_from: None for one that did not begin with a summary of another."""

    info: SessionInfo
    versions: tuple[VersionInfo, ...]
    tail_text: str
    layers: tuple[str, ...]
    lineage: tuple[str, ...]
    identity: dict[str, str]
    backend: dict[str, str] = field(default_factory=dict)
    lossy: Lossy | None = None
    forked_from: Origin | None = None
    folded_from: Origin | None = None


@dataclass(frozen=True, slots=True)
class SleepResult:
    """The receipt of a sleep: by the time it exists, the state is durable. It tells what the next wake gives.

    already_asleep: it slept already; looked_at: the token at which the session was only looked at: it sleeps as the
        version that goes on behind it. None else.
    """

    session: str
    version: int
    bundle_id: str
    parent: str | None
    token_count: int
    bytes_written: int
    logical_bytes: int
    blocks_new: int
    blocks_reused: int
    seconds: float
    already_asleep: bool = False
    looked_at: int | None = None


@dataclass(frozen=True, slots=True)
class ForkResult:
    """The receipt of a fork, which sleeps and is durable. forked_from: of what and where; blocks_reused: what it has in
    common with that; tokens_prefilled: what the model computed for it, 0 unless it was forked at an earlier token."""

    session: str
    forked_from: Origin
    version: int
    bundle_id: str
    token_count: int
    tokens_prefilled: int
    bytes_written: int
    logical_bytes: int
    blocks_new: int
    blocks_reused: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FoldResult:
    """The receipt of a fold: of the new session, which is awake and durable.

    folded_from: the version that the other session, which sleeps, stays as, and how many tokens it has. tail_tokens:
        how many of them, its last ones, the new session has as they are; summary: what stands for the others.
    """

    session: str
    folded_from: Origin
    version: int
    bundle_id: str
    token_count: int
    tail_tokens: int
    summary: str
    prefilled_tokens: int
    cached_tokens: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PartDiffers:
    """A part of the identity that may differ, and does, between a snapshot and what serves it; None: it has none."""

    field: str
    stored: str | None
    live: str | None


@dataclass(frozen=True, slots=True)
class WakeResult:
    """The report of a wake. tokens_prefilled: what the model computed to come to the state, 0 unless an earlier token
    was asked for or the snapshot was salvaged. differs: what computed the snapshot otherwise than what computes here.

    verified: whether every byte was hashed, as it is unless the daemon was told to trust its store.
    canary: what proved that the state computes what the slept one did, and in how many seconds.
    lossy: None where every bit is what it was when it was computed.
    salvaged: None unless a repair saved its beginning out of a damaged version.
    recomputed: None unless what was damaged of it was computed again.
    look: None unless it is awake at an earlier token or version than its last, with nothing read or written there.
    """

    session: str
    version: int | None
    bundle_id: str | None
    token_count: int
    tokens_prefilled: int
    bytes_read: int
    seconds: float
    already_awake: bool
    differs: tuple[PartDiffers, ...] = ()
    verified: bool = True
    canary: CanaryVerdict = "not_run"
    canary_seconds: float = 0.0
    lossy: Lossy | None = None
    salvaged: Salvaged | None = None
    recomputed: Recomputed | None = None
    look: Look | None = None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A bundle's file, and what a wake would read of it. bytes_to_read: of state, as it is once it is decoded."""

    bundle_id: str
    blocks: int
    bytes_to_read: int


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """What a daemon has measured on its machine. value: per second, or seconds, as the name says; None where nothing
    has been. samples: how many it rests on."""

    name: str
    value: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class WakePlanResult:
    """What a wake would do; nothing was done.

    way: whether the state is restored from the disk or computed again from the stored tokens, None where there is
        nothing to do; reason: why, a sentence.
    bytes_to_read, blocks, files, restored_tokens, computed_tokens: what restoring reads, and leaves to the model.
    memory_bytes: what the wake reserves. model_loaded: if not, it is loaded first, which is in none of the seconds.
    restore_seconds, recompute_seconds: how long either would take by the rates; None where one is not measured.
    recompute: the policy of the daemon.
    """

    session: str
    version: int | None
    bundle_id: str | None
    token_count: int
    already_awake: bool
    model: str
    model_loaded: bool
    way: WakeWay | None
    reason: str
    bytes_to_read: int = 0
    blocks: int = 0
    files: tuple[PlannedFile, ...] = ()
    files_left_out: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    verified: bool = True
    memory_bytes: int = 0
    restore_seconds: float | None = None
    recompute_seconds: float | None = None
    recompute: RecomputePolicy = "off"
    rates: tuple[MeasuredRate, ...] = ()
    differs: tuple[PartDiffers, ...] = ()


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What reading new text or tokens did. woken: the report of the wake that this request was the cause of.

    cached_tokens: what a session that had read nothing took over from another that begins alike, and did not prefill.
    branched: the look that it ended, where the session goes on from there; None else.
    """

    session: str
    tokens_added: int
    token_count: int
    prefilled_tokens: int
    seconds: float
    woken: WakeResult | None = None
    cached_tokens: int = 0
    branched: Look | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What a generation produced. With `prove`, `logits_blake3` has one digest per token: of the float32 logits
    from which it was drawn; `final_logits_blake3` is that of the logits from which the next one would be.

    prefilled_tokens: what the model read, also to go back, for a transcript that had diverged.
    rewound_to: at which token the session went on, where it went back for such a transcript; None else.
    woken: the report of the wake that this request was the cause of, None where the session was awake.
    branched: the look that it ended, where the session goes on from there; None else."""

    session: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    token_count: int
    prefilled_tokens: int
    time_to_first_token_s: float | None
    seconds: float
    logits_blake3: tuple[str, ...] | None
    final_logits_blake3: str | None
    woken: WakeResult | None = None
    cached_tokens: int = 0
    rewound_to: int | None = None
    branched: Look | None = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """What became of the prefix of one request.

    outcome: `hit`, all that was there could be kept; `diverged`, only the first `common_tokens` of `stored_tokens`;
        `none`, nothing like it was there. source: the session that has it, this or another; None where none does.
    position: the token at which they part, and message_index the first message of a transcript that is another, both
        None unless it diverged; the texts, the cause and the remedy likewise.
    became: of a transcript that diverged from its own session: `refused`, and nothing was changed, or `rewound`, the
        session went back to `position` and read the rest; None if it is neither, or failed for another reason.
    cached_tokens: how many of those in common with another session were taken over from it, and not read.
    """

    verb: Verb
    at_ns: int
    outcome: PrefixOutcome
    source: str | None = None
    common_tokens: int = 0
    stored_tokens: int = 0
    position: int | None = None
    message_index: int | None = None
    expected_text: str | None = None
    found_text: str | None = None
    cause: Cause | None = None
    remedy: str | None = None
    became: Literal["refused", "rewound"] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WhyResult:
    """What became of the prefixes of the last requests for a session, the latest last; of those before the daemon began
    nothing is known."""

    session: str
    requests: tuple[Reuse, ...]


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """What a stored version holds. artifact: the document of figures, as JSON (`snapshot/analysis.py`).

    awake_tokens: how many tokens the session has in memory, where more or others may be than were analysed; None for
        one that sleeps.
    """

    session: str
    version: int
    bundle_id: str
    token_count: int
    awake_tokens: int | None
    artifact: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MaintenanceProblem:
    """Something that an operation could not put right."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What a delete removed, and what it could not mark as deleted or not remove; `problems_left_out` counts what that
    was cut by."""

    session: str
    versions_deleted: int
    bundles_deleted: int
    bytes_freed: int
    problems: tuple[MaintenanceProblem, ...] = ()
    problems_left_out: int = 0


@dataclass(frozen=True, slots=True)
class MaintenanceAction:
    """One thing that an operation on the store did, or would do."""

    kind: str
    path: str
    session: str | None
    version: int | None
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What an operation on the store did, or with `dry_run` would do; `..._left_out` count what a list was cut by."""

    operation: str
    dry_run: bool
    actions: tuple[MaintenanceAction, ...]
    actions_left_out: int
    bytes_freed: int
    bytes_written: int
    problems: tuple[MaintenanceProblem, ...]
    problems_left_out: int


@dataclass(frozen=True, slots=True)
class MarksResult:
    """The marks of one version."""

    session: str
    version: int | None
    bundle_id: str
    tags: tuple[str, ...]
    pinned: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served. resident: whether it is loaded; what only a load tells is None before the first.

    adapter: as its identity has it. loading: whether a load is under way; loads: how many there were. ttl_s: after how
    many seconds without use it is unloaded; weights_bytes: the memory that it takes now; sessions_awake: how many are
    on it. idle_s: how long nobody has used it. problem: why it could not be loaded when that was last tried.
    changed: the parts that its files say otherwise than when they were loaded.
    """

    name: str
    path: str
    identity: str | None
    compute_dtype: str | None
    parameters: int | None
    resident: bool
    context_tokens: int | None
    adapter: str | None = "none"
    loading: bool = False
    pinned: bool = False
    ttl_s: float | None = None
    weights_bytes: int = 0
    sessions_awake: int = 0
    loads: int = 0
    idle_s: float = 0.0
    problem: str | None = None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What models and sessions take of the memory budget.

    sessions_bytes: what sessions took when they were last let go of; reserved_bytes: what requests under way may take
        beyond. waiting: requests that wait for memory. slept_by_pressure, slept_by_idling: how often a session has gone
        to sleep to make room, and because nobody used it, since the daemon began.
    """

    budget_bytes: int
    weights_bytes: int
    sessions_bytes: int
    reserved_bytes: int
    waiting: int
    slept_by_pressure: int
    slept_by_idling: int


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Requests that want the engine or memory, and neither read nor write at the moment: they wait for a turn, memory
    or the engine, or have just come. background: how many of them stand back. limit: how many may wait."""

    waiting: int
    background: int
    limit: int


@dataclass(frozen=True, slots=True)
class ScrubInfo:
    """What the idle scrub did since the daemon began: sessions that it read, bytes of them, how many of them had
    damage; of those, and of what shares their blocks, how many were computed again (`healed`) and how many could not
    be. last_ns: when it last read a session, in this run or an earlier one; None for never."""

    bytes_per_s: int
    sessions: int
    bytes_read: int
    damaged: int
    healed: int
    unhealed: int
    last_ns: int | None


@dataclass(frozen=True, slots=True)
class ConfigInfo:
    """A configuration file. reloads: how often it was taken over since the start. problem: why it was not when it was
    last read, so that what stood there before holds. waits_for_restart: what a running daemon cannot change.
    waits_for_disuse: models that are still in memory as they were before, until nobody uses them."""

    path: str
    reloads: int
    problem: str | None
    waits_for_restart: tuple[str, ...]
    waits_for_disuse: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """The daemon as a whole. prefix_hits and prefix_misses: of sessions that began to read since the start, those that
    found another which begins alike, and those that did not; cached_tokens: what the first need not read;
    batched_tokens: what sessions have written beside each other, in one model call; scrub: None where it is off;
    config: None without a file."""

    version: str
    pid: int
    store: str
    models: tuple[ModelInfo, ...]
    sessions_awake: int
    sessions_asleep: int
    memory: MemoryInfo
    blas: str
    uptime_s: float
    queue: QueueInfo
    prefix_hits: int = 0
    prefix_misses: int = 0
    cached_tokens: int = 0
    batched_tokens: int = 0
    scrub: ScrubInfo | None = None
    config: ConfigInfo | None = None


@dataclass(frozen=True, slots=True)
class LabelFigures:
    """All sessions of a label together; `label` is None for all that were looked at, with a label or without.

    stored_bytes: the bundle files of all their versions. hits: how often one of them was awake when it was to be
    warmed, or another session took over what it had read, since the daemon began.
    """

    label: str | None
    sessions: int
    awake: int
    tokens: int
    resident_bytes: int
    stored_bytes: int
    hits: int


@dataclass(frozen=True, slots=True)
class StatsResult:
    """Figures of all sessions, and of those of each label. One with several labels counts in each."""

    total: LabelFigures
    labels: tuple[LabelFigures, ...]


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one session that was to be warmed. hit: it was awake already. left: why it still sleeps, which is
    `no_room`, `model_not_loaded`, or the code of an error; None for one that is awake. hits: as of `LabelFigures`."""

    info: SessionInfo
    hit: bool
    left: str | None
    hits: int


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What became of all that were to be warmed, in the order in which they were tried."""

    sessions: tuple[Warmed, ...]


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What a clear removed, or with `dry_run` would remove: URIs, and what those sessions were together.

    bytes_freed: on the disk; less than stored_bytes where others share some, and 0 of a dry run. failed: URI to reason.
    problems: as of `DeleteResult`, of all of them.
    """

    label: str
    dry_run: bool
    sessions: tuple[str, ...]
    tokens: int
    resident_bytes: int
    stored_bytes: int
    bytes_freed: int
    failed: dict[str, str]
    problems: tuple[MaintenanceProblem, ...] = ()
    problems_left_out: int = 0


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What a graceful stop did with the sessions: those put to sleep, and those that could not be, with why.

    empty: sessions that had read nothing. They end with their daemon, by design: nothing is lost that was computed.
    ledgers: sessions of which all that was read and said is kept, but not all keys and values, with why; the next
        request for one computes these again.
    """

    slept: tuple[str, ...]
    failed: dict[str, str]
    empty: tuple[str, ...] = ()
    ledgers: dict[str, str] = field(default_factory=dict)
