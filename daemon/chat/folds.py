"""Makes folds, from the full session to the smaller one that goes on.

Owns the order of it: the full session is durable and out of memory before the new one takes any, and of a new one whose
beginning is given up nothing stays. What the new one reads is `folding.py`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...errors import TorporError
from ...memvid.format.identity import Identity
from ...memvid.format.manifest import require_session_map
from ...memvid.store import Receipt, Store
from ...memvid.units import format_count, format_plural
from ...memvid.uri import SessionUri
from ...snapshot.state import LiveState
from ..api.events import OnEvent
from ..api.forking import FoldResult
from ..api.sampling import Sampling
from ..api.session import Origin
from ..engine.cancellation import to_the_end
from ..engine.generation import WriteOrder, require_room
from ..engine.sampler import initial_key
from ..errors import ContextOverflow, InvalidFold
from ..events.bus import Bus
from ..events.events import SessionCreated, SessionFolded
from ..memory.claims import Use
from ..models.chat_template import Message
from ..models.models import LoadedModel
from ..residency.looks import LeftLook
from ..residency.putting_away import require_read
from ..residency.residency import Residency
from ..sessions.encoding import Encoder, Place
from ..sessions.origin import origin_of
from ..sessions.sessions import Durable, Session
from ..sessions.transcripts import NewTurn, message_of, without_thinking
from ..sleep.hibernation import Hibernation
from ..sleep.orders import WakeOrder
from .conversing import Conversing
from .folding import REQUEST, Exhausted, Fold, folded, summarised_end
from .prompt_io import Exchanges, require_same_model

_LOG = logging.getLogger(__name__)

_MORE_AT_ANOTHER_PLACE: Final = 16
"""Tokens by which a template may need more to ask for a summary behind a turn than at the beginning of a chat."""


@dataclass(frozen=True, slots=True)
class FoldOrder:
    """What is asked of a fold. summary: the text; None where the model writes one, of `summarise` tokens at most. tail:
    how many of the full session's last tokens the new one has, at most; labels: those of the full one if None."""

    summary: str | None
    summarise: int | None
    tail: int = 0
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidFold: there is not one way to a summary, and no more."""
        if (self.summary is None) == (self.summarise is None) or self.summary == "":
            raise InvalidFold("Give either a summary or how many tokens the model may write one in.")


@dataclass(frozen=True, slots=True)
class _Source:
    """What stays to be known of the full session: neither its state nor its model, which may have to be unloaded.

    look: where it stood, if it was only looked at.
    """

    uri: SessionUri
    identity: Identity
    model: str
    sampling: Sampling
    labels: tuple[str, ...]
    system: str | None
    opened: bool
    origin: Origin
    parent: Durable
    look: LeftLook | None

    def begun(self, uri: SessionUri, model: LoadedModel, state: LiveState) -> Session:
        """The new session, before it has read anything.

        Raises:
            ModelChanged.
        """
        require_same_model(self.identity, model, uri)
        return Session(
            uri,
            model,
            state,
            self.sampling,
            self.labels,
            system=self.system,
            opened_at=0 if self.opened else None,
            durable=self.parent,
            folded_from=self.origin,
        )


class Folds:
    """forget: know no text of a session that is gone."""

    def __init__(
        self,
        store: Store,
        hibernation: Hibernation,
        residency: Residency,
        encoder: Encoder,
        conversing: Conversing,
        exchanges: Exchanges,
        forget: Callable[[SessionUri], None],
        bus: Bus,
    ) -> None:
        self._store = store
        self._hibernation = hibernation
        self._residency = residency
        self._encoder = encoder
        self._conversing = conversing
        self._exchanges = exchanges
        self._forget = forget
        self._bus = bus

    async def make(self, source: SessionUri, wanted: SessionUri, order: FoldOrder, emit: OnEvent) -> FoldResult:
        """Put the session `source` to sleep as it stands, and begin `wanted`, awake and durable, from its fold.

        Raises:
            InvalidFold, SessionExists, SessionNotFound, EmptyContext, TemplateUnusable, ContextOverflow,
            GenerationFailed, ModelChanged, and what a sleep or a wake raises. Then there is no new session.
        """
        started = time.monotonic()
        self._residency.standing.require_new(wanted)
        full, fold, summary = await self._end(source, order, emit)
        async with self._residency.turn(wanted) as use:
            receipt, cached = await self._begin(use, full, fold, emit)
        self._end_look(full)
        self._bus.publish(SessionCreated(wanted, full.model))
        result = FoldResult(
            session=str(wanted),
            folded_from=full.origin,
            version=receipt.version,
            bundle_id=receipt.bundle_id.hex(),
            token_count=receipt.token_count,
            tail_tokens=fold.tail_tokens,
            summary=summary,
            prefilled_tokens=len(fold.ids) - cached,
            cached_tokens=cached,
            bytes_written=receipt.bytes_written,
            seconds=time.monotonic() - started,
        )
        self._tell(wanted, full, result)
        return result

    async def _end(self, source: SessionUri, order: FoldOrder, emit: OnEvent) -> tuple[_Source, Fold, str]:
        """Make the full session durable and let its memory go; what stays known of it, and what the new one reads."""
        async with self._residency.woken(source, emit) as (use, live):
            require_read(live)
            old = Exhausted.of(live)
            least = await self._smaller(live, old, order.summary or "", order.tail)
            row = await to_the_end(self._residency.putting_away.keep_changed(live, emit, "fold"))
            full = _Source(
                uri=source,
                identity=live.model.identity,
                model=row.model,
                sampling=live.sampling,
                labels=live.labels if order.labels is None else order.labels,
                system=live.system,
                opened=live.opened_at is not None,
                origin=origin_of(row, len(old.tokens)),
                parent=Durable(row.version, row.bundle_id, None, 0, 0, ()),
                look=LeftLook.of(live),
            )
            try:
                if order.summary:
                    return full, least, order.summary
                summary = await self._summary(use, live, old, order, emit)
                return full, await self._smaller(self._residency.awake[source], old, summary, order.tail), summary
            finally:
                self._residency.awake.leave(source, full.look)

    def _end_look(self, full: _Source) -> None:
        """The full session sleeps now, and a sleep ends its look, unless others have led that elsewhere meanwhile."""
        if full.look is not None and self._residency.awake.looks.find(full.uri) is full.look:
            self._residency.awake.looks.end(full.uri)

    async def _smaller(self, live: Session, old: Exhausted, summary: str, tail: int) -> Fold:
        """What the new session reads, with this summary; the least of it, with none.

        Raises:
            InvalidFold: it is no smaller than the session is. And what `folded` raises.
        """
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
        """A session that has read what a fold begins with, awake and durable; and how much of that need not be read."""
        self._residency.standing.require_new(use.uri)
        async with self._residency.models.using(full.model, use) as model:
            state = await self._hibernation.waking.begin(model, lambda: initial_key(full.sampling))
            new = full.begun(use.uri, model, state)
            require_session_map(new.to_map())
            self._residency.awake.admit(new)
        del model, state  # while this waits for memory, others may have it
        try:
            new = await self._exchanges.room_for(use, new, len(fold.ids), emit)
            cached = await self._exchanges.read(new, fold.ids, emit, turn_open=fold.turn_open, text_map=fold.text_map)
            return await to_the_end(self._residency.putting_away.keep(new, emit, "fold")), cached
        except BaseException:
            await to_the_end(self._take_back(use.uri))
            raise

    async def _take_back(self, uri: SessionUri) -> None:
        """Leave nothing of a new session whose beginning was given up, maybe when it had just become durable."""
        try:
            if self._store.find_session(uri) is not None:
                await self._hibernation.threads.on_writer(lambda: self._store.delete_session(uri))
        except TorporError as error:
            _LOG.warning("%s was given up, and stays asleep: %s: %s", uri, error.code, error.message)
        finally:
            self._residency.awake.drop(uri)
            self._forget(uri)

    async def _summary(self, use: Use, live: Session, old: Exhausted, order: FoldOrder, emit: OnEvent) -> str:
        """What the model says when it is asked for a summary, without its thinking. The session is not to be kept:
        where its context has no room for that, it goes back to where it has, if the tail has what follows."""
        request, count = message_of("user", REQUEST), order.summarise or 0
        turn = await self._asked(live, request, count)
        if turn is None:
            live = await self._go_back(use, live, old, order, emit)
            turn = await self._conversing.message(live, request)
        live = await self._exchanges.room_for(use, live, len(turn.ids) + count, emit)
        read = (len(turn.ids), await self._exchanges.read_turn(live, turn, emit))
        writing = WriteOrder(count, live.sampling, keep_end=True)
        written = await self._exchanges.write(live, writing, emit, read=read, started=time.monotonic(), woken=use.woken)
        words = without_thinking(written.text).strip()
        if not words:
            raise InvalidFold(
                f"The model wrote no summary of {live.uri}; give one, or more tokens to write it in.",
                session=str(live.uri),
            )
        return words

    async def _asked(self, live: Session, request: Message, count: int) -> NewTurn | None:
        """What asks for a summary of `count` tokens at a session's end; None if its context has no room for both."""
        try:
            turn = await self._conversing.message(live, request)
            require_room(live.model, live.state, len(turn.ids) + count)
        except ContextOverflow:
            return None
        return turn

    async def _go_back(self, use: Use, live: Session, old: Exhausted, order: FoldOrder, emit: OnEvent) -> Session:
        """The session, which is durable, at an earlier token, behind which there is room for a summary.

        Raises:
            ContextOverflow: what follows would be neither in the summary nor in the tail.
        """
        opening = Place(0, None, turn_open=False)
        asking = await self._encoder.messages(live.model, [message_of("user", REQUEST)], opening)
        wanted = len(asking) + _MORE_AT_ANOTHER_PLACE + (order.summarise or 0)
        at = summarised_end(old, order.tail, wanted, live.model.context_tokens)
        kept = await to_the_end(self._residency.putting_away.put_away(live, emit, "fold"))
        await self._residency.bring_back(use, WakeOrder(kept.version, at), emit)
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
