"""Handlers for append, generate and chat; and for why they read again, and what they cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from ..api import reading as api
from ..api.causes import CausesResult, WhyResult
from ..api.constraints import FREE
from ..api.events import OnEvent, SessionEvent
from ..api.sampling import Sampling, new_seed
from ..chat.conversing import Behind, require_transcript, root_of
from ..chat.prompt_io import NEVER, Known
from ..engine import generation
from ..engine.generation import WriteOrder
from ..errors import EmptyContext, InvalidTokens, InvalidTranscript
from ..events.accounts import recomputed_tokens
from ..memory.line import Use
from ..models.grammars import AnswerForm, Matcher
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..sessions.transcripts import NewTurn, message_of
from ..tasks.pieces import in_pieces
from ..views import causes as views
from .answering import answers


@answers(api.AppendRequest, queued=True)
async def append(parts: Parts, request: api.AppendRequest) -> api.AppendResult:
    """Raises InvalidTokens, InvalidTranscript, ContextOverflow, GenerationFailed, and the errors of a wake."""
    if request.messages is None and (request.text is None) == (request.tokens is None):
        raise InvalidTokens("Give either text or tokens to append.")
    started = time.monotonic()
    awake = parts.sessions.woken(
        request.session,
        request.emit,
        create=request.create,
        model=request.model,
        labels=request.labels or (),
        durable=request.durable,
        unnamed=request.unnamed,
    )
    async with awake as (use, live):
        look, turn = parts.sessions.look(live), None
        if request.messages is not None:
            turn = await parts.sessions.conversing.behind(live, Behind(None), request.messages, live.chat.root)
            ids = list(turn.ids)
            if not ids:
                raise InvalidTokens(
                    "The model's chat template shows nothing of these messages, as of an empty answer, so there is "
                    "nothing to read. Leave them out, or send them with the message that follows."
                )
            if request.certain:
                parts.sessions.conversing.require_told(live, turn)
                await parts.sessions.recalling.require_certain(live, turn, len(request.messages))
        elif request.tokens is not None:
            ids = list(request.tokens)
        else:
            ids = await parts.models.encoder.text(live, request.text or "")
        await in_pieces(generation.require_valid(live.model, ids))
        await parts.sessions.reasons.note(live, "append", ids)
        async with _at(parts, use, live, turn, request.emit) as live:
            live = await parts.sessions.exchanges.room_for(use, live, len(ids), request.emit)
            if turn is None:
                cached, seconds = await parts.sessions.exchanges.read(live, ids, request.emit, turn_open=False)
            else:
                cached, seconds = await parts.sessions.exchanges.read_turn(live, turn, request.emit)
        return api.AppendResult(
            session=str(live.uri),
            tokens_added=len(ids),
            token_count=len(live.state.tokens),
            prefilled_tokens=len(ids) - cached,
            cached_tokens=cached,
            seconds=time.monotonic() - started,
            woken=use.woken,
            branched=look,
            recomputed_tokens=recomputed_tokens(),
            reading_seconds=seconds or None,
        )


@answers(api.GenerateRequest, queued=True)
async def generate(parts: Parts, request: api.GenerateRequest) -> api.GenerateResult:
    """Raises InvalidSampling, InvalidConstraint, InvalidTokens, EmptyContext, ContextOverflow, GenerationFailed, and
    the errors of a wake."""
    started = time.monotonic()
    awake = parts.sessions.woken(
        request.session,
        request.emit,
        create=request.create,
        model=request.model,
        labels=request.labels or (),
        unnamed=request.unnamed,
    )
    async with awake as (use, live):
        drawing, look = live.drawing(request.sampling), parts.sessions.look(live)
        matcher = await parts.models.encoder.matcher(live.model, AnswerForm(request.constraint, FREE))
        ids = list(request.tokens or ())
        if request.text:
            ids = await parts.models.encoder.text(live, request.text, raw=request.raw)
        if ids:
            await in_pieces(generation.require_valid(live.model, ids))
        if not ids and not live.state.tokens:
            raise EmptyContext(f"{live.uri} has read nothing yet; append a text to it first.", session=str(live.uri))
        await parts.sessions.reasons.note(live, "generate", ids)
        count = generation.count_to_write(live.model, len(live.state.tokens) + len(ids), request.max_tokens)
        live = await parts.sessions.exchanges.room_for(use, live, len(ids), request.emit, to_write=count)
        read = (0, 0)
        if ids:
            has_read = await parts.sessions.exchanges.read(live, ids, request.emit, turn_open=False)
            read = (len(ids), has_read.cached_tokens)
        order = _order(request, count, drawing, matcher)
        return await parts.sessions.exchanges.write(
            use, live, order, request.emit, read=read, started=started, look=look
        )


@answers(api.ChatRequest, queued=True)
async def chat(parts: Parts, request: api.ChatRequest) -> api.GenerateResult:
    """Raises InvalidSampling, InvalidConstraint, InvalidTranscript, TranscriptDiverged, TemplateUnusable,
    ContextOverflow, GenerationFailed, and the errors of a wake."""
    return await answer(parts, request, request.model, labels=request.labels or ())


async def answer(
    parts: Parts,
    request: api.ChatRequest,
    model: str | None = None,
    *,
    behind: Behind | None = None,
    known: Known = NEVER,
    durable: bool = False,
    labels: Sequence[str] = (),
    marked: Sequence[int] = (),
    volatile: str | None = None,
    fitting: bool = False,
) -> api.GenerateResult:
    """One turn of a chat. model, labels, durable: as of `SessionParts.woken`. behind: where the messages stand, if they
    are no whole transcript. known: by what it is known again, to go on where it was given up. marked: behind how many
    messages of a whole transcript it has marks. volatile: lines that this has beside them. fitting: `max_tokens` may be
    above what fits. Raises as `chat`."""
    if (request.message is None) == (request.messages is None):
        raise InvalidTranscript("Give either a message or messages, the whole transcript.")
    if request.messages is not None:
        require_transcript(request.messages)
    started = time.monotonic()
    awake = parts.sessions.woken(
        request.session,
        request.emit,
        create=request.create,
        model=model,
        labels=labels,
        durable=durable,
        unnamed=request.unnamed,
    )
    async with awake as (use, live):
        drawing, look = live.drawing(request.sampling), parts.sessions.look(live)
        tools = root_of(live.chat.root, request.tools, request.template_arguments).tools
        form = AnswerForm(request.constraint, request.tool_choice or FREE, tools)
        matcher = await parts.models.encoder.matcher(live.model, form)
        turn = await _turn(parts, live, request, behind, known.request, marked, volatile)
        known = replace(known, begins_at=turn.begins_at)
        count = generation.count_to_write(live.model, turn.at + len(turn.ids), request.max_tokens, fitting=fitting)
        parts.sessions.conversing.require_room(live, turn, count)
        if behind is not None and known.answer_id:
            parts.sessions.conversing.require_told(live, turn)
        if known.request is not None:
            request.emit(SessionEvent(str(live.uri), recomputed_tokens()))
        rewinds = _goes_back(live, turn)
        async with _at(parts, use, live, turn, request.emit) as live:
            to_read, has_written = len(turn.ids), len(turn.begun)
            live = await parts.sessions.exchanges.room_for(
                use, live, to_read, request.emit, to_write=count, has_written=has_written, marks=turn.marks
            )
            has_read = await parts.sessions.exchanges.read_turn(live, turn, request.emit, known)
            if rewinds:
                parts.sessions.reasons.went_back(live.uri)
            order = _order(request, count, drawing, matcher)
            if known.request is not None:
                order = _by_own_seed(live, order, goes_on=bool(turn.begun))
            order = replace(order, keep_end=True, root=turn.root, begun=turn.begun, answer_id=known.answer_id)
            order = replace(order, one_call=not form.choice.parallel)
            read = (to_read, has_read.cached_tokens)
            result = await parts.sessions.exchanges.write(
                use, live, order, request.emit, read=read, started=started, look=look, known=known
            )
        return replace(result, rewound_to=turn.at) if rewinds else result


def _goes_back(live: Session, turn: NewTurn) -> bool:
    """Whether a turn stands before the session's end."""
    return turn.kept < len(live.state.tokens)


@asynccontextmanager
async def _at(parts: Parts, use: Use, live: Session, turn: NewTurn | None, emit: OnEvent) -> AsyncIterator[Session]:
    """The session where a turn stands; on a failure before anything is read there, it is as it was."""
    if turn is None or not _goes_back(live, turn):
        yield live
        return
    try:
        back = await parts.sessions.conversing.go_back(use, live, turn, emit)
        # A message may end before the turn that was opened behind it.
        back.chat = replace(back.chat, text_map=turn.text_map.cut(turn.at))
        yield back
    except BaseException:
        parts.sessions.conversing.leave_asleep(live)
        raise


async def _turn(
    parts: Parts,
    live: Session,
    request: api.ChatRequest,
    behind: Behind | None,
    digest: bytes | None,
    marked: Sequence[int],
    volatile: str | None,
) -> NewTurn:
    """The turn of a chat; it stands among the session's reasons then."""
    root = root_of(live.chat.root, request.tools, request.template_arguments)
    if request.messages is None:
        turn = await parts.sessions.conversing.message(live, message_of(request.role, request.message or ""))
    elif behind is not None:
        turn = await parts.sessions.conversing.behind(live, behind, request.messages, root, digest)
    else:
        turn = await parts.sessions.conversing.transcript(live, request.messages, root, digest, marked, volatile)
    refusing = request.messages is not None and request.on_divergence == "refuse"
    # Of a transcript that names no session, lines can be said elsewhere.
    system = turn.text_map.system if digest is not None else None
    await parts.sessions.reasons.note(live, "chat", turn.ids, turn.kept, turn.common, refusing=refusing, system=system)
    if request.messages is not None and refusing:
        parts.sessions.conversing.require_no_divergence(live, turn, request.messages)
    return turn


@answers(api.WhyRequest)
async def why(parts: Parts, request: api.WhyRequest) -> WhyResult:
    """Raises SessionNotFound."""
    uri = parts.sessions.resolve(request.session)
    known = parts.sessions.reasons.of(uri)
    return await parts.store.on_look(partial(views.why, parts.store.disk, uri, known))


@answers(api.CausesRequest)
async def causes(parts: Parts, request: api.CausesRequest) -> CausesResult:
    """Raises ServiceClosed."""
    parts.door.require_open()
    look = partial(views.causes, since=request.since, by=request.by, namespace=request.namespace)
    return await parts.store.on_look(partial(look, parts.store.disk))


def _order(request: api.WritingRequest, count: int, drawing: Sampling, matcher: Matcher | None) -> WriteOrder:
    """What both write. matcher: at the beginning of the grammar that the answer is held to."""
    return WriteOrder(
        count,
        drawing,
        tuple(request.stop),
        request.prove,
        alone=request.prove,
        seeded=request.sampling is not None and "seed" in request.sampling.named(),
        matcher=matcher,
        logprobs=request.logprobs,
    )


def _by_own_seed(live: Session, order: WriteOrder, *, goes_on: bool) -> WriteOrder:
    """An order for an answer that nobody gave a seed, to draw by a new one: who asks twice wants two answers. goes_on:
    with what was drawn before it was cut off, and by the same seed."""
    if order.seeded or order.sampling.seed or not order.sampling.temperature:
        return order
    midway = live.left_midway if goes_on else None
    seed = midway.seed if midway is not None else None
    sampling = replace(order.sampling, seed=new_seed() if seed is None else seed)
    return replace(order, sampling=sampling, seeded=True)
