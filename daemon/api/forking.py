"""Forks and folds: a new session that begins as another stands, or with a summary of it."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

from ...memvid.uri import names_place
from ...records import Count
from .events import Listener, Reporting
from .limits import MAX_NUMBER
from .reading import MaxTokens
from .records import Labels, Position, Priority, SessionText, Text
from .session import Origin
from .waking import Written


class ForkResult(Written):
    """The receipt of a fork, which sleeps and is durable. forked_from: its origin; blocks_reused: blocks shared with
    that; tokens_prefilled: tokens the model computed for it, 0 unless it was forked at an earlier token."""

    forked_from: Origin
    tokens_prefilled: Count


class FoldResult(Written):
    """The receipt of a fold: of the new session, which is awake and durable.

    folded_from: the version in which the old session sleeps, and its tokens. tail_tokens: how many of its last tokens
        the new session begins with unchanged; summary: the text in place of the others.
    """

    folded_from: Origin
    tail_tokens: Count
    summary: str
    prefilled_tokens: Count
    cached_tokens: Count


class ForkRequest(Reporting):
    """Make a session `name` from the present state of `session`, or from a version of it (`NAME@3`). The fork sleeps,
    is durable, and shares all blocks with it. Changes of an awake session are put to sleep first.

    at_token: with only so many tokens (also `NAME:500`); those behind the last full block are computed as by a wake at
        that token. labels: the fork's own; those of `session` if None. unnamed: as of `create`.
    """

    session: SessionText
    name: SessionText
    _: KW_ONLY
    at_token: Position | None = None
    labels: Labels | None = None
    unnamed: bool = False
    on_event: Listener = None

    def require(self) -> None:
        if self.at_token is not None and names_place(self.session):
            raise ValueError("name the place once: behind the : of session, or in at_token")


class FoldRequest(Reporting):
    """Put `session` to sleep, and begin a smaller session `name` with its system text, a summary and its last tokens.
    The new session is awake, and durable as well.

    summary: its text; or summarize: the most tokens of a summary that the model writes at the end of the session's
        context, or, where that has no room, of the context before the tail; the session does not keep it. tail: how
        many last tokens the new session takes over unchanged, fewer to begin with a turn. labels: the new session's
        own; those of the old one if None.
    """

    session: SessionText
    name: SessionText
    _: KW_ONLY
    summary: Text | None = None
    summarize: MaxTokens | None = None
    tail: Annotated[int, Field(ge=0, le=MAX_NUMBER)] = 0
    labels: Labels | None = None
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        if (self.summary is None) == (self.summarize is None):
            raise ValueError("give either summary or summarize")
