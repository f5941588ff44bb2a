"""Verbs for clients that send the whole transcript each time, and know no session."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from .dialogue import JsonObject, Messages, Tools, require_root
from .events import Listener, Reporting
from .reading import MaxTokens, Stops
from .records import Count, ModelName, Priority, Request, Result, SessionText
from .sampling import NamedSampling


@dataclass(frozen=True, slots=True)
class MeasureResult(Result):
    """The tokens of a transcript, and how many of them a session has read already. context_tokens: of the model;
    model: its own name, also where the request gives an alias."""

    tokens: Count
    cached_tokens: Count
    context_tokens: Count
    model: ModelName


@dataclass(frozen=True, slots=True)
class ConverseRequest(Reporting):
    """Answer a whole transcript, in the session that has read the most of it. A transcript that leaves that session's
    way goes on in a fork; one that no session knows begins a new one. No session is ever taken back.

    session: the name for new sessions. If it is taken, they are called NAME-xxxxxxxx. A session of another name is
        forked, not gone on with. messages, tools, template_arguments, max_tokens, sampling: as for `chat`.
    model: the daemon's first if None. The `session` of the result is where the conversation stands now.
    """

    session: SessionText
    messages: Messages
    _: KW_ONLY
    tools: Tools = ()
    template_arguments: JsonObject | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    sampling: NamedSampling | None = None
    stop: Stops = ()
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        require_root(self.tools, self.template_arguments)


@dataclass(frozen=True, slots=True)
class MeasureRequest(Request):
    """Count the tokens of a transcript as `converse` would read it; nothing is read. session: as for `converse`."""

    session: SessionText
    messages: Messages
    _: KW_ONLY
    tools: Tools = ()
    template_arguments: JsonObject | None = None
    model: ModelName | None = None

    def require(self) -> None:
        require_root(self.tools, self.template_arguments)
