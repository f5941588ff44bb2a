"""What a ledger says, as answers show it. Imports no pydantic."""

from __future__ import annotations

from ...memvid.answers import Finding, Lossy
from ...records import Count, Result


class Passage(Result):
    """Tokens of one message, or of messages that were read in one go, as far as they are on the page. role: `system`,
    `tools`, `user`, `assistant`, `tool`, or `text`, which no message has; `a+b` for what cannot be told apart.
    role_start, role_end: of the whole. text: with the marks of the template; None without a tokenizer."""

    start: Count
    end: Count
    role: str
    role_start: Count
    role_end: Count
    text: str | None


class Contents(Result):
    """A page of a ledger: its tokens from `start` to before `end`. following: where the next page begins; None at the
    end of what was asked for.

    version: None for an awake session that has never slept. changed: whether an awake session has gone on since.
    has_roles: whether anything tells of messages. no_text: why there is no text; None where there is. tokens,
    token_texts: where they are asked for; these texts together are the text. manifest: as JSON, bounded, if asked for.
    problems: blocks that cannot be read; what they hold is left out.
    """

    session: str
    version: int | None
    bundle_id: str | None
    parent: str | None
    model: str
    labels: tuple[str, ...]
    created_ns: int | None
    token_count: Count
    unread_tokens: Count
    lossy: Lossy | None
    changed: bool
    has_roles: bool
    start: Count
    end: Count
    following: int | None
    passages: tuple[Passage, ...] = ()
    no_text: str | None = None
    tokens: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    manifest: str | None = None
    problems: tuple[Finding, ...] = ()
