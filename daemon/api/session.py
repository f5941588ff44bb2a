"""A session as answers show it: its state, its losses and its origin.

Imports no pydantic: a command that reads a store's files answers with these records, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Literal

from ...memvid.answers import Finding, Lossy, PartDiffers, ShownVersion
from ...records import Count, Result
from .sampling import Sampling

SessionState = Literal["awake", "asleep", "stored"]
"""`stored`: so the files of a store tell it, which do not say whether it is awake; and any version but the newest."""
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


class Provenance(Result):
    """Where a session comes from, and what of it was not computed here and at once.

    forked_from: None unless it was forked. folded_from: the version whose summary it began with; None else.
    recomputed: the first part that was computed again with other bits, or after damage; None without one.
    elsewhere_tokens: how many first tokens another backend than `slept_by` computed, perhaps with other bits.
    slept_by: the backend of its version, part to value: of one that is awake, the version that it was woken from; None
        if it was not woken. differs: the parts of that backend that differ here; empty for one asleep.
    """

    forked_from: Origin | None = None
    folded_from: Origin | None = None
    recomputed: Recomputed | None = None
    elsewhere_tokens: Count = 0
    slept_by: dict[str, str] | None = None
    differs: tuple[PartDiffers, ...] = ()

    def computed_again(self, part: Recomputed | None) -> Provenance:
        """The same with a part that was computed again; the first such part is the one to tell of."""
        return replace(self, recomputed=self.recomputed or part)

    def begun_anew(self) -> Provenance:
        """The provenance of the session before its first token, where nothing was restored or computed yet."""
        return Provenance(self.forked_from, self.folded_from)


class Look(Result):
    """Where a session was woken before its end: at `version`, with `token_count` tokens. The newest version, with
    `newest_tokens`, stays the newest until something is read or written; then history branches here."""

    version: Count
    token_count: Count
    newest_version: Count
    newest_tokens: Count


class SessionInfo(Result):
    """A session as a listing shows it; `session` is its URI.

    written_bytes: what all its versions wrote, of stripped ones what is left of it. slept_ns: when its last version
        became durable, None if it has none. used_ns: when a request used it last; None for one asleep.
    sampling: None for a sleeping session, unless its manifest was read.
    unread_tokens: how many of its tokens have no state in its last version, and are computed again at the next use.
    lossy: None for one that is exact.
    look: None unless it is awake at an earlier token or version, with nothing read or written there.
    durability: of `create`; None for one asleep, which is on the disk.
    unnamed: nobody chose its name: a client of HTTP began it under an id of its own, or under none.
    branches: of trees that were begun on it, in a listing of a daemon; 0 else.
    machine: that has it, or had it last, by its name, if that is another one of the same remote, as far as this daemon
        has heard. What is here may be older. None if it is at home here.
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
    written_bytes: Count
    dirty: bool
    labels: tuple[str, ...]
    slept_ns: int | None
    sampling: Sampling | None
    unread_tokens: Count = 0
    lossy: Lossy | None = None
    look: Look | None = None
    durability: OwnDurability | None = None
    unnamed: bool = False
    branches: Count = 0
    used_ns: int | None = None
    machine: str | None = None


class SessionDetail(Result):
    """All facts of `show` about one session. backend: what computes it, or computed it last: the parts of the identity
    that may differ. environment: of a version, the machine and the libraries that wrote it. tail_text: empty where no
    model is in memory that tells it. damaged: something of the version is damaged or missing, and what that would tell
    is empty; problems: what it is."""

    info: SessionInfo
    versions: tuple[ShownVersion, ...]
    tail_text: str
    layers: tuple[str, ...]
    lineage: tuple[str, ...]
    identity: dict[str, str]
    provenance: Provenance
    backend: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    damaged: bool = False
    problems: tuple[Finding, ...] = ()


class ListResult(Result):
    """The sessions of a namespace, or all, by name. Iterates over them."""

    sessions: tuple[SessionInfo, ...]

    def __iter__(self) -> Iterator[SessionInfo]:
        return iter(self.sessions)

    def __len__(self) -> int:
        return len(self.sessions)

    def __getitem__(self, at: int) -> SessionInfo:
        return self.sessions[at]
