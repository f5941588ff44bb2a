"""The wake of one session: its steps and their threads.

The engine thread assembles, because that is MLX; disk work and hashing run on other threads, so that other sessions go
on. Callers hold the session alone (`sessions.Turns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import TorporError
from ...memvid.answers import Lossy, PartDiffers
from ...memvid.disk.paths import undoing
from ...memvid.errors import Corruption
from ...memvid.format.manifest import UNREAD
from ...memvid.store import Store
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot import restore
from ...snapshot.canary import Verdict
from ...snapshot.checkpoints import Checkpoint
from ...snapshot.errors import ContextTooShort, MalformedSnapshot
from ...snapshot.identity import decide_bits, require_circumstances, require_same
from ...snapshot.lossy import worst
from ...snapshot.state import LiveState, token_array
from ..api.events import OnEvent
from ..api.session import Recomputed
from ..api.waking import Because
from ..disk.store_threads import StoreThreads, reporter
from ..engine.engine import Engine, Steps
from ..engine.generation import find_logits, read_again, replay
from ..engine.sampler import initial_key
from ..events.bus import Bus
from ..events.events import LedgerRead, WakeCause, WakeEnded, WakeVerified
from ..models import canary
from ..models.models import LoadedModel
from ..sessions.sessions import Session
from ..sessions.tracing import tell_wake
from ..sessions.unprocessed_tail import Unread, text_map_in, without_answers, without_unread
from .orders import WakeOrder
from .version import digest_of


@dataclass(frozen=True, slots=True)
class Woken:
    """A woken session, the bytes read for it, and the canary's verdict. because: why tokens of it are computed again,
    if some are."""

    session: Session
    bytes_read: int
    canary: Verdict
    canary_seconds: float
    because: Because | None = None


@dataclass(frozen=True, slots=True)
class Prospect:
    """The prospect of a wake: the plan of a restore, and the differences of the backend."""

    plan: restore.WakePlan
    differs: tuple[PartDiffers, ...]


@dataclass(frozen=True, slots=True)
class _Restored:
    """A restored state, and the verdict of its canary with its seconds. same_end: of a version whose keys and values
    were not there, whether what was computed ends in the logits that it had; None of any other."""

    state: LiveState
    canary: Verdict
    canary_seconds: float
    same_end: bool | None = None


@dataclass(eq=False, repr=False)
class Waking:
    """Wakes sessions from a store. on_damage: called with a session that a wake has found damaged."""

    _store: Store
    _engine: Engine
    _threads: StoreThreads
    _bus: Bus
    _on_damage: Callable[[SessionUri], None]

    async def begin(self, model: LoadedModel, random_key: Callable[[], mx.array]) -> LiveState:
        """The state of a new session; its random key is made on the engine thread."""
        return await self._engine.call(lambda: model.new_state(random_key()))

    async def wake(self, uri: SessionUri, order: WakeOrder, model: LoadedModel, emit: OnEvent) -> Woken:
        """Wake a session on its model. All of it is verified before a session exists; no live session is touched.

        Without a record at the position, the missing part is computed: the logits for caches that can be cut by token,
        else all tokens behind the nearest record. This alone makes no new version: after a repair, that would be newer
        than the version that may come back.

        Raises:
            StoreError: it is not in the store, not what the index says, or damaged.
            SnapshotError: it belongs to another model, or cannot be restored by this version of Torpor.
            GenerationFailed: the model failed on it.
        """
        ended = partial(_end_of_wake, order.cause)
        with tell_wake(self._bus, uri, order.cause, order.version, ended) as tell_end:
            try:
                with await self._threads.on_io(partial(self._open, uri, order)) as reader:
                    woken = await self._wake(reader, order, model, emit)
            except Corruption:
                if order.cause != "heal":
                    self._on_damage(uri)
                raise
            tell_end(woken)
        return woken

    def _open(self, uri: SessionUri, order: WakeOrder) -> BundleReader:
        reader = self._store.open_session(uri, order.version)
        if order.cause != "heal":
            with undoing(reader.close):
                self._store.note_use(reader.bundle_id)
        return reader

    async def look(self, uri: SessionUri, order: WakeOrder, model: LoadedModel) -> tuple[BundleReader, Prospect | None]:
        """The prospect of a wake, from the manifest and block headers alone; None for a version with only a ledger.
        Changes nothing; the caller closes the reader. Needs no weights. Raises as `wake` before it reads a block."""
        reader = await self._threads.on_io(lambda: self._store.open_session(uri, order.version))
        try:
            if is_ledger_alone(reader, order):
                require_same(reader.manifest.identity, model.identity, model=model.name)
                return reader, None
            return reader, await self._look(reader, order, model)
        except BaseException:
            reader.close()
            raise

    async def _look(self, reader: BundleReader, order: WakeOrder, model: LoadedModel) -> Prospect:
        plan = await self._threads.on_io(
            lambda: restore.plan_wake(
                reader,
                model.identity,
                model.layout,
                model=model.name,
                context_tokens=model.context_tokens,
                at=order.at_token,
            )
        )
        backend = reader.manifest.session.get("backend")
        differs = require_circumstances(backend, model.backend, model=model.name, strict=order.strict)
        return Prospect(plan, differs)

    async def _wake(self, reader: BundleReader, order: WakeOrder, model: LoadedModel, emit: OnEvent) -> Woken:
        begun, uri = time.monotonic(), reader.manifest.uri
        kept = reader.manifest.session
        if order.version is not None:
            kept = await self._threads.on_io(lambda: without_answers(kept, uri, disowned_of(self._store, uri)))
        if is_ledger_alone(reader, order):
            return await self._begin_kept(reader, model, kept)
        kept = kept if order.at_token is None else without_unread(kept)
        prospect = await self._look(reader, order, model)
        plan, restored = prospect.plan, await self._restore(reader, prospect, model, begun, emit)
        durable = reader.receipt()
        wake = partial(Session.woken, uri, model, restored.state, durable, kept, plan.resumed_tokens)
        session = await self._threads.on_io(wake)
        session.last_read.note(plan.spans)
        session.loss = _loss_of(session, plan)
        # Later tokens were computed again, perhaps in other calls: their bits may differ from the blocks.
        session.unchanged_tokens = plan.resumed_tokens
        if restored.same_end is not None:
            session.dirty = True  # the next sleep keeps what was computed
            count = plan.target_tokens - plan.resumed_tokens
            again = Recomputed(durable.version, plan.resumed_tokens, count, restored.same_end, damaged=False)
            session.provenance = session.provenance.computed_again(None if restored.same_end else again)
        because: Because | None = "stripped" if restored.same_end is not None else _because_of(session)
        return Woken(session, plan.read_bytes, restored.canary, restored.canary_seconds, because)

    async def _restore(
        self, reader: BundleReader, prospect: Prospect, model: LoadedModel, begun: float, emit: OnEvent
    ) -> _Restored:
        plan = prospect.plan
        filling = await self._engine.call(lambda: restore.allocate(plan))
        await self._threads.on_io(partial(filling.run, reader, self._threads.fill, reporter("wake", emit)))
        self._bus.publish(WakeVerified(reader.manifest.uri, plan.read_bytes, time.monotonic() - begun))
        foreign, end = decide_bits(prospect.differs), plan.end
        found = (
            None if end is None else await self._engine.call(lambda: restore.read_checkpoint(reader, end, model.layout))
        )
        return await self._engine.run(self._assemble(filling, model, initial_key(), found, foreign=foreign))

    async def read_on(self, session: Session) -> Recomputed | None:
        """Read the unread end of the session's ledger, in reserved memory. Gives its report; None if it had no token.
        After a failure or a cancel the session must not be used. The session keeps the report only if other bits came
        out.

        Raises GenerationFailed: the model failed. MalformedSnapshot, ContextTooShort: the ledger is not the model's."""
        unread, start = session.unread, len(session.state.tokens)
        if unread is None:
            return None
        _require_readable(session, unread)
        await self._engine.run(_read_on(session, unread))
        same = digest_of(session) == unread.logits_digest
        assert session.durable is not None, "the end of a ledger comes out of a version"
        read = Recomputed(session.durable.version, start, len(unread.tokens), same, damaged=unread.damaged)
        again = read if unread.tokens else None
        session.chat = replace(session.chat, text_map=unread.text_map, turn_open=unread.turn_open)
        session.unread = None
        session.dirty = True
        self._bus.publish(LedgerRead(session.uri, len(session.state.tokens), len(unread.tokens), same))
        if not same:
            session.provenance = session.provenance.computed_again(again)
        return again

    def _assemble(
        self,
        filling: restore.Filling,
        model: LoadedModel,
        random_key: mx.array,
        end: Checkpoint | None,
        *,
        foreign: bool,
    ) -> Steps[_Restored]:
        """Turn filled memory into a state, run its canary, and bring it to its position: tokens behind the record are
        computed in the same calls as before, and missing logits by reading the last token once more. On the engine
        thread.

        random_key: for a state without one in a record. end: the record at the target, of a version whose keys and
        values are not there. foreign: whether the backend that computed the state may give other bits than this one.
        """
        state, plan = filling.assemble(model.new_caches(), random_key), filling.plan
        model.settle_form(state)
        verdict: Verdict = "not_run"
        begun, expected = time.monotonic(), filling.expected
        if expected is not None:
            verdict = canary.check(model, state, replace(expected, exact=expected.exact and not foreign))
        canary_seconds = 0.0 if verdict == "not_run" else time.monotonic() - begun
        if plan.resumed_tokens:
            yield None
        tokens = token_array(plan.tokens)
        behind = tokens[plan.resumed_tokens :]
        if end is not None:
            same = yield from read_again(model, state, tokens, end)
            return _Restored(state, verdict, canary_seconds, same)
        if behind:
            sizes = list(plan.passes.between(plan.resumed_tokens, len(tokens)))
            yield from replay(model, state, behind, sizes, ends=not plan.ends_within)
            if plan.ends_within:
                state.cut_back(plan.target_tokens)
                find_logits(model, state)
        elif not plan.has_logits:
            find_logits(model, state)
        return _Restored(state, verdict, canary_seconds)

    async def _begin_kept(self, reader: BundleReader, model: LoadedModel, kept: Mapping[str, Any]) -> Woken:
        """A session with only its ledger, before that is read."""
        manifest = reader.manifest
        require_same(manifest.identity, model.identity, model=model.name)
        state = await self.begin(model, initial_key)
        session = Session.woken(manifest.uri, model, state, reader.receipt(), kept, 0)
        return Woken(session, 0, canary="not_run", canary_seconds=0.0, because=_because_of(session))


def _because_of(session: Session) -> Because | None:
    return "ledger" if session.unread is not None and session.unread.tokens else None


def _read_on(session: Session, unread: Unread) -> Steps[None]:
    sizes = list(unread.passes.between(0, len(unread.tokens)))
    if sizes:
        yield from replay(session.model, session.state, unread.tokens, sizes)
    session.state.random_key = mx.array(np.frombuffer(unread.random_key, dtype="<u4"))


def _require_readable(session: Session, unread: Unread) -> None:
    model, count = session.model, len(session.state.tokens) + len(unread.tokens)
    if (highest := max(unread.tokens, default=0)) >= model.layout.vocabulary:
        raise MalformedSnapshot(
            f"The ledger has token {highest}, and the model's vocabulary ends at {model.layout.vocabulary - 1}.",
            token=highest,
            vocabulary=model.layout.vocabulary,
        )
    if count > model.context_tokens:
        raise ContextTooShort(
            f"The ledger holds {format_plural(count, 'token')}, and the context of model {model.name!r} ends at "
            f"{model.context_tokens}.",
            token_count=count,
            context_tokens=model.context_tokens,
        )


def _end_of_wake(cause: WakeCause, woken: Woken, seconds: float) -> WakeEnded:
    session = woken.session
    assert session.durable is not None
    return WakeEnded(
        session.uri,
        cause,
        version=session.durable.version,
        tokens=len(session.state.tokens),
        tokens_prefilled=session.state.computed_tokens,
        bytes_read=woken.bytes_read,
        canary=woken.canary,
        canary_seconds=woken.canary_seconds,
        seconds=seconds,
    )


def _loss_of(session: Session, plan: restore.WakePlan) -> Lossy | None:
    """The loss of a woken session, from its map and its blocks. Recomputed tokens are not lossy."""
    found = worst(session.loss, plan.loss)
    return found and found.within(plan.resumed_tokens)


def disowned_of(store: Store, uri: SessionUri) -> tuple[bytes, ...]:
    """The ids that were taken from answers of a session, as its newest version tells; none if that is damaged."""
    with suppress(TorporError, ValueError), store.open_session(uri) as reader:
        return text_map_in(reader.manifest.session, uri).disowned
    return ()


def is_ledger_alone(reader: BundleReader, order: WakeOrder) -> bool:
    """Whether a version has only a ledger, to be read again as a whole."""
    manifest = reader.manifest
    return not manifest.block_tokens and UNREAD in manifest.session and order.at_token is None
