"""Forks and folds: a new session that begins as another stands, or with a summary of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from pydantic import Field

from .events import Listener, Reporting
from .limits import MAX_NUMBER
from .reading import MaxTokens
from .records import Count, Labels, Position, Priority, Result, Seconds, SessionText, Text
from .session import Origin


@dataclass(frozen=True, slots=True)
class ForkResult(Result):
    """The receipt of a fork, which sleeps and is durable. forked_from: of what and where; blocks_reused: what it has in
    common with that; tokens_prefilled: what the model computed for it, 0 unless it was forked at an earlier token."""

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


@dataclass(frozen=True, slots=True)
class FoldResult(Result):
    """The receipt of a fold: of the new session, which is awake and durable.

    folded_from: the version that the other session, which sleeps, stays as, and how many tokens it has. tail_tokens:
        how many of them, its last ones, the new session has as they are; summary: what stands for the others.
    """

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


@dataclass(frozen=True, slots=True)
class ForkRequest(Reporting):
    """Make a session `name` that begins as `session` stands, or as a version of it behind an `@`: it sleeps, is
    durable, and has all blocks in common with it. What an awake session has not slept is put to sleep for it.

    at_token: with only so many tokens; what lies behind the last full block is computed as by a wake at that token.
    labels: the fork's own; those of the other session if None.
    """

    session: SessionText
    name: SessionText
    _: KW_ONLY
    at_token: Position | None = None
    labels: Labels | None = None
    on_event: Listener = None


@dataclass(frozen=True, slots=True)
class FoldRequest(Reporting):
    """Make `session` durable as it stands and free its memory, and begin a smaller session `name` with its system text,
    a summary of it and its last tokens. The new one is awake, and durable as well.

    summary: the text; or summarise: of how many tokens at most the model writes one, at the end of the session's
        context, or of what is before the tail where that has no room; that is not kept there. tail: how many of its
        last tokens the new session has as they are, fewer where that lets them begin with a turn. labels: the new
        one's own; those of the other if None.
    """

    session: SessionText
    name: SessionText
    _: KW_ONLY
    summary: Text | None = None
    summarise: MaxTokens | None = None
    tail: Annotated[int, Field(ge=0, le=MAX_NUMBER)] = 0
    labels: Labels | None = None
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        if (self.summary is None) == (self.summarise is None):
            raise ValueError("give either summary or summarise")
