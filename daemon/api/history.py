"""The history of sessions: their versions, where each came from, and what of them is in memory.

Imports no pydantic, as `session.py`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ...memvid.answers import Finding, ShownVersion
from ...records import Count, Result
from .session import Origin

Way = Literal[
    "began", "went_on", "went_back", "cut_off", "forked", "folded", "branched", "imported", "quantized", "unknown"
]  # fmt: skip


class HistoryEntry(ShownVersion):
    """A version, and how it came about.

    way: `began` with nothing of another before it; `went_on` from the end of the version before it; `went_back` to an
        earlier token or version, and on from there; `cut_off`: what it went on from is gone, and the version before it
        is no beginning of it; `forked`, `folded` or `imported` from another session; `branched`: kept as a branch of a
        tree; `quantized`: the one before it in fewer bits; `unknown`: a first version whose manifest cannot be read.
    parent: where that is gone, the version before it that is left, if it went on from that; the stand-ins of a daemon
        go by themselves. So the oldest that is left of a session began, or is the fork or the fold.
    origin: of a fork, a fold or a branch, as far as its manifest can be read. parent_version: the number of its parent,
        where that is of the same session. back_at: how many first tokens of its parent it has, if it went back; else
        None. They reach further than it went, if the same tokens came there once more. added_tokens: those behind what
        it has of what it came from; None where that is gone. branches: kept with it in one tree.
    """

    way: Way
    origin: Origin | None
    parent_version: int | None
    back_at: Count | None
    added_tokens: int | None
    branches: Count

    @property
    def follows(self) -> str | None:
        """The bundle id of what it came from; None if it began."""
        return self.parent if self.origin is None else self.origin.bundle_id


class InMemory(Result):
    """A session that is awake, or a branch of a tree that was begun on it.

    bundle_id, version: the version that it went on from, and its number; None without one. back_at: as of
    `HistoryEntry`, of that version, if it went back from the end of its newest one. added_tokens: behind what it has of
    that version. look: it went back to look, and has read and written nothing since. branch: its number; parent: of a
    branch, the branch above it.
    """

    session: str
    bundle_id: str | None
    version: int | None
    token_count: Count
    added_tokens: int
    back_at: Count | None = None
    look: bool = False
    branch: int | None = None
    parent: int | None = None


class HistoryResult(Result):
    """The newest versions first, each behind all that came from it. left_out: how many more there are. in_memory: what
    of these sessions is there; empty where files alone were read. problems: manifests that cannot be read. machines:
    of these sessions to the machine that has them, as of `SessionInfo`."""

    entries: tuple[HistoryEntry, ...]
    left_out: Count = 0
    in_memory: tuple[InMemory, ...] = ()
    problems: tuple[Finding, ...] = ()
    machines: dict[str, str] = field(default_factory=dict)
