"""Sleep and wake: put a session into the store and bring it back; the receipt and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from ...memvid.answers import Finding, Lossy, PartDiffers
from ...memvid.uri import names_place, names_version
from ...records import Count, Listed, Result
from .events import Listener, Reporting
from .limits import MAX_NAMED_SESSIONS
from .records import Label, Position, Request, Seconds, SessionText, Version
from .remote import PushResult
from .session import Look, Provenance, SessionInfo

CanaryVerdict = Literal["same_bits", "within_tolerance", "not_run"]

Because = Literal["stripped", "ledger"]
"""Why tokens of a session are computed again: its version was stripped, or ended in a ledger alone."""


class Written(Result):
    """The receipt of a version: it exists only once the state is durable, and tells what the next wake gives."""

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

    @classmethod
    def of(cls, receipt: Any, *, seconds: float, **more: Any) -> Self:
        """The store's receipt, as plain data. more: the other fields."""
        return cls(
            session=str(receipt.uri),
            version=receipt.version,
            bundle_id=receipt.bundle_id,
            parent=receipt.parent,
            token_count=receipt.token_count,
            bytes_written=receipt.bytes_written,
            logical_bytes=receipt.logical_bytes,
            blocks_new=receipt.blocks_new,
            blocks_reused=receipt.blocks_reused,
            seconds=seconds,
            **more,
        )


class SleepResult(Written):
    """The receipt of a sleep or a save. already_asleep: it slept already. looked_at: the token at which the session was
    only looked at; its receipt is that of its longer version. None else.

    remote: the second receipt, if it was asked for; the state is durable there too. remote_problem: why there is none;
    the state is durable here, and `push` sends it.
    """

    already_asleep: bool = False
    looked_at: Count | None = None
    remote: PushResult | None = None
    remote_problem: Finding | None = None


class WakeResult(Result):
    """The report of a wake. tokens_prefilled: tokens that the model computed; zero, unless an earlier token was asked
    for, or the version was `stripped` or had a `ledger` alone behind it, which recomputed_because tells. provenance: of
    the session; as `recomputed` also what this wake computed again with the same bits.

    canary: the proof that the state computes the same as the slept one, and its seconds.
    lossy: None where all of it is exact.
    look: None unless it is awake at an earlier token or version than its last, with nothing read or written there.
    unreadable: manifests that cannot be read. Nothing tells whose they are: one may be a newer version.
    came_from: the machine that had it until this wake; None if this one had it. waited_seconds: of `seconds`, until the
        remote gave it, with its newest version. bytes_fetched: that came from the remote for it.
    remote_problem: why it is a fork, as it was to be if the session cannot be had; None else.
    """

    session: str
    version: int | None
    bundle_id: str | None
    token_count: Count
    tokens_prefilled: Count
    bytes_read: Count
    seconds: Seconds
    already_awake: bool
    provenance: Provenance
    canary: CanaryVerdict = "not_run"
    canary_seconds: Seconds = 0.0
    lossy: Lossy | None = None
    look: Look | None = None
    unreadable: tuple[Finding, ...] = ()
    recomputed_because: Because | None = None
    came_from: str | None = None
    waited_seconds: Seconds = 0.0
    bytes_fetched: Count = 0
    remote_problem: Finding | None = None


class WakePlanResult(Result):
    """The plan of a wake; nothing was done.

    bytes_to_read, blocks, restored_tokens, computed_tokens: read from the disk, and left to the model. Without blocks
        the version has its ledger alone, and all of it is computed. is_fetched: it is stripped here, and the remote has
        its keys and values: they come back first, and nothing is computed for want of them.
    memory_bytes: reserved by the wake. model_loaded: if not, it is loaded first.
    unreadable: as in `WakeResult`.
    """

    session: str
    version: int | None
    bundle_id: str | None
    token_count: Count
    already_awake: bool
    model: str
    model_loaded: bool
    bytes_to_read: Count = 0
    blocks: Count = 0
    restored_tokens: Count = 0
    computed_tokens: Count = 0
    memory_bytes: Count = 0
    is_fetched: bool = False
    differs: tuple[PartDiffers, ...] = ()
    unreadable: tuple[Finding, ...] = ()


class Warmed(Result):
    """The result of warming one session. hit: it was awake already. left: why it still sleeps: `no_room`,
    `model_not_loaded`, or the code of an error; None for one that is awake. hits: as in `LabelFigures`."""

    info: SessionInfo
    hit: bool
    left: str | None
    hits: Count


class WarmResult(Result):
    """The results of warming sessions, in the order in which they were tried."""

    sessions: tuple[Warmed, ...]


class SleepRequest(Reporting):
    """Put the session to sleep: when this returns, its state is durable, and its memory free. A second request gives
    the same receipt and writes nothing.

    remote: return once it is durable in the daemon's remote, too."""

    session: SessionText
    _: KW_ONLY
    remote: bool = False
    on_event: Listener = None


class SaveRequest(SleepRequest):
    """Make the session durable as `sleep` does, and leave it in memory. A session that sleeps stays asleep: the receipt
    is that of its last version. So it is where nothing is new."""


class WakingRequest(Request):
    """Base of the requests that name a state to wake."""

    session: SessionText
    _: KW_ONLY
    version: Version | None = None
    at_token: Position | None = None
    strict: bool = False

    def require(self) -> None:
        if self.version is not None and names_version(self.session):
            raise ValueError("name the version once: behind the @ of session, or in version")
        if self.at_token is not None and names_place(self.session):
            raise ValueError("name the place once: behind the : of session, or in at_token")


class WakeRequest(WakingRequest, Reporting):
    """Wake the session at its last version, or at an earlier one; nothing is prefilled again.

    version: which one, unless an `@` of `session` names it: by number, tag, or digits of its bundle id.
    at_token: with only so many of its tokens; None: all. If its caches can be cut back, one token is computed for its
    logits; else all tokens behind the nearest record are.
    strict: also refuse it if another device, library or version computed it, as the last bits may then differ.
    fork: where another machine has the session awake, or the remote does not answer, nobody is asked or waited for:
        a fork of this name is made and woken, of the newest version that can be had here.
    """

    _: KW_ONLY
    fork: SessionText | None = None
    on_event: Listener = None


class PlanWakeRequest(WakingRequest):
    """Plan the same `wake`, and estimate its time on the daemon's machine; nothing is done."""


class WarmRequest(Reporting):
    """Wake sessions ahead of need, by name, by label (in one `namespace`, or all) or both, as far as memory is free: no
    other session goes to sleep for it, and no model is loaded. A session that is awake already counts as a hit."""

    sessions: Annotated[Sequence[SessionText], Listed(or_one=True), Field(max_length=MAX_NAMED_SESSIONS)] = ()
    _: KW_ONLY
    label: Label | None = None
    namespace: SessionText | None = None
    on_event: Listener = None

    def require(self) -> None:
        if not self.sessions and self.label is None:
            raise ValueError("name sessions, or a label")
        if self.namespace is not None and self.label is None:
            raise ValueError("a namespace is for a label")
