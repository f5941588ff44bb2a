"""One turn of a dialogue: finds the session that can go on with it, and asks.

This is the one place that chooses a session. A client may name it with `x-torpor-session`; without a name a new one is
made, and takes over what another session has read of the same beginning. A dialogue that differs from its session's is
answered by a fork of it, from where they part. No session goes back: another client may hold its other end.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...daemon.api.events import OnEvent
from ...daemon.api.reading import ChatRequest, GenerateResult
from ...daemon.api.session import SessionDetail, SessionInfo
from ...daemon.api.verbs import VERBS
from ...daemon.errors import ContextOverflow
from ...errors import TorporError
from ..errors import InvalidRequest
from ..server.dispatch import Backend
from .access import Caller

SESSION_HEADER: Final = "x-torpor-session"
_CHAT: Final = VERBS["chat"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A dialogue up to the message to answer, as the fields of a `chat`. model: None for the default. max_tokens: a
    ceiling, above what may fit; None for the daemon's default."""

    model: str | None
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()


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
    def cached_tokens(self) -> int:
        """How many of them were not read for this answer: the session had them, or took them over."""
        return self.prompt_tokens - self.result.prefilled_tokens


class Asking:
    """A turn that is being answered. session: its name so far; model: that of the session."""

    def __init__(self, backend: Backend, caller: Caller, turn: Turn, named: str | None, emit: OnEvent) -> None:
        self._backend = backend
        self._caller = caller
        self._turn = turn
        self._emit = emit
        self._is_new = named is None
        self.session = _new_name("chat") if named is None else named
        self.model = turn.model or ""

    async def answer(self) -> Answered:
        """Raises InvalidRequest, HttpRefused, and as `create`, `show`, `chat` and `fork` of the service."""
        request = await self._request()  # checked before a session is made for it
        await self._find_session()
        try:
            result = await self._ask(request)
        except TorporError as error:
            if error.code != "transcript_diverged":
                raise
            await self._branch(int(error.details["position"]))
            result = await self._ask(request)
        return Answered(self.model, result)

    async def _find_session(self) -> None:
        """Make the session, or see that it is on the wanted model."""
        if self._is_new:
            return await self._create()
        try:
            shown: SessionDetail = await self._verb("show", session=self.session)
        except TorporError as error:
            if error.code != "session_not_found":
                raise
            return await self._create()
        self._take_name(shown.info)
        if self._turn.model not in (None, self.model):
            raise InvalidRequest(
                f"Session {self.session} is on model {self.model!r}. Name that one as the model, or another session.",
                field="model",
            )
        return None

    async def _create(self) -> None:
        self._take_name(await self._verb("create", session=self.session, model=self._turn.model))

    async def _branch(self, position: int) -> None:
        """Go on in a new session that begins as the present one up to a token."""
        before = self.session
        namespace, slash, name = before.rpartition("/")
        self.session = f"{namespace}{slash}{_new_name(name)}"
        if position:
            await self._verb("fork", session=before, name=self.session, at_token=position)
        else:
            await self._create()

    async def _ask(self, request: ChatRequest) -> GenerateResult:
        """Ask for as many tokens as fit, if those that were asked for do not: `max_tokens` is a ceiling."""
        request = replace(request, session=self.session)
        try:
            return await self._backend.ask(_CHAT, request)
        except TorporError as error:
            asked = request.max_tokens
            if error.code != "context_overflow" or asked is None or error.details.get("at_least"):
                raise
            prompt_tokens = error.token_count + error.wanted_tokens - asked
            if prompt_tokens >= error.context_tokens:
                # With the dialogue's own size: clients shorten it by that.
                details = {**error.details, "wanted_tokens": error.wanted_tokens - asked}
                raise ContextOverflow(error.message, **details) from None
            left = error.context_tokens - prompt_tokens
        return await self._backend.ask(_CHAT, replace(request, max_tokens=left))

    async def _request(self) -> ChatRequest:
        turn = self._turn
        params = {
            "session": self.session,
            "messages": tuple(turn.messages),
            "tools": tuple(turn.tools),
            "template_arguments": dict(turn.template_arguments),
            "max_tokens": turn.max_tokens,
            "sampling": dict(turn.sampling) or None,
            "stop": tuple(turn.stop),
        }
        request = await self._caller.request_of(_CHAT, params)
        assert isinstance(request, ChatRequest)
        self.session = request.session  # with its namespace
        return request.told_to(self._emit)

    async def _verb(self, verb: str, **params: Any) -> Any:
        return await self._backend.ask(VERBS[verb], await self._caller.request_of(VERBS[verb], params))

    def _take_name(self, info: SessionInfo) -> None:
        self.session, self.model = info.session, info.model


def _new_name(beginning: str) -> str:
    """A name that no session has."""
    return f"{beginning[:40].partition('@')[0]}-{secrets.token_hex(8)}"
