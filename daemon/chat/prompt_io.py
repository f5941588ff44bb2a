"""Reads a request into a session and writes the answer: on the engine, with events, all or nothing. Of a request that
is known again when it is repeated, whole blocks that were read stay.

Owns these changes of a session: its ledger's end, its text map, its settings, whether it needs a sleep. Callers hold
the session alone, awake. It may leave memory in the midst of an answer, and a client may leave for good. So what is
noted of an answer is true of the ledger at each moment in which the engine does not write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import mlx.core as mx

from ...memvid.errors import StoreError
from ...memvid.format.identity import Identity
from ...memvid.uri import SessionUri
from ...snapshot.errors import NotEnoughMemory
from ...snapshot.state import LiveState
from ..api.events import OnEvent, ProgressEvent, TokenEvent
from ..api.reading import GenerateResult
from ..api.sampling import Sampling
from ..api.session import Look
from ..engine import generation
from ..engine.channels import Piece
from ..engine.engine import AnySteps, Engine
from ..engine.generation import WriteOrder, Written
from ..engine.sampler import initial_key
from ..errors import GenerationFailed, InvalidConstraint, MemoryBudgetExceeded, ModelChanged
from ..events.accounts import recomputed_tokens
from ..events.bus import Bus
from ..memory.line import Use
from ..models.models import LoadedModel
from ..prefixes.in_flight import InFlight, Reading
from ..prefixes.prefix_history import Reasons
from ..prefixes.reuse import PrefixReuse
from ..residency.residency import Residency
from ..sessions.interrupted import Interrupted
from ..sessions.sessions import Session
from ..sessions.tracing import tell_decode, tell_prefill
from ..sessions.transcripts import NewTurn, TextMap, message_of
from ..tasks.cancellation import LeftMidway, is_unwanted, require_wanted
from ..versions.journal import TurnJournal
from .answer_room import AnswerRoom, next_end


@dataclass(frozen=True, slots=True)
class Known:
    """By what a request and its answer are known again. request: the digest of all that decides its answer; None:
    never. begins_at: the token at which its messages begin. answer_id: names the answer; empty for none."""

    request: bytes | None = None
    begins_at: int = 0
    answer_id: bytes = b""


NEVER: Final = Known()


class HasRead(NamedTuple):
    """How tokens came to stand in a session. cached_tokens: those that came from another session. seconds: for how long
    the model read the rest; 0 if it read none."""

    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An answer while it is written. begins: the place of its first token. own_key: the random key before it."""

    order: WriteOrder
    written: Written
    begins: int
    known: Known
    own_key: mx.array

    def note(self, live: Session, *, goes_on: bool) -> None:
        """Note what is written, as the client was shown it (QX8). goes_on: whether the same request may go on; not with
        log-probabilities, for the logits of what is written are gone."""
        live.dirty, end = True, len(live.state.tokens)
        live.interrupted = None
        known = self.known
        if goes_on and known.request is not None and self.order.logprobs is None:
            seed = self.order.sampling.seed if self.order.seeded else None
            live.interrupted = Interrupted(known.request, known.begins_at, self.begins, end, seed)
        if self.order.keep_end:
            # A failure here must not cost the answer; the map then ends before it, and nothing matches by text (QC10).
            with contextlib.suppress(Exception):
                message = message_of("assistant", self.written.text, [asdict(call) for call in self.written.calls])
                message = {**message, "reasoning": self.written.reasoning}
                before, finished = live.chat.text_map.cut(self.begins), self.written.finish_reason != "length"
                text_map = before.extended(
                    [message], start=self.begins, end=end, answer=known.answer_id, own=True, finished=finished
                )
                live.chat = replace(live.chat, text_map=text_map)

    def end(self, live: Session, *, has_written: bool) -> None:
        """Give the session its own random key back, where this answer has not used it."""
        if self.order.seeded or not has_written:
            live.state.random_key = self.own_key


@dataclass(eq=False, repr=False)
class Exchanges:
    """Reads and writes in sessions."""

    _engine: Engine
    _residency: Residency
    _reuse: PrefixReuse
    _reasons: Reasons
    _bus: Bus
    _journal: TurnJournal

    def __post_init__(self) -> None:
        self._in_flight = InFlight(self._reuse)

    async def room_for(
        self,
        use: Use,
        live: Session,
        to_read: int,
        emit: OnEvent,
        *,
        to_write: int = 0,
        has_written: int = 0,
        marks: Sequence[int] = (),
    ) -> Session:
        """Give the session, once it has room in its context for tokens to read and an answer, and in memory and the
        journal for those to read and the first step of the answer. has_written: tokens of it that stand there. marks:
        as of the turn that is to be read."""
        generation.require_room(live.model, len(live.state.tokens), to_read + to_write - has_written)
        begins = len(live.state.tokens) + to_read
        count = to_read + next_end(begins, begins + to_write - has_written) - begins
        live.state.checkpoints.mark(marks)
        live = await self._room_for(use, live, count, emit)
        live.state.checkpoints.mark(marks)  # it may have left memory and come back
        return live

    async def _room_for(self, use: Use, live: Session, count: int, emit: OnEvent) -> Session:
        identity = live.model.identity  # holds nothing else of a model that may be unloaded meanwhile
        live = await self._residency.room_for(use, count, emit)
        require_same_model(identity, live.model, live.uri)
        await self._journal.make_room(live, count)
        return live

    async def read(
        self,
        live: Session,
        ids: Sequence[int],
        emit: OnEvent,
        *,
        turn_open: bool,
        text_map: TextMap | None = None,
        known: Known = NEVER,
    ) -> HasRead:
        """Read tokens. A cancellation after all are read changes nothing: they stay in the ledger.

        known: by what the request is known again. If it is, what was read in whole blocks stays, too, if it is
        cancelled (LeftMidway).
        """
        before, by_block = live.state, known.request is not None
        async with self._in_flight.joined(live, ids, by_block=by_block) as under_way:
            if not before.tokens:
                adopted = await self._reuse.adopt(live, ids, self._residency.awake.get, emit)
                if isinstance(adopted, LiveState):
                    live.state = adopted
                    live.state.checkpoints.mark(before.checkpoints.marks)
                    self._reasons.took_over(live.uri, len(adopted.tokens))
                else:
                    self._reasons.took_nothing(live.uri, adopted)
            begins, held = len(before.tokens), len(live.state.tokens)
            try:
                seconds = await self._read(live, ids[held - begins :], emit, under_way, by_block=by_block)
            finally:
                count = len(live.state.tokens)
                if count == held:
                    live.state = before
                elif count == begins + len(ids):
                    chat = live.chat.opened(begins) if turn_open else live.chat
                    text_map = chat.text_map if text_map is None else text_map
                    live.chat = replace(chat, turn_open=turn_open, text_map=text_map)
                if count > held and known.request is not None:
                    live.interrupted = Interrupted(known.request, known.begins_at, begins + len(ids), count)
                if count > held:
                    live.dirty = True
                    self._reuse.note(live)
        return HasRead(held - begins, seconds)

    async def _read(
        self, live: Session, ids: Sequence[int], emit: OnEvent, under_way: Reading, *, by_block: bool
    ) -> float:
        """Gives the seconds that it took. Raises LeftMidway: it was cancelled, and whole blocks of it stay."""
        loop, before, start = asyncio.get_running_loop(), len(live.state.tokens), time.monotonic()

        def tell(done: int, total: int) -> None:
            under_way.advance(total - done)
            emit(ProgressEvent("prefill", done, total))

        def on_tokens(done: int, total: int) -> None:
            loop.call_soon_threadsafe(tell, done, total)
            tell_progress(done, total)

        try:
            with tell_prefill(self._bus, live, len(ids)) as tell_progress:
                reading = generation.read(live.model, live.state, ids, on_tokens, by_block=by_block)
                await self._run(reading, lambda: len(live.state.tokens) == before + len(ids))
        except asyncio.CancelledError:
            if before < len(live.state.tokens):
                raise _left_midway(live, Written(), was_read=False, branched=None) from None
            raise
        return time.monotonic() - start

    async def read_turn(self, live: Session, turn: NewTurn, emit: OnEvent, known: Known = NEVER) -> HasRead:
        """Read a turn of a chat, and note its messages. known: as for `read`."""
        read, begins = HasRead(0, 0.0), len(live.state.tokens)
        if turn.begun:
            return read
        if turn.ids or not turn.at:
            read = await self.read(live, turn.ids, emit, turn_open=True, text_map=turn.text_map, known=known)
        live.chat = replace(live.chat.opened(begins), turn_open=True, text_map=turn.text_map, root=turn.root)
        return read

    async def write(
        self,
        use: Use,
        live: Session,
        order: WriteOrder,
        emit: OnEvent,
        *,
        read: tuple[int, int],
        started: float,
        look: Look | None = None,
        known: Known = NEVER,
    ) -> GenerateResult:
        """Go on writing. read: how many tokens the request had to read, and how many of them came from another session.
        look: the look that the session was before the request, if it was one. known: by what it is known again.

        An answer for which there is no more memory ends there.

        Raises GenerationFailed: tokens committed before it stay. LeftMidway: it was cancelled, and not all undone."""
        loop, before, written = asyncio.get_running_loop(), len(live.state.tokens), Written()
        first_token_s: list[float] = []
        answer = UnderWay(order, written, before - len(order.begun), known, live.state.random_key)
        room = AnswerRoom(self._residency.memory, self._journal, use, answer.begins + order.max_tokens)

        def on_token(token: int | None, piece: Piece) -> None:
            if not first_token_s:
                first_token_s.append(time.monotonic() - started)
                tell_first(first_token_s[0])
            live.dirty = live.dirty or len(live.state.tokens) > before
            event = TokenEvent(token, piece.text, piece.channel, piece.call, written.logprobs_of(token))
            loop.call_soon_threadsafe(emit, event)

        try:
            require_wanted()
            if order.seeded:
                live.state.random_key = await self._engine.call(initial_key)
            while not written.ended:
                room.begin(live)
                with tell_decode(self._bus, live) as tell_first:
                    writing = generation.write(live.model, live.state, order, written, on_token, room)
                    await self._run(writing, lambda: written.ended, writes=True)
                await room.settled()
                if not written.ended:
                    answer.note(live, goes_on=True)
                    live = await self._more_room(use, live, room, emit)
            final = await self._engine.call(partial(_final_digest, live)) if order.prove else None
        except BaseException as error:
            # After any failure (of a tokenizer, of a caller that went away) committed tokens stay. Without one the
            # session is as it was.
            await room.settled()
            live = self._residency.awake.get(use.uri, live)
            if len(live.state.tokens) > before:
                answer.note(live, goes_on=not isinstance(error, (GenerationFailed, InvalidConstraint)))
            answer.end(live, has_written=len(live.state.tokens) > before)
            if isinstance(error, asyncio.CancelledError) and (read[0] or written.tokens):
                raise _left_midway(live, written, was_read=read[0] > 0, branched=look) from None
            raise
        if len(live.state.tokens) > answer.begins:
            answer.note(live, goes_on=is_unwanted())
        answer.end(live, has_written=len(live.state.tokens) > before)
        self._reuse.note(live)
        return GenerateResult(
            session=str(live.uri),
            **written.facts(order),
            token_count=len(live.state.tokens),
            prefilled_tokens=read[0] - read[1],
            cached_tokens=read[1],
            time_to_first_token_s=first_token_s[0] if first_token_s else None,
            seconds=time.monotonic() - started,
            final_logits_blake3=final,
            woken=use.woken,
            branched=look if live.dirty else None,
            recomputed_tokens=recomputed_tokens(),
        )

    async def _more_room(self, use: Use, live: Session, room: AnswerRoom, emit: OnEvent) -> Session:
        """Give the session, once there is more room for its answer; without it, if there can be none."""
        try:
            return await self._room_for(use, live, room.wanted(), emit)
        except (MemoryBudgetExceeded, NotEnoughMemory, StoreError):
            session = self._residency.awake.get(use.uri)
            if session is None:
                raise
            room.is_last = True
            return session

    async def _run(self, steps: AnySteps[None], is_done: Callable[[], bool], *, writes: bool = False) -> None:
        """Run steps. A cancellation after they are done is ignored."""
        try:
            await self._engine.run(steps, writes=writes)
        except asyncio.CancelledError:
            if not is_done():
                raise

    async def change_sampling(self, live: Session, by: Sampling) -> None:
        """Set the given parameters of the session. The random key starts anew only if a seed is given. Raises
        InvalidSampling."""
        sampling, names = live.drawing(by), by.named()
        if "seed" in names:
            live.state.random_key = await self._engine.call(initial_key)
        live.dirty = live.dirty or "seed" in names or sampling != live.sampling
        live.sampling = sampling


def require_same_model(before: Identity, now: LoadedModel, uri: SessionUri) -> None:
    """Refuse a model that was loaded again from other files while a session waited for memory. Raises ModelChanged."""
    if now.identity != before:
        raise ModelChanged(
            f"The files of model {now.name!r} changed while {uri} waited for memory; send the request again.",
            model=now.name,
            session=str(uri),
        )


def _final_digest(live: Session) -> str:
    assert live.state.last_logits is not None
    return generation.logits_digest(live.state.last_logits)


def _left_midway(live: Session, written: Written, *, was_read: bool, branched: Look | None) -> LeftMidway:
    return LeftMidway(
        was_read=was_read,
        tokens=tuple(written.tokens),
        text=written.text,
        token_count=len(live.state.tokens),
        branched=branched,
    )
