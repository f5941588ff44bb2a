"""Why requests read tokens again, and what they cost: for one session, and for all.

Imports no pydantic: a command that reads a store's files answers with these records, too.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from ...records import Count, Result

ReadingVerb = Literal["append", "generate", "chat"]
PrefixOutcome = Literal["hit", "diverged", "none"]
Cause = Literal[
    "goes_on", "tokenization", "thinking", "clock", "reordered", "template", "system_text", "message", "other_text"
]
NotTaken = Literal["no_whole_block", "other_calls", "other_bits", "no_room", "unreadable"]
By = Literal["cause", "session", "client", "hour"]

MAX_ROWS: Final = 200
"""Of one answer; `left_out` counts the others."""

REMEDIES: Final[dict[Cause, str]] = {
    "goes_on": "The transcript ends where the session goes on. For another answer, rewind or fork the session there.",
    "tokenization": "The text is the same, its tokens are not. Send the chat as messages, or the new message alone, so "
    "that what was written is kept as it was.",
    "thinking": "Only what was thought differs. Give answers back whole, or without any of their thinking.",
    "clock": "Only a date or a time differs. Say it in the newest message, not at the beginning.",
    "reordered": "The same words stand in another order, as keys or tools do that come from a set. Sort them.",
    "template": "The words are the same, the control tokens around them are not. Use one template, with the same "
    "arguments, for all turns.",
    "system_text": "The system text has changed. Keep it, and say what is new in a message; or begin a new session.",
    "message": "An earlier message has changed. If that is meant, rewind or fork the session there.",
    "other_text": "Other text was read there. Fork the session at that token, or begin a new one.",
}


class RequestCost(Result):
    """What one request cost. request: its number, as in events. verb: its method. client: the first word of an
    HTTP client's name and the API that it speaks; empty on the Unix socket. ended_ns: by the Unix clock. code: of the
    error by which it failed; empty.

    cause: why tokens were read, or were not, in one word: why its prompt left what was known; `stripped`, `ledger` or
        `recomputed`; why nothing was taken over; `hit` or `new`; its verb where no prompt was compared.
    recomputed_tokens: tokens that its sessions had, in their places, and that were read again all the same: as their
        keys and values were not there, or for their logits. recomputed_because: as of `WakeResult`, or empty; a newer
        daemon may have other words. The others as of `Costs`.
    """

    request: Count
    verb: str
    ended_ns: int
    client: str = ""
    code: str = ""
    cause: str = ""
    read_tokens: Count = 0
    read_again_tokens: Count = 0
    recomputed_tokens: Count = 0
    recomputed_because: str = ""
    reused_tokens: Count = 0
    taken_over_tokens: Count = 0
    written_tokens: Count = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    wake_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    durable_seconds: float = 0.0


class Reuse(Result):
    """The outcome for the prefix of one request, or for what one without a prompt recomputed: verb is its method then.

    outcome: `hit`, all stored tokens could be kept; `diverged`, only the first `common_tokens` of `stored_tokens`;
        `none`, no session had the prefix. source: the session that had it, this or another; None without one. A
        transcript that `converse` goes on with in a fork diverged from the session that was forked.
    position: the first token that differs, and message_index the first message of a transcript that differs, both None
        unless it diverged; the texts, the cause and the remedy likewise. cause: one of `Cause`, or a newer daemon's.
    became: for a transcript that diverged from its own session: `refused`, with nothing changed, or `rewound`: the
        session went back to `position` and read the rest; None else, or if it failed for another reason.
    repeated_tokens: how many tokens of the request behind `position` the source has too, behind another beginning.
    cached_tokens: how many common tokens were taken over from another session, and not prefilled. not_taken: why none
        of a new session's were: less than a whole block is in common; the source read them in other calls than a new
        session makes, or holds a state that may have other bits; there was no memory for a copy; the source cannot be
        read. None where some were, or none had to be; a newer daemon may have other words.
    volatile: the first lines of those that a client's system text has anew with each request, each cut short: they
        stand behind what was read before.
    cost: of the whole request; None until it has ended.
    """

    verb: str
    at_ns: int
    outcome: PrefixOutcome
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
    repeated_tokens: Count = 0
    cached_tokens: Count = 0
    not_taken: str | None = None
    volatile: tuple[str, ...] = ()
    cost: RequestCost | None = None


class Judged(NamedTuple):
    """As of `RequestCost`."""

    cause: str
    read_again_tokens: int
    reused_tokens: int


def judge(verb: str, reuse: Reuse | None, read: int, recomputed: int, because: str, *, own: bool) -> Judged:
    """What the tokens of a request are, by the one definition that all figures have. reuse: of its prompt; None where
    none was compared. read: all tokens that were read, recomputed: those of them that its sessions had in their places.
    own: whether the source is the session itself.

    A token is read again if some session had read it: in its place, or behind a beginning that has changed. It is
    reused if its session had it, or took it over, and it was not read.
    """
    left, kept, rest, repeated = read - recomputed, 0, 0, 0
    if reuse is not None:
        if reuse.became != "refused":
            kept = reuse.common_tokens if own else reuse.cached_tokens
            rest = min(left, reuse.common_tokens - kept)
        repeated = min(left - rest, reuse.repeated_tokens)
    again = max(0, recomputed + rest + repeated)
    return Judged(_cause_of(verb, reuse, recomputed, because, own=own), again, max(0, kept - recomputed))


def _cause_of(verb: str, reuse: Reuse | None, recomputed: int, because: str, *, own: bool) -> str:
    """What another session has in the place of another message is another conversation, and no miss."""
    if reuse is not None and reuse.outcome == "diverged" and (own or reuse.repeated_tokens):
        return reuse.cause or "other_text"
    if recomputed:
        return because or "recomputed"
    if reuse is None:
        return verb
    return "new" if reuse.outcome == "none" else reuse.not_taken or "hit"


class WhyResult(Result):
    """The prefix outcomes of the last requests for a session, the latest last. problem: why the diary of the store,
    which has those before the daemon began, could not be read; None if it could."""

    session: str
    requests: tuple[Reuse, ...]
    problem: str | None = None


class Costs(Result):
    """What requests cost together. key: what they have in common: a cause, a session (empty for one that was deleted
    since), a client, or the hour in which they ended, as seconds of Unix time.

    read_tokens: that a model read; read_again_tokens: those of them that a session had read before, in their place or
    behind a beginning that has changed (the others are new); reused_tokens: of prompts, that were not read, as their
    session had them or took them over from another; taken_over_tokens: those of them that were taken over;
    written_tokens. seconds: of whole requests, and of their stages: waiting for their turn
    and for memory, waking, reading, writing, and until it was durable. failed: how many did. last_again: why the last
    tokens that a session had were read again, and last_again_ns when; empty and 0 where none were.
    """

    key: str
    requests: Count = 0
    failed: Count = 0
    read_tokens: Count = 0
    read_again_tokens: Count = 0
    reused_tokens: Count = 0
    taken_over_tokens: Count = 0
    written_tokens: Count = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    wake_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    durable_seconds: float = 0.0
    last_again: str = ""
    last_again_ns: int = 0


class CausesResult(Result):
    """What requests cost, by what they have in common; by seconds, the most first, but hours by time.

    since_ns: of the first request that is counted, in nanoseconds of Unix time; None without any. total: of all.
    left_out: rows beyond MAX_ROWS, which the total has. problem: why a part of the diary could not be read.
    """

    by: By
    rows: tuple[Costs, ...]
    total: Costs
    since_ns: int | None = None
    left_out: Count = 0
    problem: str | None = None
