"""One turn of a dialogue: which session goes on with it, and the request to the daemon.

This is the one place that chooses a session. `converse` finds it by what was said. The names that clients give to their
conversations only say under which name a new session begins, and which sessions may be gone on with: titles and
sub-agents come under one name with other dialogues. An API key names nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from ...daemon.api.conversing import ConverseRequest, MeasureResult
from ...daemon.api.events import OnEvent
from ...daemon.api.reading import GenerateResult
from ...daemon.api.verbs import VERBS
from ...daemon.errors import ContextOverflow
from ...daemon.tasks.cancellation import in_any_case
from ...errors import TorporError
from ..errors import HttpRefused
from ..server.dispatch import Backend
from .access import Caller

SESSION_HEADER: Final = "x-torpor-session"
VOLATILE_HEADER: Final = "x-torpor-volatile"
"""With `off`, the volatile lines of the system text stay where they are."""

_OFF: Final = "off"
ANY_CONVERSATION: Final = "chat"
"""The name for conversations of clients that give none."""

LABEL: Final = "http"
"""Of the sessions of such conversations."""

_NAMING: Final = ("x-claude-code-session-id", "session-id", "session_id", "x-session-id")
"""Headers with a client's name for a conversation, the first that is given."""

_AGENT: Final = "x-claude-code-agent-id"
_MEASURE, _CONVERSE, _DELETE = VERBS["measure"], VERBS["converse"], VERBS["delete"]
_MOST_NAME_CHARS = 64
_MINTED = re.compile(r"(?:[a-z]{2,4}_)?([0-9a-f]{32})(?:_[0-9]{1,6}){0,2}")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


_UNSTORED: Final = "f"
"""The first digit of the name of an answer that is no stored response: the digit of a time in some centuries."""


def new_answer_id() -> str:
    """A new name for a stored response, or for a conversation. It begins with its time, in milliseconds."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def unstored_answer_id() -> str:
    """A new name for another answer: it finds the session when it comes back, and no client is told of a response of
    this name."""
    return f"{_UNSTORED}{new_answer_id()[1:]}"


def is_stored(answer_id: str) -> bool:
    """Whether it names a stored response."""
    return not answer_id.startswith(_UNSTORED)


def answer_in(minted: str | None) -> str | None:
    """The answer's id in an id that we made of it; None for another text."""
    match = _MINTED.fullmatch(minted or "")
    return match[1] if match is not None else None


def time_of(answer_id: str) -> int:
    """When an answer was asked for, in seconds of Unix time."""
    return int(answer_id[1:12], 16) // 1000


@dataclass(frozen=True, slots=True)
class SessionName:
    """The name for a client's conversation. unnamed: nobody chose it for Torpor: it is made of an id that the client
    has for itself, or of nothing."""

    text: str
    unnamed: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """A dialogue up to the message to answer, as the fields of `converse`. model: None for the default. max_tokens: a
    ceiling, above what may fit; None for the daemon's default. named: the client's name for it in the body. answer_id:
    names the answer; all ids that a client gets are made of it. after, instructions, durable: as of `converse`.
    constraint, tool_choice: what the answer is held to. logprobs: as of `generate`. checkpoints, keep_awake_s,
    volatile: as of `converse`. session: that at whose end it stands, if it is bound to one."""

    messages: Sequence[Mapping[str, Any]]
    model: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    constraint: Mapping[str, str] | None = None
    tool_choice: Mapping[str, Any] | None = None
    logprobs: int | None = None
    named: str | None = None
    answer_id: str = field(default_factory=unstored_answer_id)
    after: str | None = None
    instructions: str | None = None
    durable: bool = False
    session: SessionName | None = None
    checkpoints: Sequence[int] = ()
    keep_awake_s: float | None = None
    volatile: str | None = None

    def under(self, headers: Mapping[str, str]) -> Turn:
        """The turn as the headers of its request want it. Raises HttpRefused."""
        word = headers.get(VOLATILE_HEADER)
        if word not in (None, _OFF):
            raise HttpRefused(f"{VOLATILE_HEADER} is {_OFF!r} or left out, and this is neither.", status=400)
        return self if word is None else replace(self, volatile="")

    def asking(self, backend: Backend, caller: Caller, headers: Mapping[str, str], model: str, emit: OnEvent) -> Asking:
        """The requests that answer it."""
        name = self.session or name_for(headers, self.named)
        return _Conversing(backend, caller, self.under(headers), name, model, emit)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of a model."""

    model: str
    result: GenerateResult

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the dialogue before the answer."""
        return self.result.token_count - len(self.result.tokens)

    @property
    def recomputed_tokens(self) -> int:
        """How many of them the session had, and were computed again for this answer."""
        return self.result.recomputed_tokens

    @property
    def recomputed(self) -> dict[str, Any]:
        """The same as usage tells it, with the reason where there is one."""
        woken = self.result.woken
        because = None if woken is None else woken.recomputed_because
        return {"recomputed_tokens": self.recomputed_tokens, **({"recomputed_because": because} if because else {})}

    @property
    def cached_tokens(self) -> int:
        """How many of them were not computed for this answer: the session had them, or took them over."""
        return max(0, self.prompt_tokens - self.computed_tokens)

    @property
    def computed_tokens(self) -> int:
        """How many of them were computed for this answer, again or for the first time."""
        return min(self.prompt_tokens, self.result.prefilled_tokens + self.recomputed_tokens)


class Asking(ABC):
    """A request for an answer, while it is carried out. session: the name for it; unnamed: as of `SessionName`. chosen:
    the session that answers, once it is certain; recomputed_tokens: how many tokens of it were computed again, as known
    then. model: the name of its model, until that is known maybe an alias. measured: the tokens before the answer, once
    they are known."""

    def __init__(self, backend: Backend, caller: Caller, name: SessionName, model: str, emit: OnEvent) -> None:
        self.backend = backend
        self.caller = caller
        self.session, self.unnamed = name.text, name.unnamed
        self.chosen: str | None = None
        self.recomputed_tokens = 0
        self.model = model
        self.emit = emit
        self.measured: MeasureResult | None = None

    @abstractmethod
    async def answer(self) -> Answered:
        """Carry it out."""


class Asked(Protocol):
    """What a client asks for. model: None for the default."""

    @property
    def model(self) -> str | None: ...

    def asking(
        self, backend: Backend, caller: Caller, headers: Mapping[str, str], model: str, emit: OnEvent
    ) -> Asking: ...


class _Conversing(Asking):
    def __init__(
        self, backend: Backend, caller: Caller, turn: Turn, name: SessionName, model: str, emit: OnEvent
    ) -> None:
        super().__init__(backend, caller, name, model, emit)
        self._turn = turn

    async def answer(self) -> Answered:
        """Raises InvalidRequest, HttpRefused, and as `measure` and `converse` of the service."""
        request = await self._request()
        self.measured = await measure(self.backend, self.caller, self._turn, self.session, self.model)
        self.model = self.measured.model
        if self.measured.unheld and request.tool_choice is not None:
            request = replace(request, tool_choice=request.tool_choice.without_strict(self.measured.unheld))
        if self.measured.tokens >= self.measured.context_tokens:
            raise overflow(self.measured)
        result = await self.backend.ask(_CONVERSE, request)
        self.chosen = result.session
        return Answered(self.model, result)

    async def _request(self) -> ConverseRequest:
        turn = self._turn
        params = {
            **_dialogue(turn, self.session, self.model),
            "answer_id": turn.answer_id,
            "durable": turn.durable,
            "labels": (LABEL,) if self.session == ANY_CONVERSATION else None,
            "unnamed": self.unnamed,
            "checkpoints": tuple(turn.checkpoints),
            "keep_awake_s": turn.keep_awake_s,
        }
        request = await self.caller.request_of(_CONVERSE, params)
        assert isinstance(request, ConverseRequest)
        self.session = request.session  # with its namespace
        return request.told_to(self.emit)


@asynccontextmanager
async def taken_back(backend: Backend, caller: Caller, session: str) -> AsyncIterator[None]:
    """Delete a new session if what it was made for fails: the client has got no name of it."""

    async def delete() -> None:
        with suppress(TorporError):  # it was never made, or is gone already
            await backend.ask(_DELETE, await caller.request_of(_DELETE, {"session": session}))

    try:
        yield
    except BaseException:
        await in_any_case(delete())
        raise


async def measure(backend: Backend, caller: Caller, turn: Turn, session: str, model: str) -> MeasureResult:
    """The tokens of a turn before its answer. Raises as `measure` of the service."""
    return await backend.ask(_MEASURE, await caller.request_of(_MEASURE, _dialogue(turn, session, model)))


def overflow(measured: MeasureResult) -> ContextOverflow:
    """The error of a dialogue that leaves no room for an answer."""
    return ContextOverflow(
        f"The messages have {measured.tokens:,} tokens, and the context of the model ends at"
        f" {measured.context_tokens:,}."
        " Send fewer.",
        token_count=0,
        wanted_tokens=measured.tokens,
        context_tokens=measured.context_tokens,
    )


def name_for(headers: Mapping[str, str], in_body: str | None) -> SessionName:
    """The name under which a client's conversation begins: the one it gives on purpose, or one made of its own id."""
    if (chosen := headers.get(SESSION_HEADER)) is not None:
        return SessionName(chosen, unnamed=False)
    own_id = next((headers[name] for name in _NAMING if headers.get(name)), None) or in_body
    agent = headers.get(_AGENT)
    return SessionName(_as_name(f"{own_id}-{agent}" if own_id and agent else own_id) if own_id else ANY_CONVERSATION)


def _dialogue(turn: Turn, session: str, model: str) -> dict[str, Any]:
    """What `measure` and `converse` are both asked."""
    return {
        "session": session,
        "messages": tuple(turn.messages),
        "tools": None if turn.tools is None else tuple(turn.tools),
        "template_arguments": dict(turn.template_arguments),
        "model": turn.model if turn.after or turn.session else model,
        "after": turn.after,
        "at_end": turn.session is not None,
        "instructions": turn.instructions,
        "volatile": turn.volatile,
        "tool_choice": turn.tool_choice,
        "max_tokens": turn.max_tokens,
        "sampling": dict(turn.sampling) or None,
        "stop": tuple(turn.stop),
        "constraint": turn.constraint,
        "logprobs": turn.logprobs,
    }


def _as_name(client_id: str) -> str:
    """A session's name for an id of a client. One that cannot be a name itself has a digest in it, so that no two ids
    share a name."""
    name = _ODD.sub("-", client_id).lstrip("._-")[:_MOST_NAME_CHARS]
    digest = hashlib.sha256(client_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name if name == client_id else f"{name or ANY_CONVERSATION}-{digest}"
