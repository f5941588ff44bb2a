"""Reads a request into a session and writes the answer: on the engine, with events, all or nothing.

Owns these changes of a session: its ledger's end, its text map, its settings, whether it needs a sleep. Callers hold
the session alone, awake.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ...memvid.format.identity import Identity
from ...memvid.uri import SessionUri
from ...snapshot.state import LiveState
from ..api.events import OnEvent, ProgressEvent, TokenEvent
from ..api.reading import GenerateResult
from ..api.sampling import Sampling
from ..api.session import Look
from ..api.waking import WakeResult
from ..engine import generation
from ..engine.cancellation import LeftMidway, require_wanted
from ..engine.channels import Piece
from ..engine.engine import AnySteps, Engine
from ..engine.generation import WriteOrder, Written
from ..engine.sampler import initial_key
from ..errors import ModelChanged
from ..events.bus import Bus
from ..memory.line import Use
from ..models.models import LoadedModel
from ..models.rates import Measured
from ..prefixes.prefix_history import Reasons
from ..prefixes.reuse import PrefixReuse
from ..residency.residency import Residency
from ..sessions.sessions import Session
from ..sessions.tracing import tell_decode, tell_prefill
from ..sessions.transcripts import NewTurn, TextMap, message_of
from ..sleep.turn_journal import TurnJournal


class Exchanges:
    """Reads and writes in sessions."""

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        reuse: PrefixReuse,
        reasons: Reasons,
        measured: Measured,
        bus: Bus,
        journal: TurnJournal,
    ) -> None:
        self._journal = journal
        self._engine = engine
        self._residency = residency
        self._reuse = reuse
        self._reasons = reasons
        self._measured = measured
        self._bus = bus

    async def room_for(self, use: Use, live: Session, count: int, emit: OnEvent) -> Session:
        """Give the session, once it has room for `count` more tokens in its context, in memory and in the journal."""
        generation.require_room(live.model, live.state, count)
        identity = live.model.identity  # holds nothing else of a model that may be unloaded meanwhile
        found = await self._residency.room_for(use, count, emit)
        require_same_model(identity, found.model, found.uri)
        await self._journal.make_room(found, count)
        return found

    async def read(
        self, live: Session, ids: Sequence[int], emit: OnEvent, *, turn_open: bool, text_map: TextMap | None = None
    ) -> int:
        """Read tokens. Gives how many of them came from another session. A cancellation after all are read changes
        nothing: they stay in the ledger.
        """
        loop = asyncio.get_running_loop()
        before, begins = live.state, len(live.state.tokens)
        adopted = await self._reuse.adopt(live, ids, self._residency.awake.get, emit) if not before.tokens else None
        if adopted is not None:
            live.state = adopted.state
            self._reasons.took_over(live.uri, adopted.cached_tokens)
        held = len(live.state.tokens)

        def on_tokens(done: int, total: int) -> None:
            loop.call_soon_threadsafe(emit, ProgressEvent("prefill", done, total))
            tell_progress(done, total)

        try:
            rest = ids[adopted.cached_tokens :] if adopted else ids
            with tell_prefill(self._bus, self._measured, live, len(rest)) as tell_progress:
                reading = generation.read(live.model, live.state, rest, on_tokens)
                await self._run(reading, lambda: len(live.state.tokens) > held)
        finally:
            if len(live.state.tokens) > held:
                live.turn_open, live.dirty = turn_open, True
                live.text_map = live.text_map if text_map is None else text_map
                if turn_open:
                    live.open_chat(begins)
                self._reuse.note(live)
            else:
                live.state = before
        return adopted.cached_tokens if adopted else 0

    async def read_turn(self, live: Session, turn: NewTurn, emit: OnEvent) -> int:
        """Read a turn of a chat, and note its messages. Gives how many of its tokens came from another session."""
        cached, begins = 0, len(live.state.tokens)
        if turn.ids or not turn.at:
            cached = await self.read(live, turn.ids, emit, turn_open=True, text_map=turn.text_map)
        live.turn_open, live.text_map, live.root = True, turn.text_map, turn.root
        live.open_chat(begins)
        return cached

    async def write(
        self,
        live: Session,
        order: WriteOrder,
        emit: OnEvent,
        *,
        read: tuple[int, int],
        started: float,
        woken: WakeResult | None,
        look: Look | None = None,
        answer_id: bytes = b"",
    ) -> GenerateResult:
        """Go on writing. read: how many tokens the request had to read, and how many of them came from another session.
        look: the look that the session was before the request, if it was one. answer_id: names the answer.

        Raises GenerationFailed: tokens committed before it stay. LeftMidway: it was cancelled, and not all undone."""
        loop = asyncio.get_running_loop()
        held = len(live.state.tokens)
        first_token_s: list[float] = []
        written = Written()

        def on_token(token: int | None, piece: Piece) -> None:
            if not first_token_s:
                first_token_s.append(time.monotonic() - started)
                tell_first(first_token_s[0])
            live.dirty = True
            loop.call_soon_threadsafe(emit, TokenEvent(token, piece.text, piece.channel, piece.call))

        key, dirty = live.state.random_key, live.dirty
        try:
            require_wanted()
            if order.seeded:
                live.state.random_key = await self._engine.call(lambda: initial_key(order.sampling))
            with tell_decode(self._bus, self._measured, live) as tell_first:
                writing = generation.write(live.model, live.state, order, written, on_token)
                await self._run(writing, lambda: written.ended, writes=True)
            final = await self._engine.call(lambda: _final_digest(live.state)) if order.prove else None
        except BaseException as error:
            # After any failure (of a tokenizer, of a caller that went away) committed tokens stay. Without one the
            # session is as it was.
            if len(live.state.tokens) > held:
                live.dirty = True
                _note_answer(live, order, written, held, answer_id)
            else:
                live.state.random_key, live.dirty = key, dirty
            if isinstance(error, asyncio.CancelledError) and (read[0] or written.tokens):
                raise _left_midway(live, written, was_read=read[0] > 0, branched=look) from None
            raise
        finally:
            if order.seeded:
                live.state.random_key = key
        _note_answer(live, order, written, held, answer_id)
        self._reuse.note(live)
        return GenerateResult(
            session=str(live.uri),
            text=written.text,
            reasoning=written.reasoning,
            tool_calls=tuple(written.calls),
            tokens=tuple(written.tokens),
            finish_reason=written.finish_reason,
            token_count=len(live.state.tokens),
            prefilled_tokens=read[0] - read[1],
            cached_tokens=read[1],
            time_to_first_token_s=first_token_s[0] if first_token_s else None,
            seconds=time.monotonic() - started,
            logits_blake3=tuple(written.proofs) if order.prove else None,
            final_logits_blake3=final,
            woken=woken,
            branched=look if live.dirty else None,
        )

    async def _run(self, steps: AnySteps[None], is_done: Callable[[], bool], *, writes: bool = False) -> None:
        """Run steps. A cancellation after they are done is ignored."""
        try:
            await self._engine.run(steps, writes=writes)
        except asyncio.CancelledError:
            if not is_done():
                raise

    async def change_sampling(self, live: Session, by: Sampling) -> None:
        """Set the given parameters of the session. The random key starts anew only if a seed is given."""
        wanted, named = live.sampling.changed(by), by.named()
        if "seed" in named:
            live.state.random_key = await self._engine.call(lambda: initial_key(wanted))
        live.dirty = live.dirty or "seed" in named or wanted != live.sampling
        live.sampling = wanted


def require_same_model(before: Identity, now: LoadedModel, uri: SessionUri) -> None:
    """Refuse a model that was loaded again from other files while a session waited for memory. Raises ModelChanged."""
    if now.identity != before:
        raise ModelChanged(
            f"The files of model {now.name!r} changed while {uri} waited for memory; send the request again.",
            model=now.name,
            session=str(uri),
        )


def _final_digest(state: LiveState) -> str:
    assert state.last_logits is not None
    return generation.logits_digest(state.last_logits)


def _left_midway(live: Session, written: Written, *, was_read: bool, branched: Look | None) -> LeftMidway:
    return LeftMidway(
        was_read=was_read,
        tokens=tuple(written.tokens),
        text=written.text,
        token_count=len(live.state.tokens),
        branched=branched,
    )


def _note_answer(live: Session, order: WriteOrder, written: Written, held: int, answer_id: bytes) -> None:
    """Note the text of an answer behind token `held`, as the client was shown it (QX8)."""
    if order.keep_end and len(live.state.tokens) > held:
        # A failure here must not cost the answer; the map then ends before it, and nothing matches by text (QC10).
        with contextlib.suppress(Exception):
            answer = message_of("assistant", written.text, [asdict(call) for call in written.calls])
            end = len(live.state.tokens)
            live.text_map = live.text_map.extended([answer], start=held, end=end, answer=answer_id)
