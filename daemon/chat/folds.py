"""Makes folds: a smaller session goes on in place of a full one.

Order: the full session is durable and out of memory before the new one takes any. If the new one fails, nothing of it
stays. The new session reads a conversation in the model's own template: the user asks for a summary, the assistant
gives it, and the last turns follow. So its text map knows all of it. A session that is no chat begins with the
summary's text instead.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...errors import TorporError
from ...memvid.format.identity import Identity
from ...memvid.format.manifest import require_session_map
from ...memvid.store import Receipt, Store
from ...memvid.units import format_count, format_plural
from ...memvid.uri import SessionUri
from ...snapshot.state import LiveState
from ..api.events import OnEvent
from ..api.forking import FoldRequest, FoldResult
from ..api.session import Origin, Provenance
from ..engine.generation import WriteOrder, require_room
from ..engine.sampler import initial_key
from ..errors import ContextOverflow, InvalidFold, TemplateUnusable
from ..events.bus import Bus
from ..events.events import SessionCreated, SessionFolded
from ..memory.line import Use
from ..models.chat_template import Message, Root
from ..models.models import LoadedModel
from ..residency.putting_away import require_read
from ..residency.residency import Residency
from ..sessions.chats import Chat
from ..sessions.encoding import Encoder, Place
from ..sessions.sessions import Session
from ..sessions.transcripts import NewTurn, TextMap, Turn, message_of, spoken, without_thinking
from ..tasks.cancellation import to_the_end
from ..versions.orders import WakeOrder
from ..versions.writing import Versions
from ..views.stored import origin_of
from .conversing import Conversing
from .prompt_io import Exchanges, require_same_model

REQUEST: Final = "Summarise our conversation so far."
"""The request to the assistant, in the folded session and at the beginning of the new one."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The session to fold, as it stood. It holds no model: that may be unloaded for others meanwhile."""

    tokens: array[int]
    text_map: TextMap
    turn_open: bool
    system: str | None
    root: Root

    @classmethod
    def of(cls, live: Session) -> Exhausted:
        """A copy of a session as it is now, without a message that it has read in part."""
        system = live.chat.text_map.system if live.chat.text_map.turns else live.chat.system
        return cls(
            live.state.tokens[: live.whole_tokens], live.chat.text_map, live.chat.turn_open, system, live.chat.root
        )

    @property
    def is_chat(self) -> bool:
        return self.turn_open or bool(self.text_map.turns)


@dataclass(frozen=True, slots=True)
class Fold:
    """The tokens that the new session reads. tail_tokens: how many at the end are the other session's last ones."""

    ids: list[int]
    tail_tokens: int
    text_map: TextMap
    turn_open: bool


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """Where the first turn of a chat begins, behind its system text. closing: the tokens that the template puts between
    an assistant's turn and such a turn. turns: all."""

    at: int
    closing: Sequence[int]
    turns: Sequence[Turn]


def tail_start(text_map: TextMap, count: int, tail: int, first: int | None = None) -> int:
    """Where the last `tail` of `count` tokens begin: at the first turn among them, if one is known. first: where the
    first turn of all begins.
    """
    earliest = max(0, count - tail)
    if first is not None and earliest <= first:
        return first
    return next((place for place in text_map.places if earliest <= place < count), earliest)


def summarised_end(old: Exhausted, tail: int, wanted: int, context_tokens: int) -> int:
    """The position at which to ask for a summary, with room for `wanted` tokens behind it: after the last turn that
    leaves that room, or anywhere if the session is no chat. The last `tail` tokens go along as they are.

    Raises ContextOverflow: tokens behind it would be in neither the summary nor the tail."""
    count, room = len(old.tokens), context_tokens - wanted
    end = max((place for place in old.text_map.places if place <= room), default=0) if old.is_chat else max(0, room)
    if not end or tail_start(old.text_map, count, tail) > end:
        way = f"keep the last turns as they are, with a tail of {count - end} tokens or more; or " if end else ""
        raise ContextOverflow(
            f"Of the session's {format_plural(count, 'token')} only the first {format_count(end)} leave room in the "
            f"context to write a summary behind them. To fold it, {way}give a summary yourself.",
            token_count=count,
            wanted_tokens=wanted,
            context_tokens=context_tokens,
        )
    return end


async def folded(encoder: Encoder, model: LoadedModel, old: Exhausted, summary: str, tail: int) -> Fold:
    """The tokens of a session that goes on from a summary and at most the last `tail` tokens of another. Raises
    TemplateUnusable, ContextOverflow."""
    if not old.is_chat:
        tail_ids = list(old.tokens[tail_start(old.text_map, len(old.tokens), tail) :])
        words = await encoder.plain(model, f"{summary}\n\n", opening=True)
        return Fold(words + tail_ids, len(tail_ids), TextMap(), turn_open=False)
    question = spoken([message_of("user", REQUEST)], old.system)
    opening = await encoder.messages(model, question, Place(0, None, turn_open=False), old.root)
    answer = await encoder.plain(model, summary, opening=False)
    first = await _first_turn(encoder, model, old, opening)
    at = tail_start(old.text_map, len(old.tokens), tail, first.at if first else None)
    turns: Sequence[Turn] = ()
    if first and at == first.at:
        closing, turns = first.closing, first.turns
    else:
        # The summary takes the place of the turn before the tail, up to its end token.
        closing = old.tokens[at - 1 : at] if at and old.tokens[at - 1] in model.end_tokens else ()
        if at in old.text_map.places:
            turns = [turn for turn in old.text_map.turns if turn.end > at]
    tail_ids = list(old.tokens[at:])
    ids = [*opening, *answer, *closing, *tail_ids]
    answer_end = len(opening) + len(answer)
    answer_end += answer_end < len(ids) and ids[answer_end] in model.end_tokens
    root = await encoder.shown_root(model, old.root)
    text_map = TextMap().begun(root).extended(question, start=0, end=len(opening))
    text_map = text_map.extended([message_of("assistant", summary)], start=len(opening), end=answer_end)
    text_map = text_map.followed_by(turns, len(ids) - len(old.tokens))
    return Fold(ids, len(tail_ids), text_map, turn_open=old.turn_open if tail_ids else True)


async def _first_turn(encoder: Encoder, model: LoadedModel, old: Exhausted, opening: Sequence[int]) -> FirstTurn | None:
    """Find the first turn; None if that cannot be told. It begins where the tokens that open a conversation end and
    those that also continue one begin.

    opening: the new session's opening, with the same system text and another first message.
    """
    spoken_system = bool(old.text_map.turns) and old.text_map.turns[0].role == "system"
    turns = old.text_map.turns[spoken_system:]
    if not turns or turns[0].role != "user" or spoken_system != bool(old.system):
        return None
    try:
        place = Place(len(opening), opening[-1], turn_open=True)
        continuing = await encoder.messages(model, [message_of("user", REQUEST)], place, old.root)
    except TemplateUnusable:
        return None
    pairs = zip(reversed(opening), reversed(continuing), strict=False)
    alike = next(
        (count for count, (one, other) in enumerate(pairs) if one != other), min(len(opening), len(continuing))
    )
    at = len(opening) - alike
    if list(old.tokens[:at]) != list(opening[:at]):
        return None
    return FirstTurn(at, continuing[: len(continuing) - alike], turns)


_LOG = logging.getLogger(__name__)

_MORE_AT_ANOTHER_PLACE: Final = 16
"""How many more tokens a template may need to ask for a summary after a turn than at a chat's beginning."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The facts of the full session, without its state and its model, which may be unloaded. begin: makes the new
    session, of a name, a model and a state."""

    uri: SessionUri
    identity: Identity
    model: str
    origin: Origin
    begin: Callable[[SessionUri, LoadedModel, LiveState], Session]


@dataclass(eq=False, repr=False)
class Folds:
    """forget: called for a new session that is taken back."""

    _store: Store
    _versions: Versions
    _residency: Residency
    _encoder: Encoder
    _conversing: Conversing
    _exchanges: Exchanges
    _forget: Callable[[SessionUri], None]
    _bus: Bus

    async def make(self, source: SessionUri, wanted: SessionUri, order: FoldRequest, emit: OnEvent) -> FoldResult:
        """Put `source` to sleep as it stands, and begin `wanted`, awake and durable, from its fold. Raises InvalidFold,
        SessionExists, SessionNotFound, EmptyContext, TemplateUnusable, ContextOverflow, GenerationFailed, ModelChanged,
        and the errors of a sleep or a wake. Then there is no new session."""
        started = time.monotonic()
        if (order.summary is None) == (order.summarize is None) or order.summary == "":
            raise InvalidFold("Give either a summary or how many tokens the model may write one in.")
        self._residency.standing.require_new(wanted)
        full, fold, summary = await self._end(source, order, emit)
        async with self._residency.turn(wanted) as use:
            receipt, cached = await self._begin(use, full, fold, emit)
        self._bus.publish(SessionCreated(wanted, full.model))
        result = FoldResult.of(
            receipt,
            seconds=time.monotonic() - started,
            folded_from=full.origin,
            tail_tokens=fold.tail_tokens,
            summary=summary,
            prefilled_tokens=len(fold.ids) - cached,
            cached_tokens=cached,
        )
        self._tell(wanted, full, result)
        return result

    async def _end(self, source: SessionUri, order: FoldRequest, emit: OnEvent) -> tuple[_Source, Fold, str]:
        """Make the full session durable and free its memory. Gives its facts, the fold, and the summary."""
        async with self._residency.woken(source, emit) as (use, live):
            require_read(live)
            old = Exhausted.of(live)
            least = await self._smaller(live, old, order.summary or "", order.tail)
            row = await to_the_end(self._residency.putting_away.keep_changed(live, emit, "fold"))
            origin = origin_of(row, len(old.tokens))
            begin = partial(
                Session,
                sampling=live.sampling,
                labels=live.labels if order.labels is None else tuple(order.labels),
                chat=Chat(live.chat.system, live.chat.root, None if live.chat.opened_at is None else 0),
                durability=live.durability,
                durable=Receipt(row.uri, row.version, row.bundle_id, None, 0, 0, ()),
                provenance=Provenance(folded_from=origin),
            )
            full = _Source(source, live.model.identity, row.model, origin, begin)
            try:
                if order.summary:
                    return full, least, order.summary
                summary = await self._summary(use, live, old, order, emit)
                return full, await self._smaller(self._residency.awake[source], old, summary, order.tail), summary
            finally:
                self._residency.awake.drop(source)

    async def _smaller(self, live: Session, old: Exhausted, summary: str, tail: int) -> Fold:
        """The fold with this summary; with an empty one, the least it can be. Raises InvalidFold if it is not smaller
        than the session, and as `folded`."""
        fold = await folded(self._encoder, live.model, old, summary, tail)
        if len(fold.ids) < len(old.tokens):
            return fold
        count = f"{'' if summary else 'at least '}{format_plural(len(fold.ids), 'token')}"
        raise InvalidFold(
            f"The fold would have {count}, {format_count(fold.tail_tokens)} of them in its tail. It would not be "
            f"smaller than {live.uri}, which has {format_count(len(old.tokens))}, so it was not made. "
            "Ask for a shorter tail or summary, or go on in the session.",
            session=str(live.uri),
            token_count=len(old.tokens),
            folded_tokens=len(fold.ids),
            tail_tokens=fold.tail_tokens,
        )

    async def _begin(self, use: Use, full: _Source, fold: Fold, emit: OnEvent) -> tuple[Receipt, int]:
        """Make the new session, awake and durable. Gives its receipt, and how many tokens came from other sessions."""
        await self._residency.hold(use.uri)
        self._residency.standing.require_new(use.uri)
        async with self._residency.models.using(full.model, use) as model:
            state = await self._versions.waking.begin(model, initial_key)
            require_same_model(full.identity, model, use.uri)
            new = full.begin(use.uri, model, state)
            require_session_map(new.to_map())
            self._residency.awake.admit(new)
        del model, state  # others may have their memory while this waits
        try:
            new = await self._exchanges.room_for(use, new, len(fold.ids), emit)
            read = await self._exchanges.read(new, fold.ids, emit, turn_open=fold.turn_open, text_map=fold.text_map)
            return await to_the_end(self._residency.putting_away.keep(new, emit, "fold")), read.cached_tokens
        except BaseException:
            await to_the_end(self._take_back(use.uri))
            raise

    async def _take_back(self, uri: SessionUri) -> None:
        """Delete a new session that failed, even if it had just become durable."""
        try:
            if self._store.find_session(uri) is not None:
                await self._versions.threads.on_writer(lambda: self._store.delete_session(uri))
        except TorporError as error:
            _LOG.warning("%s was given up, and stays asleep: %s: %s", uri, error.code, error.message)
        finally:
            self._residency.awake.drop(uri)
            self._forget(uri)

    async def _summary(self, use: Use, live: Session, old: Exhausted, order: FoldRequest, emit: OnEvent) -> str:
        """The model's summary, without its thinking. The session as used here is not kept. If its context has no room,
        it first goes back to an earlier token, if the tail has all that follows."""
        request, count = message_of("user", REQUEST), order.summarize or 0
        turn = await self._asked(live, request, count)
        if turn is None:
            live = await self._go_back(use, live, old, order, emit)
            turn = await self._conversing.message(live, request)
        live = await self._exchanges.room_for(use, live, len(turn.ids), emit, to_write=count)
        read = (len(turn.ids), (await self._exchanges.read_turn(live, turn, emit)).cached_tokens)
        writing = WriteOrder(count, live.sampling, keep_end=True)
        result = await self._exchanges.write(use, live, writing, emit, read=read, started=time.monotonic())
        words = without_thinking(result.text).strip()
        if not words:
            raise InvalidFold(
                f"The model wrote no summary of {live.uri}; give one, or more tokens to write it in.",
                session=str(live.uri),
            )
        return words

    async def _asked(self, live: Session, request: Message, count: int) -> NewTurn | None:
        """The turn that asks for a summary of `count` tokens; None if the session has to go back for it: its context
        has no room for both, or it has read a message in part."""
        try:
            turn = await self._conversing.message(live, request)
            require_room(live.model, len(live.state.tokens), len(turn.ids) + count)
        except ContextOverflow:
            return None
        return turn if turn.at == len(live.state.tokens) else None

    async def _go_back(self, use: Use, live: Session, old: Exhausted, order: FoldRequest, emit: OnEvent) -> Session:
        """Take the durable session back to an earlier token with room for a summary. Raises ContextOverflow:
        tokens behind it would be in neither the summary nor the tail."""
        opening = Place(0, None, turn_open=False)
        asking = await self._encoder.messages(live.model, [message_of("user", REQUEST)], opening, live.chat.root)
        wanted = len(asking) + _MORE_AT_ANOTHER_PLACE + (order.summarize or 0)
        at = summarised_end(old, order.tail, wanted, live.model.context_tokens)
        receipt = await to_the_end(self._residency.putting_away.put_away(live, emit, "fold"))
        await self._residency.bring_back(use, WakeOrder(receipt.version, at), emit)
        return self._residency.awake[use.uri]

    def _tell(self, uri: SessionUri, full: _Source, result: FoldResult) -> None:
        self._bus.publish(
            SessionFolded(
                uri,
                source=full.uri,
                source_tokens=full.origin.tokens,
                tokens=result.token_count,
                tail_tokens=result.tail_tokens,
                prefilled_tokens=result.prefilled_tokens,
                bytes_written=result.bytes_written,
                seconds=result.seconds,
            )
        )
