"""A session as answers show it: its state, its losses and its origin.

Imports no pydantic: a command that reads a store's files answers with these records, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from ...memvid.answers import Lossy, VersionInfo
from ...records import Count, Result
from .sampling import Sampling

SessionState = Literal["awake", "asleep"]
OwnDurability = Literal["none"]
"""`none`: the session is to be thrown away; its turns do not wait for the journal, and a crash loses them."""


class Recomputed(Result):
    """The part of `version` that was computed again from stored tokens: `tokens` tokens from position `start`.
    same_logits: whether the logits behind them equal the stored ones bit for bit. damaged: whether their blocks were
    damaged; if not, a stop had not written them, or computing them was faster and gave other bits."""

    version: int
    start: Count
    tokens: Count
    same_logits: bool
    damaged: bool = True


class Origin(Result):
    """Where a fork or a fold comes from: a version of another session, and how many of its tokens the new one took over
    or summarized."""

    session: str
    version: int
    bundle_id: str
    tokens: Count


class Look(Result):
    """Where a session was woken before its end: at `version`, with `token_count` tokens. The newest version, with
    `newest_tokens`, stays the newest until something is read or written; then history branches here."""

    version: Count
    token_count: Count
    newest_version: Count
    newest_tokens: Count


class SessionInfo(Result):
    """A session as a listing shows it; `session` is its URI.

    stored_bytes: what all its versions wrote, of stripped ones what is left of it. slept_ns: when its last version
        became durable, None if it has none.
    sampling: None for a sleeping session, unless its manifest was read.
    unread_tokens: how many of its tokens have no state in its last version, and are computed again at the next use.
    lossy: None for one that is exact.
    look: None unless it is awake at an earlier token or version, with nothing read or written there.
    durability: of `create`; None for one asleep, which is on the disk.
    """

    session: str
    namespace: str
    name: str
    state: SessionState
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
    unread_tokens: Count = 0
    lossy: Lossy | None = None
    look: Look | None = None
    durability: OwnDurability | None = None


class SessionDetail(Result):
    """All facts of `show` about one session. backend: what computes it, or computed it last: the parts of the identity
    that may differ. lossy: None for an exact one. forked_from: None unless it is a fork; folded_from: None unless it
    began with a summary of another."""

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


class ListResult(Result):
    """The sessions of a namespace, or all, by name. Iterates over them."""

    sessions: tuple[SessionInfo, ...]

    def __iter__(self) -> Iterator[SessionInfo]:
        return iter(self.sessions)

    def __len__(self) -> int:
        return len(self.sessions)

    def __getitem__(self, at: int) -> SessionInfo:
        return self.sessions[at]
