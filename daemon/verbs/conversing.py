"""Handlers for converse and measure: the session of a transcript is found by what was said."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ...errors import TorporError
from ...memvid.errors import SessionNotFound
from ...memvid.uri import SessionUri, parse_reference
from ..api.conversing import ConverseRequest, MeasureRequest, MeasureResult
from ..api.forking import ForkRequest
from ..api.reading import ChatRequest, GenerateResult
from ..chat.conversing import require_transcript
from ..engine.cancellation import to_the_end
from ..errors import TranscriptDiverged
from ..memory.line import Use
from ..models.chat_template import Root
from ..parts import Parts
from ..prefixes.heads import Head
from ..sessions.encoding import Place
from .answering import answers
from .forking import fork
from .reading import answer

_MOST_TRIED: Final = 4
"""Heads that are tried before a new session reads the transcript."""

_SUFFIX_BYTES: Final = 4


@answers(ConverseRequest, queued=True)
async def converse(parts: Parts, request: ConverseRequest) -> GenerateResult:
    """Raises InvalidTranscript, UnknownModel, and the errors of a chat and of a fork; a fork that answers nothing is
    taken back."""
    require_transcript(request.messages)
    wanted, model = parse_reference(request.session), parts.place_for(request.model).name
    await parts.heads.learned()
    tried: set[SessionUri] = set()
    while True:
        head = _best(parts, request, wanted, model, tried)
        if head is None:
            return await _chat(parts, request, _new_name(parts, wanted), model)
        tried.add(head.uri)
        # Another request may have gone on from there meanwhile, or deleted the session.
        with suppress(TranscriptDiverged, SessionNotFound):
            if head.is_last and _is_of_group(head.uri, wanted):
                return await _chat(parts, request, head.uri, None)
            return await _chat_in_fork(parts, request, head, _new_name(parts, wanted))


@answers(MeasureRequest)
async def measure(parts: Parts, request: MeasureRequest) -> MeasureResult:
    """Raises InvalidTranscript, UnknownModel, TemplateUnusable, ContextOverflow, and the errors of the model's load."""
    require_transcript(request.messages)
    wanted, model, root = parse_reference(request.session), parts.place_for(request.model).name, _root_of(request)
    await parts.heads.learned()
    heads = parts.heads.find(wanted.namespace, model, root, request.messages)
    claim = Use(_fresh(wanted), next(parts.residency.memory.numbers))
    async with parts.residency.models.using(model, claim) as loaded:
        beginning = Place(0, None, turn_open=False)
        ids = await parts.encoder.messages(loaded, request.messages, beginning, root)
        cached = min(len(ids), max((head.at for head in heads), default=0))
        return MeasureResult(len(ids), cached, loaded.context_tokens, model)


def _best(
    parts: Parts, request: ConverseRequest, wanted: SessionUri, model: str, tried: set[SessionUri]
) -> Head | None:
    """The head to go on from: where no fork is needed, if there is one."""
    if len(tried) >= _MOST_TRIED:
        return None
    heads = parts.heads.find(wanted.namespace, model, _root_of(request), request.messages)
    left = [head for head in heads if head.uri not in tried]
    return max(
        left, key=lambda head: (head.is_last and _is_of_group(head.uri, wanted), head.uri == wanted), default=None
    )


async def _chat(parts: Parts, request: ConverseRequest, uri: SessionUri, model: str | None) -> GenerateResult:
    """Answer in a session; model: of a new one."""
    asked = ChatRequest(
        session=str(uri),
        messages=request.messages,
        tools=request.tools,
        template_arguments=request.template_arguments or {},
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop=request.stop,
        priority=request.priority,
        create=model is not None,
        on_event=request.on_event,
    )
    return await answer(parts, asked, model)


async def _chat_in_fork(parts: Parts, request: ConverseRequest, head: Head, name: SessionUri) -> GenerateResult:
    """Answer in a fork, which is deleted again if nothing was read or written in it."""
    made = await fork(parts, ForkRequest(session=str(head.uri), name=str(name), at_token=head.at))
    await parts.heads.learn(name)
    try:
        return await _chat(parts, request, name, None)
    except BaseException:
        live = parts.residency.awake.get(name)
        if live is None or len(live.state.tokens) <= made.token_count:
            with suppress(TorporError):
                await to_the_end(parts.delete_session(name))
        raise


def _new_name(parts: Parts, wanted: SessionUri) -> SessionUri:
    """The wanted name if it is free, else one of its group."""
    taken = wanted in parts.residency.awake or parts.store.find_session(wanted) is not None
    return _fresh(wanted) if taken else wanted


def _fresh(wanted: SessionUri) -> SessionUri:
    return SessionUri(wanted.namespace, f"{wanted.name}-{secrets.token_hex(_SUFFIX_BYTES)}")


def _is_of_group(uri: SessionUri, wanted: SessionUri) -> bool:
    """Whether a session may be gone on with under a name: it has the name, or was made for it."""
    made = rf"{re.escape(wanted.name)}(-[0-9a-f]{{{2 * _SUFFIX_BYTES}}})?"
    return uri.namespace == wanted.namespace and re.fullmatch(made, uri.name) is not None


def _root_of(request: ConverseRequest | MeasureRequest) -> Root:
    tools: Sequence[Any] = request.tools
    return Root(tuple(tools), request.template_arguments or {})
