"""Events: the progress of a request before its answer, and notices of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NoReturn, Self

from pydantic import Field, PlainValidator

from ...records import Count, Result
from .dialogue import Channel, ToolCall
from .logprobs import TokenLogprobs
from .records import Request
from .sampling import TokenId

Stage = Literal["prefill", "sleep", "wake", "analyze", "download", "handover"]


class ProgressEvent(Result):
    """How far a stage is; `done` and `total` are tokens for prefill and sleep, seconds for a handover (those waited and
    the most that it may take), bytes for the others. machine: that is asked for the session, for a handover."""

    stage: Stage
    done: Count
    total: Count
    machine: str | None = None
    kind: Literal["progress"] = "progress"


class TokenEvent(Result):
    """One token that has been committed to the ledger; `text` is the text that it adds, and may be empty.

    `token` is None for text without a token of its own: what was held back as a possible beginning of a stop string or
    a mark, or half a character. So the pieces of the channel `text` make up the whole text. channel: who is spoken to.
    A mark belongs to the channel that it begins or ends. call: a call of a tool, once it is whole; its tokens before
    add no text. logprobs: of the token, if they were asked for. branch: of a tree, whose token it is; None for a
    session's.
    """

    token: TokenId | None
    text: str
    channel: Channel = "text"
    call: ToolCall | None = None
    logprobs: TokenLogprobs | None = None
    branch: int | None = None
    kind: Literal["token"] = "token"


class SessionEvent(Result):
    """The session in which `converse` answers, once that is certain: before anything is read or written for it.

    recomputed_tokens: tokens of it that were computed again to wake it.
    """

    session: str
    recomputed_tokens: Count = 0
    kind: Literal["session"] = "session"


class NoticeEvent(Result):
    """An event in the daemon, for a subscription. docs/reference/protocol.md lists the names and the facts of each; a
    newer daemon may send more of both.

    number: grows by one with each event that a subscriber can get. monotonic_s, time_ns: its time, by the daemon's
    monotonic clock and by the Unix clock. request: the number of the request that caused it, the same for all its
    events; None without one. session: its URI; None for an event about no session.
    """

    name: str
    number: Count
    monotonic_s: float
    time_ns: int
    request: int | None
    session: str | None
    facts: dict[str, str | int | float | bool | None]
    kind: Literal["notice"] = "notice"


WorkEvent = ProgressEvent | TokenEvent | SessionEvent
"""The events of a request for a session."""

Event = Annotated[ProgressEvent | TokenEvent | SessionEvent | NoticeEvent, Field(discriminator="kind")]

OnEvent = Callable[[WorkEvent], None]
"""Called with each event of a request, in their order: on the daemon's event loop, or by the client that waits."""


def ignore(_event: object) -> None:
    """Drop an event."""


def _refuse(_value: Any) -> NoReturn:
    raise ValueError("there is no such field; leave it out")


Listener = Annotated[OnEvent | None, PlainValidator(_refuse)]
"""The caller's function for the events of a request. It never crosses the wire."""

NEVER_SENT: Final = frozenset({"on_event"})
"""The fields of requests that never cross the wire."""


class Reporting(Request):
    """A request that reports its progress. Each has `on_event: Listener = None` as its last field."""

    @property
    def on_event(self) -> Listener:
        raise NotImplementedError

    @property
    def emit(self) -> OnEvent:
        """The function to call with the request's events."""
        return self.on_event or ignore

    def told_to(self, listener: OnEvent) -> Self:
        """The same request with another listener."""
        changed: dict[str, Any] = {"on_event": listener}  # a field of the classes built on this one
        return replace(self, **changed)
