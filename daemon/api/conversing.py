"""Verbs for clients that send the whole transcript each time, and know no session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

from ...records import Count, Listed, Result
from .constraints import Constraint, ToolChoice
from .dialogue import AnswerId, Content, JsonObject, Messages, ToolName, Tools, require_root
from .events import Listener, Reporting
from .limits import MAX_CHECKPOINTS, MAX_KEEP_AWAKE_S, MAX_MESSAGES
from .logprobs import TopLogprobs, require_tellable
from .reading import MaxTokens, Stops
from .records import Labels, ModelName, NamedSampling, Priority, Request, SessionText, Text

Checkpoints = Annotated[
    Sequence[Annotated[int, Field(ge=0, le=MAX_MESSAGES)]], Listed(), Field(max_length=MAX_CHECKPOINTS)
]
KeepAwake = Annotated[float, Field(ge=0, le=MAX_KEEP_AWAKE_S)]


class MeasureResult(Result):
    """The tokens of a transcript, and how many of them a session has read already. context_tokens: of the model;
    model: its own name, also where the request gives an alias. unheld: the tools of `tool_choice.strict` that the model
    cannot be held to; `converse` refuses them."""

    tokens: Count
    cached_tokens: Count
    context_tokens: Count
    model: ModelName
    unheld: tuple[ToolName, ...] = ()


class TranscriptRequest(Request):
    """Base of what has a whole transcript."""

    session: SessionText
    messages: Messages
    _: KW_ONLY
    tools: Tools | None = None
    template_arguments: JsonObject | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    sampling: NamedSampling | None = None
    stop: Stops = ()
    constraint: Constraint | None = None
    logprobs: TopLogprobs | None = None
    tool_choice: ToolChoice | None = None
    after: AnswerId | None = None
    at_end: bool = False
    instructions: Text | None = None
    volatile: Content | None = None

    def require(self) -> None:
        require_root(self.tools, self.template_arguments)
        if self.at_end and self.after is not None:
            raise ValueError("after and at_end are two places; give one of them")
        if self.instructions is not None and self.after is None and not self.at_end:
            raise ValueError("instructions go with after or at_end; without these, give them as the first message")


class ConverseRequest(TranscriptRequest, Reporting):
    """Answer a whole transcript, in the session that has read the most of it. A transcript that leaves that session's
    way goes on in a fork; one that no session knows begins a new one. What a session has read and written stays in it.
    The same request again, after it was cancelled, goes on from what was read and written of it; the written part is
    told again.

    With `after`, the messages are those behind an answer: its session goes on, or a fork, if it went on already. Tools
    and template arguments that are left out stay; others hold from there on, an empty value too.

    session: the name for new sessions. If it is taken, they are called NAME-xxxxxxxx. A session of another name is
        forked, not gone on with. messages, tools, template_arguments, tool_choice, constraint, max_tokens, sampling: as
        for `chat`, but max_tokens may be above what fits. If neither the request nor the session gives a seed, the
        answer draws by a new one, and the result tells it. logprobs: too, but an answer with them that was cut off
        begins anew, in a fork.
    answer_id: names the answer, for a later `after` and for `recall`. after: the id of the answer before the messages.
    at_end: the messages go on behind all that `session` holds, whatever that is; it was made before.
    instructions: with `after` or `at_end`, a system text, which is said unless it was the last that was.
    durable: give the answer once it is durable, though the daemon serves with another `--durability`.
    volatile: lines that change with each request, such as the time. They are said before the newest question, unless
        they are the last that were said so. None: those lines of the opening system texts, or of `instructions`, that
        the daemon's configuration names are taken from there. Empty: none are.
    labels: of a session that begins for it, anew or as a fork. unnamed: as of `create`.
    checkpoints: behind how many of the messages, of a whole transcript, a model that cannot go back to every token is
        to keep its state. keep_awake_s: for so long nothing but a need of memory puts the session to sleep.
    model: the daemon's first if None, or that of `after`. The `session` of the result is where the conversation stands.
    """

    _: KW_ONLY
    answer_id: AnswerId | None = None
    durable: bool = False
    labels: Labels | None = None
    unnamed: bool = False
    checkpoints: Checkpoints = ()
    keep_awake_s: KeepAwake | None = None
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        super().require()
        require_tellable(self.max_tokens, self.logprobs)


class MeasureRequest(TranscriptRequest):
    """Count the tokens of a transcript as `converse` would read it; nothing is read. Its fields are as for
    `converse`. By those that decide only the answer, a request that was given up is known again: it goes on, and
    another one stands behind it."""
