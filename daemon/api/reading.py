"""Verbs by which a session reads and writes, and the history of its prefixes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Final, Literal

from pydantic import Field

from ...records import Count, Listed, Result
from .causes import By
from .constraints import Constraint, ToolChoice
from .dialogue import JsonObject, Messages, ToolCall, Tools, require_root
from .events import Listener, Reporting
from .limits import MAX_APPENDED_TOKENS, MAX_GENERATED_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from .logprobs import TokenLogprobs, TopLogprobs, require_tellable
from .records import Labels, ModelName, NamedSampling, Priority, Request, Seconds, SessionText, Text
from .sampling import TokenId
from .session import Look
from .waking import WakeResult

FinishReason = Literal["stop", "length", "tool_calls"]


_DURATION: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})? ?(?:s|min|h|d)?", re.ASCII | re.IGNORECASE)


class AppendResult(Result):
    """The result of reading new text or tokens. woken: the report of the wake that this request caused.

    cached_tokens: tokens that a new session took over from another with the same prefix, and did not prefill.
    recomputed_tokens: tokens that the session had already and that were computed again to wake it, for example after a
    crash. reading_seconds: for how long the model read the new ones; None where it read none.
    branched: the look that this request ended by going on from there; None else.
    """

    session: str
    tokens_added: Count
    token_count: Count
    prefilled_tokens: Count
    seconds: Seconds
    woken: WakeResult | None = None
    cached_tokens: Count = 0
    branched: Look | None = None
    recomputed_tokens: Count = 0
    reading_seconds: Seconds | None = None


class GenerateResult(Result):
    """A whole generation. With `prove`, `logits_blake3` has one digest per token: of the float32 logits it was drawn
    from; `final_logits_blake3` is the digest of the logits for the next token.

    prefilled_tokens: tokens of the request that the model read. recomputed_tokens: tokens that the session had already
    and that were computed again: to wake it, for example after a crash, or to go back for a diverged transcript.
    rewound_to: the token from which the session went on, after it went back for such a transcript; None else.
    woken: the report of the wake that this request caused, None where the session was awake.
    branched: the look that this request ended by going on from there; None else.
    reasoning: an assistant's thinking, tool_calls: its calls; `text` has neither.
    logprobs: of each token, if they were asked for. stopped_by: the stop string that ended the answer; None else.
    seed: of this answer's own random numbers; None where it was drawn by the session's, or without any.
    """

    session: str
    text: str
    tokens: tuple[TokenId, ...]
    finish_reason: FinishReason
    token_count: Count
    prefilled_tokens: Count
    time_to_first_token_s: Seconds | None
    seconds: Seconds
    logits_blake3: tuple[str, ...] | None = None
    final_logits_blake3: str | None = None
    woken: WakeResult | None = None
    cached_tokens: Count = 0
    rewound_to: Count | None = None
    branched: Look | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stopped_by: str | None = None
    seed: Count | None = None
    recomputed_tokens: Count = 0


MaxTokens = Annotated[int, Field(ge=1, le=MAX_GENERATED_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[Sequence[Stop], Listed(or_one=True), Field(max_length=MAX_STOPS)]
AppendedTokens = Annotated[Sequence[TokenId], Listed(at_once=4096), Field(min_length=1, max_length=MAX_APPENDED_TOKENS)]
Role = Literal["user", "system", "tool"]
OnDivergence = Literal["refuse", "rewind"]


class AppendRequest(Reporting):
    """Append text, token ids or messages to the session: all, or nothing if it fails or is cancelled. Never sent twice,
    also after a failure.

    messages: read as a chat reads them, and not answered: the next ones follow them with no answer between, or begin
        with it.
    durable: whether they are durable at the end also where neither the daemon nor the session keeps each turn.
    certain: whether messages are refused that `recall` could not tell with certainty.
    create: make the session if there is none of that name. model, labels: of a session that is made so; the default
        model if None. unnamed: as of `create`.
    """

    session: SessionText
    _: KW_ONLY
    text: Text | None = None
    tokens: AppendedTokens | None = None
    messages: Messages | None = None
    durable: bool = False
    certain: bool = False
    create: bool = False
    model: ModelName | None = None
    labels: Labels | None = None
    unnamed: bool = False
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        _require_creation(self)
        if sum(each is not None for each in (self.text, self.tokens, self.messages)) != 1:
            raise ValueError("give either text, tokens or messages")


class WritingRequest(Request):
    """Base of what lets the model write."""

    session: SessionText
    _: KW_ONLY
    max_tokens: MaxTokens | None = None
    sampling: NamedSampling | None = None
    stop: Stops = ()
    constraint: Constraint | None = None
    logprobs: TopLogprobs | None = None
    prove: bool = False
    create: bool = False
    model: ModelName | None = None
    labels: Labels | None = None
    unnamed: bool = False
    priority: Priority = "normal"


class GenerateRequest(WritingRequest, Reporting):
    """Continue the session's text, after reading `text` or `tokens`, if there are some.

    max_tokens: at most so many, and fewer if there is no more memory; if None, 512, or as many as fit. prove: with the
        digests of the logits.
    sampling: given fields override the session's for this request; a seed begins random numbers of its own.
    constraint: what the text must match; an answer that max_tokens cut does not.
    logprobs: with the log-probability of each token, and of so many of the likeliest in its place.
    create: make the session if there is none of that name. model, labels: of a session that is made so; the default
        model if None. unnamed: as of `create`.
    raw: read `text` as the model's own: the name of a control token in it is that token.
    """

    _: KW_ONLY
    text: Text | None = None
    raw: bool = False
    tokens: AppendedTokens | None = None
    on_event: Listener = None

    def require(self) -> None:
        _require_creation(self)
        require_tellable(self.max_tokens, self.logprobs)
        if self.text is not None and self.tokens is not None:
            raise ValueError("give either text or tokens")


class ChatRequest(WritingRequest, Reporting):
    """One turn of a chat: a new message, or `messages`, the whole transcript up to the message to answer: maps of role
    and content; an assistant's may have reasoning and tool_calls, a tool's its tool_call_id. The daemon renders the
    template, and reads the new part.

    tools, template_arguments: of the conversation, with the transcript; None: the session's. tool_choice: which of them
        the answer may call. constraint: what the answer's text must match, if it is no call.

    on_divergence: for a transcript that differs from the session: refuse it, or rewind the session to the first
        difference; its present state stays as an earlier version. role: the role of `message`. max_tokens, sampling,
        logprobs, prove, create, model, labels: as for `generate`.
    """

    message: Text | None = None
    _: KW_ONLY
    role: Role = "user"
    messages: Messages | None = None
    tools: Tools | None = None
    template_arguments: JsonObject | None = None
    tool_choice: ToolChoice | None = None
    on_divergence: OnDivergence = "refuse"
    on_event: Listener = None

    def require(self) -> None:
        _require_creation(self)
        if (self.message is None) == (self.messages is None):
            raise ValueError("give either message or messages")
        require_tellable(self.max_tokens, self.logprobs)
        if self.messages is None and (self.tools is not None or self.template_arguments is not None):
            raise ValueError("tools and template_arguments go with messages; otherwise give them to create")
        require_root(self.tools, self.template_arguments)
        if self.messages is None and self.on_divergence != "refuse":
            raise ValueError("on_divergence is for messages; one new message cannot diverge")
        if self.messages is not None and self.role != "user":
            raise ValueError("role is that of message; messages have theirs")
        if self.messages is not None and self.messages[-1]["role"] == "assistant":
            raise ValueError("the last of messages is the assistant's, so there is nothing to answer")


class WhyRequest(Request):
    """How much of the prefixes of the session's last requests was kept, where one diverged, and why; also of requests
    before the daemon began, as far as the store's diary has them."""

    session: SessionText


class CausesRequest(Request):
    """What the requests of all sessions cost, also those before the daemon began, as far as the store's diary has them.

    since: only those that ended within this time: a number with s, min, h or d, such as `2h`. by: what is counted
    together. namespace: of its sessions alone.
    """

    _: KW_ONLY
    since: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    by: By = "cause"
    namespace: SessionText | None = None

    def require(self) -> None:
        if self.since is not None and not (_DURATION.fullmatch(self.since) and re.search("[1-9]", self.since)):
            raise ValueError("since is a number above 0 with s, min, h or d, as in 15min")


def _require_creation(request: AppendRequest | GenerateRequest | ChatRequest) -> None:
    if not request.create and (request.model is not None or request.labels is not None):
        raise ValueError("model and labels go with create")
