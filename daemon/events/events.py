"""The daemon's events as records: one class for each name that a subscriber can ask for.

Rules: an event tells that something happened, to which session, its size and its time. It holds no text, no token ids
and no labels. Sizes are in the unit of the field's name, `_bytes` or `_tokens`; times are seconds. For each event that
begins a stage, another ends it.

`bus.py` publishes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, dataclass_transform

from ...memvid.uri import SessionUri

SleepCause = Literal[
    "asked",
    "save",
    "idle",
    "pressure",
    "suspend",
    "shutdown",
    "quantize",
    "fork",
    "rewind",
    "fold",
    "heal",
    "journal",
    "ledger",
    "handover",
]
"""Why a session is made durable: a client wants it to sleep or to be saved, it was not used, others need the memory,
the system suspends, the daemon stops, it is kept in fewer bits, a fork of it needs a version, it goes back for a
transcript, it is folded, its damaged part has been computed again, the journal has no room for its turns, its ledger
alone is kept while it stays awake and is not used, or another machine asks for it."""

WakeCause = Literal["asked", "warm", "prefix", "fork", "quantize", "heal"]
"""Why a snapshot is read: for a request, ahead of one, for another session that begins alike, for a fork, for fewer
bits, or to compute a damaged part again."""

UnloadCause = Literal["asked", "pressure", "unused", "changed"]

Fact = str | int | float | bool | None

_MADE: Final[dict[str, type[Event]]] = {}


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base of all, which makes frozen dataclasses of them. name: a word of the protocol, made from the class's name.
    session: None if the event is about none."""

    name: ClassVar[str] = ""
    session: SessionUri | None

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _MADE[cls.name] = dataclass(frozen=True)(cls)

    def facts(self) -> dict[str, Fact]:
        """The event's fields but for the session."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "session"}


class Subscribed(Event):
    """A subscription has begun. From here on it misses only the events that `lost` counts. Told to that subscriber
    only."""


class Lost(Event):
    """`count` events were dropped, the oldest first, because the subscriber did not take them. Told to it only. None:
    nobody counted them, as it was away for longer than they are kept."""

    count: int | None


class RequestAccepted(Event):
    """A request to read, write, keep or remove something was accepted. verb: its method."""

    verb: str


class RequestQueued(Event):
    """A request has to wait for the session's turn. ahead: how many requests wait before it."""

    ahead: int


class RequestFinished(Event):
    """A request was carried out."""

    verb: str
    seconds: float


class RequestFailed(Event):
    """A request was refused, failed, or was cancelled. code: of the error; `cancelled`, or `internal_error`."""

    verb: str
    code: str
    seconds: float


class SessionCreated(Event):
    """A new session is awake: an empty one, or one made of a branch."""

    model: str


class SessionForked(Event):
    """A fork was made, and sleeps. source: the session that it was forked from."""

    source: SessionUri
    tokens: int
    tokens_prefilled: int
    bytes_written: int
    blocks_reused: int
    seconds: float


class SessionFolded(Event):
    """A new, smaller session goes on in the place of an exhausted one, which sleeps. source: the exhausted one;
    tail_tokens: how many of its last tokens the new one has; prefilled_tokens: how many tokens were read."""

    source: SessionUri
    source_tokens: int
    tokens: int
    tail_tokens: int
    prefilled_tokens: int
    bytes_written: int
    seconds: float


class SessionRewound(Event):
    """A session went back to the token at which a transcript leaves it. version: the version that has all its
    tokens."""

    version: int
    from_tokens: int
    to_tokens: int


class SessionDeleted(Event):
    """A session and all its versions are gone, from memory and from disk."""

    versions: int
    bytes_freed: int


class PrefixHit(Event):
    """A session that had read nothing took over tokens of another. awake: they came from memory."""

    source: SessionUri
    wanted_tokens: int
    cached_tokens: int
    awake: bool
    seconds: float


class PrefillBegan(Event):
    """Tokens are about to be read."""

    tokens: int


class PrefillProgress(Event):
    """A chunk has been read."""

    done_tokens: int
    total_tokens: int


class PrefillEnded(Event):
    """Reading has ended. tokens: how many were read into the ledger; 0 if reading failed or was given up."""

    tokens: int
    seconds: float


class FirstToken(Event):
    """The first token of a generation is committed. seconds: since the request was accepted."""

    seconds: float


class DecodeEnded(Event):
    """A generation has ended. tokens: how many it committed, even if it failed or was given up."""

    tokens: int
    seconds: float


class BatchFailed(Event):
    """A model call for several sessions failed. All are as they were. Each goes on alone, so only the failing one is
    refused. code: of the error."""

    model: str
    sessions: int
    code: str


class SleepBegan(Event):
    """A session is being made durable."""

    cause: SleepCause
    tokens: int


class SleepEnded(Event):
    """The state is durable. bytes_written and blocks_new are 0 if the last version has all of it."""

    cause: SleepCause
    version: int
    tokens: int
    bytes_written: int
    logical_bytes: int
    blocks_new: int
    blocks_reused: int
    seconds: float


class SleepFailed(Event):
    """The session stays awake as it was. code: of the error."""

    cause: SleepCause
    code: str
    seconds: float


class VersionsPruned(Event):
    """The daemon has removed versions: those that no rule keeps (`serve --keep-last`, `--keep-days`), and stand-ins
    that a later version has taken over. bytes_freed: less than their size where other versions need their blocks."""

    versions: int
    bytes_freed: int


class VersionPushed(Event):
    """A version is durable in the remote, as the session's newest. bytes_sent, blocks_sent: what the remote lacked."""

    version: int
    bytes_sent: int
    blocks_sent: int
    seconds: float


class VersionPulled(Event):
    """A version of the remote is one of this store."""

    version: int
    bytes_written: int
    seconds: float


class VersionsStripped(Event):
    """The store needed room (`serve --store-budget`), so versions of a session have their ledgers alone now: its next
    use reads the tokens again, unless the remote has the rest. bytes_freed: of blocks that no version needs any more
    with it."""

    versions: int
    bytes_freed: int


class LedgerKept(Event):
    """A session had to leave memory, at a stop or for others, and could not be written as a whole, so its ledger was
    kept with the durable part of its state. Or the scrub found damage in the blocks below such a ledger. tokens: of the
    ledger; unread_tokens: those that the next request computes again. code: of the error or the damage."""

    version: int
    tokens: int
    unread_tokens: int
    bytes_written: int
    code: str


class BlocksWritten(Event):
    """Full blocks of a session that is awake were written behind its requests, as a version that a later one
    replaces. tokens: of its ledger; unread_tokens: those behind the blocks."""

    version: int
    tokens: int
    unread_tokens: int
    bytes_written: int
    seconds: float


class LedgerRead(Event):
    """The tokens of a kept ledger were computed again. same_logits: the logits behind them are the same to the
    bit."""

    tokens: int
    recomputed_tokens: int
    same_logits: bool


class WakeBegan(Event):
    """A snapshot is to be read. version: None is the newest."""

    cause: WakeCause
    version: int | None


class WakeVerified(Event):
    """The snapshot has been read into memory, every byte compared with its digest."""

    bytes_read: int
    seconds: float


class WakeEnded(Event):
    """The state is put back. canary: the verdict; tokens_prefilled: how many tokens had to be computed."""

    cause: WakeCause
    version: int
    tokens: int
    tokens_prefilled: int
    bytes_read: int
    canary: str
    canary_seconds: float
    seconds: float


class WakeFailed(Event):
    """Nothing live has changed. code: of the error."""

    cause: WakeCause
    code: str
    seconds: float


class EvictionPlanned(Event):
    """Idle sessions go to sleep and models are unloaded, so that the request for this session finds memory. Each of
    them has its own event."""

    wanted_bytes: int
    free_bytes: int
    sessions: int
    models: int


class EvictionRefused(Event):
    """This session could not be put to sleep to make room. code: of the error."""

    code: str


class MemoryAwaited(Event):
    """The request for this session waits for memory. ahead: how many requests wait before it."""

    wanted_bytes: int
    free_bytes: int
    ahead: int


class MemoryGranted(Event):
    """The request has its memory. granted: False if its session has to give way first; it then asks again."""

    wanted_bytes: int
    granted: bool
    seconds: float


class MemoryRefused(Event):
    """The request for this session wants more memory than it can ever have."""

    wanted_bytes: int
    held_bytes: int
    budget_bytes: int


class ModelDownloadProgress(Event):
    """So much of a model is in the hub's cache. Told twice a second while it is downloaded."""

    model: str
    done_bytes: int
    total_bytes: int


class ModelLoadBegan(Event):
    """A model is being read into memory. wanted_bytes: its size by its files."""

    model: str
    wanted_bytes: int


class ModelLoaded(Event):
    """A model is ready. weights_bytes: the memory that it takes."""

    model: str
    weights_bytes: int
    seconds: float


class ModelLoadFailed(Event):
    """A model could not be loaded. code: of the error, or `cancelled`."""

    model: str
    code: str
    seconds: float


class ModelUnloaded(Event):
    """A model has left memory. cause: a client asked, others need the room, it was not used, or its files have
    changed."""

    model: str
    weights_bytes: int
    cause: UnloadCause


class ModelFilesChanged(Event):
    """The files of a model have changed since it was loaded. policy: refuse or reload."""

    model: str
    policy: str


class ModelFilesRestored(Event):
    """The files of a model are again those that it was loaded from."""

    model: str


class ConfigurationTakenOver(Event):
    """The configuration file was taken over. waiting: how many of its settings wait for a restart."""

    waiting: int


class ConfigurationRefused(Event):
    """The configuration file is wrong, so the earlier settings hold. code: of the error."""

    code: str


class SessionScrubbed(Event):
    """Every byte that a sleeping session's versions need was read again. damage: how many findings."""

    bundles: int
    bytes_read: int
    damage: int
    seconds: float


class DamageFound(Event):
    """The scrub found damage in the files of a session. code: of the first finding."""

    findings: int
    code: str


class SessionHealed(Event):
    """The damaged part was computed again from the stored tokens, and slept as a new version. same_logits: the logits
    behind it are the stored ones to the bit."""

    version: int
    tokens: int
    recomputed_tokens: int
    same_logits: bool
    bytes_written: int
    seconds: float


class HealFailed(Event):
    """The damaged part was not computed again. code: of the error."""

    code: str


class StoreRepaired(Event):
    """A repair has ended. copied: packs that it made of sound frames; moved: damaged files that it moved away;
    problems: how many are left."""

    copied: int
    moved: int
    problems: int


EVENTS: Final[tuple[type[Event], ...]] = tuple(_MADE.values())
EVENT_NAMES: Final = frozenset(event.name for event in EVENTS)


@dataclass(frozen=True, slots=True)
class Notice:
    """An event, with its number and times. number: counts all published events, so a gap means events that were not
    wanted, or lost. monotonic_s, time_ns: when it was published, by the monotonic and by the Unix clock. request: the
    number of the request that caused it, or None.
    """

    number: int
    monotonic_s: float
    time_ns: int
    request: int | None
    event: Event


def _plain(value: Any) -> Fact:
    return str(value) if isinstance(value, SessionUri) else value
