"""Handlers for converse and measure: the session of a transcript is found by what was said."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeVar

from ...errors import TorporError
from ...memvid.errors import SessionNotFound
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.limits import MAX_NAME_CHARS
from ...memvid.uri import VERSION_MARK, SessionUri, parse_reference
from ...snapshot.errors import NotEnoughMemory
from ..api.constraints import FREE
from ..api.conversing import ConverseRequest, MeasureRequest, MeasureResult, TranscriptRequest
from ..api.events import SessionEvent, WorkEvent
from ..api.forking import ForkRequest
from ..api.reading import ChatRequest, GenerateResult
from ..api.sampling import Sampling
from ..chat.conversing import Behind, Dialogue, behind_kept, require_transcript, root_of, said_behind
from ..chat.prompt_io import Known
from ..chat.volatile import opening_parted, parted, with_volatile
from ..engine.sampler import initial_key
from ..errors import EngineBusy, InvalidTranscript, MemoryBudgetExceeded, MemoryBusy, ServiceClosed, TranscriptDiverged
from ..models.chat_template import Message, Root
from ..models.grammars import AnswerForm
from ..models.models import LoadedModel
from ..options.line_patterns import KNOWN_VOLATILE, matcher_of
from ..parts.parts import Parts
from ..prefixes.heads import Chain, Head, digest_of_request
from ..prefixes.prefixes import tokens_in_common
from ..sessions.encoding import Place
from ..sessions.said import RECALLED, digested
from ..sessions.sessions import Session
from ..sessions.transcripts import TextMap, overlap_of
from ..tasks.cancellation import to_the_end
from ..tasks.pieces import in_pieces
from .answering import answers
from .forking import fork
from .reading import answer
from .recalling import answer_not_found

_MOST_TRIED: Final = 4
"""Heads that are tried before a new session reads the transcript."""

_SUFFIX_BYTES: Final = 4

Asked = TypeVar("Asked", bound=TranscriptRequest)


@answers(ConverseRequest, queued=True)
async def converse(parts: Parts, request: ConverseRequest) -> GenerateResult:
    """Raises InvalidTranscript, UnknownModel, AnswerNotFound, and the errors of a chat and of a fork; a fork that
    answers nothing is taken back."""
    request = await _prepared(parts, request)
    wanted, model = parse_reference(request.session), parts.models.place_for(request.model).name
    digest = await parts.models.encoder.aside(partial(_digest_of, request, model))
    if request.at_end:
        dialogue = await _dialogue(parts, request, wanted, model)
        behind = Behind(None, request.instructions, request.volatile)
        return await _chat(parts, request, dialogue.uri, None, digest, behind)
    await parts.sessions.heads.learned()
    request, chain = await _as_thought(parts, request, wanted, model)
    for midway in parts.sessions.heads.left_midway(wanted.namespace, digest)[:_MOST_TRIED]:
        if _may_go_on(request, midway, wanted) and not parts.sessions.turns.is_busy(midway.uri):
            attempt = _Attempt(request)
            with attempt:
                return await _chat(parts, attempt.asked, midway.uri, None, digest, _behind(request, midway))
    tried: set[Head] = set()
    while (head := _best(parts, request, wanted, model, chain, tried)) is not None:
        tried.add(head)
        attempt = _Attempt(request)
        with attempt:
            if _goes_on(parts, request, head, wanted):
                return await _chat(parts, attempt.asked, head.uri, None, digest, _behind(request, head))
            if (place := await _farthest(parts, request, head, wanted, chain)) is None:
                break
            return await _chat_in_fork(parts, attempt.asked, place, _new_name(parts, wanted), digest)
    return await _chat(parts, request, _new_name(parts, wanted), model, digest)


async def _prepared(parts: Parts, request: Asked) -> Asked:
    """The request with its volatile lines apart, and the digests of its messages. Raises InvalidTranscript."""
    require_transcript(request.messages)
    if request.volatile is None:
        is_volatile = matcher_of((*KNOWN_VOLATILE, *parts.options.volatile))
        request = await parts.models.encoder.aside(partial(_parted, request, is_volatile))
    return replace(request, messages=await in_pieces(digested(request.messages)))


def _parted(request: Asked, is_volatile: Callable[[str], bool]) -> Asked:
    """The request without the volatile lines of the system texts that open it, and with these."""
    if request.instructions is not None:
        rest, lines = parted(request.instructions, is_volatile)
        return replace(request, instructions=rest or None, volatile=lines)
    if request.after or request.at_end:
        return request
    messages, lines = opening_parted(request.messages, is_volatile)
    return replace(request, messages=messages, volatile=lines)


_OF_THE_DAEMON: Final = (MemoryBudgetExceeded, MemoryBusy, NotEnoughMemory, EngineBusy, ServiceClosed)
"""Errors that say nothing of the session: a new one would need as much, and read all of the transcript for it."""


class _Attempt:
    """Suppresses the errors of a session that begins alike, until it is chosen: it is a cache, so whatever keeps it
    from answering is a miss, and another one or a new session answers then. What the daemon has no room for is none.
    With `after` the session is meant, and its errors are the client's; but another request may have gone on from there
    meanwhile, or deleted it. asked: the request to make of it."""

    def __init__(self, request: ConverseRequest) -> None:
        self.asked = request.told_to(self._tell)
        self._emit = request.emit
        self._misses = (TranscriptDiverged, SessionNotFound) if request.after else (TorporError,)
        self._is_chosen = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        is_miss = isinstance(error, self._misses) and not isinstance(error, _OF_THE_DAEMON)
        return is_miss and not self._is_chosen

    def _tell(self, event: WorkEvent) -> None:
        self._is_chosen = self._is_chosen or isinstance(event, SessionEvent)
        self._emit(event)


@answers(MeasureRequest)
async def measure(parts: Parts, request: MeasureRequest) -> MeasureResult:
    """Raises InvalidTranscript, UnknownModel, TemplateUnusable, ContextOverflow, and the errors of the model's load."""
    request = await _prepared(parts, request)
    wanted, root = parse_reference(request.session), _root_of(request)
    model = parts.models.place_for(request.model).name
    await parts.sessions.heads.learned()
    dialogue = await _dialogue(parts, request, wanted, model) if request.after or request.at_end else None
    named, claim = model, parts.sessions.claim(_fresh(wanted))
    if dialogue is not None:
        model, root = dialogue.model, root_of(dialogue.root, request.tools, request.template_arguments)
    async with parts.models.loading.using(model, claim) as loaded:
        choice = request.tool_choice or FREE
        unheld = await parts.models.encoder.unheld(loaded, AnswerForm(None, choice, root.tools))
        if dialogue is None:
            tokens, cached = await _size(parts, request, wanted, loaded)
        else:
            # A client that hears of them asks `converse` without them.
            asked = replace(request, tool_choice=request.tool_choice and choice.without_strict(unheld))
            digest = await parts.models.encoder.aside(partial(_digest_of, asked, named))
            before, cached = dialogue.for_retry(digest), len(dialogue.tokens)
            told = await in_pieces(digested(request.messages, before.text_map.turns))
            messages = said_behind(before, root, request.instructions, told, loaded.marks, request.volatile)
            place = await parts.sessions.conversing.place(loaded, before, messages, root, again=before is not dialogue)
            ids = await parts.models.encoder.messages(loaded, messages, place, root) if messages else []
            tokens = place.held + len(ids)
        return MeasureResult(tokens, min(tokens, cached), loaded.context_tokens, model, tuple(sorted(unheld)))


async def _size(parts: Parts, request: MeasureRequest, wanted: SessionUri, model: LoadedModel) -> tuple[int, int]:
    """The tokens of a transcript, and how many of them the session has that `converse` goes on from. Raises
    TemplateUnusable, ContextOverflow."""
    request, chain = await _as_thought(parts, request, wanted, model.name)
    root = _root_of(request)
    head = _best(parts, request, wanted, model.name, chain, set())
    with suppress(TorporError):  # what keeps a session that begins alike from answering is a miss
        if head is not None and (place := await _place_behind(parts, request, head, wanted, chain)) is not None:
            if new := await _behind_head(parts, request, head):
                return place.held + len(await parts.models.encoder.messages(model, new, place, root)), head.at
            return await _size_again(parts, request, head, model)
    return len(await parts.models.encoder.messages(model, _anew(request), Place(0, None, turn_open=False), root)), 0


async def _size_again(parts: Parts, request: MeasureRequest, head: Head, model: LoadedModel) -> tuple[int, int]:
    """As `_size`, of a transcript without volatile lines that a session has read already. It may have opened another
    turn for the answer, so what stands behind the answer before is read again, or compared."""
    messages, root = request.messages, _root_of(request)
    dialogue = await parts.sessions.recalling.dialogue(head.uri, past_look=True)
    overlap = overlap_of(dialogue.text_map, messages, await parts.models.encoder.shown_root(model, root))
    place = behind_kept(messages, overlap.kept, overlap.at, dialogue.tokens)
    ids = await parts.models.encoder.messages(model, messages[overlap.kept :], place, root)
    # The last one is computed again, for the logits behind it.
    again = min(tokens_in_common(dialogue.tokens[overlap.at :], ids), len(ids) - 1)
    return overlap.at + len(ids), overlap.at + max(again, 0)


async def _place_behind(
    parts: Parts, request: MeasureRequest, head: Head, wanted: SessionUri, chain: Chain | None
) -> Place | None:
    """The place at which `converse` reads a transcript behind a head; None if a new session is to read all of it."""
    if not _goes_on(parts, request, head, wanted) and await _farthest(parts, request, head, wanted, chain) is None:
        return None
    ledger = await parts.sessions.reuse.ledger_of(head.uri, parts.sessions.awake.get)
    if ledger is None or len(ledger) < head.at:
        return None
    return behind_kept(request.messages, head.messages, head.at, ledger)


async def _behind_head(parts: Parts, request: TranscriptRequest, head: Head) -> Sequence[Message]:
    """The messages that a transcript has behind a head, with its volatile lines."""
    messages = request.messages[head.messages :]
    if not request.volatile:
        return messages
    dialogue = await parts.sessions.recalling.dialogue(head.uri, past_look=True)
    return with_volatile(dialogue.before(head.at).text_map, messages, request.volatile)


def _anew(request: TranscriptRequest) -> Sequence[Message]:
    """All messages of a transcript, with its volatile lines."""
    return with_volatile(TextMap(), request.messages, request.volatile)


async def _dialogue(parts: Parts, request: TranscriptRequest, wanted: SessionUri, model: str) -> Dialogue:
    """The words before the messages of a request that goes on somewhere. Raises AnswerNotFound, SessionNotFound."""
    if request.at_end:
        dialogue = await parts.sessions.recalling.dialogue(parts.sessions.resolve(str(wanted)))
        _require_model(request, model, dialogue.model)
        return dialogue
    heads = _heads(parts, request, wanted, model)
    if not heads:
        raise answer_not_found(request.after or "")
    return (await parts.sessions.recalling.dialogue(heads[0].uri, past_look=True)).before(heads[0].at)


def _require_model(request: TranscriptRequest, wanted: str, found: str) -> None:
    """Refuse another model than that of the words before. Raises InvalidTranscript."""
    if request.model is not None and found != wanted:
        raise InvalidTranscript(
            f"What this goes on with is of model {found!r}, and the request names {wanted!r}. Name that one, or none."
        )


def _best(
    parts: Parts, request: TranscriptRequest, wanted: SessionUri, model: str, chain: Chain | None, tried: set[Head]
) -> Head | None:
    """The head to go on from: where no fork is needed, if there is one. None if a new session is to read all. That is
    also so where other clients use every session that begins alike: no request waits for their answers. Raises
    AnswerNotFound."""
    heads = _heads(parts, request, wanted, model, chain) if len(tried) < _MOST_TRIED else []
    left = [head for head in heads if head not in tried]
    if request.after and not left:
        raise answer_not_found(request.after)

    def rank(head: Head) -> tuple[bool, bool, bool]:
        return _is_of_group(head.uri, wanted), head.is_last, head.uri == wanted

    free = [head for head in left if request.after or not parts.sessions.turns.is_busy(head.uri)]
    return max(free, key=rank, default=None)


def _may_go_on(request: TranscriptRequest, head: Head, wanted: SessionUri) -> bool:
    """Whether a session is gone on with, and not forked: a client that names an answer means its session."""
    return bool(request.after) or head.is_named or _is_of_group(head.uri, wanted)


def _goes_on(parts: Parts, request: TranscriptRequest, head: Head, wanted: SessionUri) -> bool:
    """Whether the session of a head answers itself; else a fork of it does."""
    return head.is_last and _may_go_on(request, head, wanted) and not parts.sessions.is_at_look(head.uri)


async def _shown_root(parts: Parts, request: TranscriptRequest, wanted: SessionUri, model: str) -> bytes:
    """The digest of what the model's template shows of a request's root."""
    if not (root := _root_of(request)):
        return b""
    claim = parts.sessions.claim(_fresh(wanted))
    async with parts.models.loading.using(model, claim) as loaded:
        return await parts.models.encoder.shown_root(loaded, root)


def _heads(
    parts: Parts, request: TranscriptRequest, wanted: SessionUri, model: str, chain: Chain | None = None
) -> list[Head]:
    """The heads with the most of a transcript, or, without one, those behind an answer. Raises InvalidTranscript: that
    is of another model."""
    if chain is not None:
        return parts.sessions.heads.find(wanted.namespace, model, chain)
    heads = parts.sessions.heads.behind(wanted.namespace, bytes.fromhex(request.after or ""))
    for head in heads:
        _require_model(request, model, head.model)
    return heads


async def _as_thought(parts: Parts, request: Asked, wanted: SessionUri, model: str) -> tuple[Asked, Chain | None]:
    """The request with those answers that are read again and have their id as the model wrote them, with what it
    thought; and the chain of its messages, None if they are not the whole. An id that no session of this namespace and
    model has, or that stands at other words, tells nothing."""
    if request.after:
        return request, None
    root = await _shown_root(parts, request, wanted, model)
    messages = list(request.messages)
    # With volatile lines the same question again may be another text.
    chain_of = partial(Chain.of, root=root, to_end=not request.volatile)
    chain = await parts.models.encoder.aside(partial(chain_of, messages))
    if not any("answer_id" in message for message in messages):
        return request, chain
    count = max((head.messages for head in _heads(parts, request, wanted, model, chain)), default=0)
    of: dict[SessionUri, dict[bytes, int]] = {}
    for at, message in enumerate(messages):
        answer = bytes.fromhex(message.get("answer_id") or "")
        heads = parts.sessions.heads.behind(wanted.namespace, answer) if answer and at >= count else []
        uris = [head.uri for head in heads if head.model == model]
        if uris:
            of.setdefault(next((uri for uri in uris if uri in of), uris[0]), {})[answer] = at
    if not of:
        return request, chain
    claim = parts.sessions.claim(_fresh(wanted))
    async with parts.models.loading.using(model, claim) as loaded:
        for uri, answers in list(of.items())[:_MOST_TRIED]:
            with suppress(TorporError):  # deleted meanwhile, or damaged
                said = {answer: messages[at] for answer, at in answers.items()}
                dialogue = await parts.sessions.recalling.dialogue(uri, past_look=True)
                for answer, own in (await parts.sessions.recalling.own(loaded, dialogue, said)).items():
                    at = answers[answer]
                    messages[at] = {**own, "answer_id": messages[at]["answer_id"], RECALLED: True}
    return replace(request, messages=messages), await parts.models.encoder.aside(partial(chain_of, messages))


async def _farthest(
    parts: Parts, request: TranscriptRequest, head: Head, wanted: SessionUri, chain: Chain | None
) -> Head | None:
    """Where to fork for a transcript that goes on otherwise behind a head: there, or behind what another session of the
    head has read in common with it, such as most of a long message. None if a new session would take over a block more,
    at least."""
    if request.after or head.is_named:
        return head
    claim, root = parts.sessions.claim(_fresh(wanted)), _root_of(request)
    awake_of = parts.sessions.awake.get
    async with parts.models.loading.using(head.model, claim) as loaded:
        state = await parts.store.waking.begin(loaded, initial_key)
        anew, place = Session(claim.uri, loaded, state, Sampling()), head
        ledger = await parts.sessions.reuse.ledger_of(head.uri, awake_of)
        new = await _behind_head(parts, request, head)
        if ledger is not None and len(ledger) >= head.at and new:
            there = behind_kept(request.messages, head.messages, head.at, ledger)
            ids = await parts.models.encoder.messages(loaded, new, there, root)
            heads = _heads(parts, request, wanted, head.model, chain)
            for each in [each for each in heads if not parts.sessions.turns.is_busy(each.uri)][:_MOST_TRIED]:
                more = await parts.sessions.reuse.read_on_alike(anew, each.uri, each.at, ids, awake_of)
                place = max(place, replace(each, at=each.at + more), key=lambda one: one.at)
        ids = await parts.models.encoder.messages(loaded, _anew(request), Place(0, None, turn_open=False), root)
        is_longer_anew = await parts.sessions.reuse.foreseen(anew, ids, awake_of) >= place.at + BLOCK_TOKENS
        return None if is_longer_anew else place


def _behind(request: ConverseRequest, head: Head) -> Behind | None:
    return Behind(head.at, request.instructions, request.volatile) if request.after else None


async def _chat(
    parts: Parts,
    request: ConverseRequest,
    uri: SessionUri,
    model: str | None,
    digest: bytes,
    behind: Behind | None = None,
) -> GenerateResult:
    """Answer in a session. model: of a new one. digest: of the request. behind: where the messages stand, if they are
    not the whole."""
    asked = ChatRequest(
        session=str(uri),
        messages=request.messages,
        tools=(request.tools or ()) if behind is None else request.tools,
        template_arguments=(request.template_arguments or {}) if behind is None else request.template_arguments,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop=request.stop,
        constraint=request.constraint,
        logprobs=request.logprobs,
        tool_choice=request.tool_choice,
        priority=request.priority,
        create=model is not None,
        unnamed=request.unnamed,
        on_divergence="rewind" if request.at_end else "refuse",
        on_event=request.on_event,
    )
    known = Known(digest, answer_id=bytes.fromhex(request.answer_id or ""))
    try:
        return await answer(
            parts,
            asked,
            model,
            behind=behind,
            known=known,
            durable=request.durable,
            labels=request.labels or (),
            marked=request.checkpoints,
            volatile=request.volatile,
            fitting=True,
        )
    finally:
        if request.volatile:
            parts.sessions.reasons.volatile(uri, request.volatile)
        if request.keep_awake_s is not None and (live := parts.sessions.awake.get(uri)) is not None:
            awake_until = max(live.stay.awake_until, time.monotonic() + request.keep_awake_s)
            live.stay = replace(live.stay, awake_until=awake_until)


async def _chat_in_fork(
    parts: Parts, request: ConverseRequest, head: Head, name: SessionUri, digest: bytes
) -> GenerateResult:
    """Answer in a fork, which is deleted again if nothing was read or written in it."""
    newest = parts.store.disk.find_session(head.uri) if parts.sessions.is_at_look(head.uri) else None
    source = str(head.uri) if newest is None else f"{head.uri}{VERSION_MARK}{newest.version}"
    order = ForkRequest(source, str(name), at_token=head.at, labels=request.labels or (), unnamed=request.unnamed)
    made = await fork(parts, order)
    if not request.after:
        parts.sessions.reasons.leaves(name, head.uri)
    try:
        return await _chat(parts, request, name, None, digest, _behind(request, head))
    except BaseException:
        with suppress(TorporError):
            await to_the_end(_take_back(parts, name, made.token_count))
        raise


async def _take_back(parts: Parts, name: SessionUri, token_count: int) -> None:
    """Delete a fork that has no more tokens than it was made with: its retry may have found it, and goes on in it."""
    async with parts.sessions.residency.turn(name):
        live, row = parts.sessions.awake.get(name), parts.store.disk.find_session(name)
        held = len(live.state.tokens) if live is not None else row.token_count if row is not None else 0
        if held <= token_count:
            await parts.sessions.delete_session(name)


def _new_name(parts: Parts, wanted: SessionUri) -> SessionUri:
    """The wanted name if nothing has it, else one of its group."""
    # Its turn is taken before anything is awaited, so no two requests begin under one name.
    return wanted if parts.sessions.is_free(wanted) else _fresh(wanted)


def _fresh(wanted: SessionUri) -> SessionUri:
    return SessionUri(wanted.namespace, f"{_stem(wanted)}-{secrets.token_hex(_SUFFIX_BYTES)}")


def _is_of_group(uri: SessionUri, wanted: SessionUri) -> bool:
    """Whether a session may be gone on with under a name: it has the name, or was made for it."""
    made = rf"{re.escape(_stem(wanted))}-[0-9a-f]{{{2 * _SUFFIX_BYTES}}}"
    return uri == wanted or (uri.namespace == wanted.namespace and re.fullmatch(made, uri.name) is not None)


def _stem(wanted: SessionUri) -> str:
    """What names that are made for a name begin with: as much of it as leaves room for the suffix."""
    return wanted.name[: MAX_NAME_CHARS - 1 - 2 * _SUFFIX_BYTES]


def _digest_of(request: TranscriptRequest, model: str) -> bytes:
    """By which the request is known again."""
    drawing = {} if request.sampling is None else request.sampling.named()
    held = [None if each is None else asdict(each) for each in (request.constraint, request.tool_choice)]
    place: tuple[object, ...] = (request.after, request.session if request.at_end else None)
    if request.after or request.at_end:
        # No digest of the messages tells which of the calls before them a result answers.
        own = {call.get("id") for message in request.messages for call in message.get("tool_calls", ())}
        ids = [message.get("tool_call_id") for message in request.messages if message["role"] == "tool"]
        answered = [each for each in ids if each not in own]
        place = (*place, request.tools is None, request.template_arguments is None, answered)
    told = [each for each in (request.logprobs, request.volatile or None) if each is not None]
    how = (drawing, list(request.stop), request.max_tokens, *place, request.instructions, held, *told)
    return digest_of_request(model, _root_of(request), request.messages, *how)


def _root_of(request: TranscriptRequest) -> Root:
    tools: Sequence[Any] = request.tools or ()
    return Root(tuple(tools), request.template_arguments or {})
