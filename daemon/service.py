"""What the daemon can be asked for: one method a verb, all on the event loop, none of which knows of wires.

Every request for a session takes its turn, so two never see it half changed. A session that sleeps is woken by the
request that needs it. What has begun to change durable state runs to its end even if the client goes away.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from .. import __version__
from ..errors import TorporError
from ..memvid.budget import Budget
from ..memvid.errors import SessionNotFound
from ..memvid.incoming import owner_of
from ..memvid.location import default_store_path
from ..memvid.manifest import require_session_map
from ..memvid.orders import Order, set_mark
from ..memvid.sizes import format_plural
from ..memvid.store import IndexRow, Store
from ..memvid.uri import DEFAULT_NAMESPACE, VERSION_MARK, SessionUri
from ..snapshot.blas import library_in_use
from ..snapshot.canary import Policy
from ..snapshot.digests import DigestCache, FileCheck, default_cache_path
from ..snapshot.identity import require_nothing_differs
from ..snapshot.kv_format import KvChoice
from ..snapshot.restore import no_such_position
from ..snapshot.state import LiveState
from . import generation, listing
from .adapters import AdapterChoice
from .analyst import Analyst
from .buffers import Buffers
from .encoding import Encoder
from .engine import Engine
from .errors import EmptyContext, InvalidTokens, ServiceClosed, SessionAwake, SessionExists, UnknownModel
from .forking import Forking, ForkOrder
from .generation import WriteOrder, Written
from .hibernation import Hibernation, WakeOrder
from .maintenance import MAX_PROBLEMS_TOLD, Maintenance, marks_of, nothing_done, problems_told, with_awake
from .memory import Use, default_budget
from .models import DEMO_MODEL_FOLDER, DEMO_MODEL_NAME, LoadedModel, load_model
from .quantising import Ageing, AgePolicy, QuantiseOrder, Quantising, Tally, order_of
from .residency import Residency
from .results import (
    AnalysisResult,
    AppendResult,
    CloseReport,
    DeleteResult,
    Emit,
    ForkResult,
    GenerateResult,
    MaintenanceResult,
    MarksResult,
    Progress,
    SessionDetail,
    SessionInfo,
    SleepResult,
    Status,
    Token,
    WakeResult,
)
from .reuse import PrefixReuse, ReusePolicy
from .sampler import initial_key
from .sampling import Sampling
from .sessions import Durable, Session
from .waiting import to_the_end
from .way import Way


class Service:
    """The sessions of one store on the models of one process. Build it with `open`, end it with `close`."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        loaded: Mapping[str, LoadedModel],
        *,
        changed_unseen: Sequence[FileCheck] = (),
        canary: Policy = "always",
        trusting: bool = False,
        memory_budget: int | None = None,
        idle_sleep_s: float | None = None,
        prefix_reuse: ReusePolicy = "exact",
    ) -> None:
        self._store = store
        self._changed_unseen = tuple(changed_unseen)
        self._engine = engine
        self._models = dict(loaded)
        way = Way()
        self._hibernation = Hibernation(store, engine, way, canary=canary, trusting=trusting)
        self._maintenance = Maintenance(store, way)
        self._analyst = Analyst(store)
        self._forking = Forking(store, self._hibernation, self._model_named)
        self._quantising = Quantising(store, engine, self._hibernation, self._models)
        self._ageing: Ageing | None = None
        self._reuse = PrefixReuse(store, engine, self._hibernation, prefix_reuse)
        self._encoder = Encoder()
        self._buffers = Buffers(engine)
        self._residency = Residency(
            store,
            self._hibernation,
            self._model_named,
            self._require_working,
            self._weights_bytes,
            default_budget(self._weights_bytes()) if memory_budget is None else memory_budget,
            self._buffers,
            idle_sleep_s,
        )
        self._started = time.monotonic()
        self._preparing: asyncio.Task[CloseReport] | None = None
        self._closing: asyncio.Task[CloseReport] | None = None

    @classmethod
    async def open(
        cls,
        *,
        store_path: str | os.PathLike[str] | None = None,
        models: Mapping[str, str] | None = None,
        adapters: Mapping[str, AdapterChoice] | None = None,
        kv: KvChoice | None = None,
        digest_cache: Path | None = None,
        check_models: bool = False,
        store_budget: int | None = None,
        daily_write_budget: int | None = None,
        keep_free: int = 0,
        canary: Policy = "always",
        trusting: bool = False,
        quantise: AgePolicy | None = None,
        memory_budget: int | None = None,
        idle_sleep_s: float | None = None,
        prefix_reuse: ReusePolicy = "exact",
    ) -> Service:
        """Take the store (by default the user's), start the engine, and load the models: name to folder or hub name,
        in order; the first is the default. With none, the bundled demo model is loaded under the name "demo".

        kv: how all of them quantise keys and values as they compute them; not at all if None.
        adapters: by the name of the model that each is loaded on top of.
        trusting: wakes take the KV on the disk for what was written, without hashing it.
        canary: when a wake proves that the state computes what the slept one did.
        prefix_reuse: what a new session takes over of those that begin alike: what is to the bit as if it had read it
            itself, all tokens in common (`longest`), or nothing (`off`).
        quantise: from which age on sleeping sessions are kept in fewer bits, and in how many; None: all stay exact.
        check_models: read every model file anew, whatever is remembered of it; `warnings` then names those that had
            changed unseen.

        memory_budget: bytes that models and sessions may take; what does not fit sleeps until it is asked for. By
            default the models and a share of what is available beside them (`memory.DEFAULT_SHARE`).
        idle_sleep_s: after how many seconds a session that nobody uses is put to sleep; never if None.

        The other budgets are bytes: what the store may hold, may write in a day (UTC), and leaves free on the disk. A
        sleep that would go past one is refused, and its session stays awake. The sleeps of `close` are refused by the
        last of the three only.

        Raises:
            StoreLocked: another daemon has the store.
            ModelUnavailable: a model cannot be loaded; the store is let go again. What `load_model` raises of an
                adapter, likewise.
            UnknownModel: an adapter is for a model that is not to be served.
            MemoryBudgetExceeded: the models alone take more than the budget.
        """
        sources = models or {DEMO_MODEL_NAME: str(DEMO_MODEL_FOLDER)}
        adapters = adapters or {}
        _require_served(adapters, sources)
        budget = Budget(store_budget, daily_write_budget, keep_free)
        place = store_path or default_store_path()
        store = await asyncio.to_thread(lambda: Store.open(place, writable=True, budget=budget))
        engine = Engine()
        try:
            digests = DigestCache(digest_cache or default_cache_path(), full=check_models)
            loaded = {}
            for name, source in sources.items():
                loaded[name] = await engine.call(partial(load_model, name, source, digests, adapters.get(name), kv))
            service = cls(
                store,
                engine,
                loaded,
                changed_unseen=digests.changed_unseen,
                canary=canary,
                trusting=trusting,
                memory_budget=memory_budget,
                idle_sleep_s=idle_sleep_s,
                prefix_reuse=prefix_reuse,
            )
            await service._buffers.bound(service._residency.memory.for_sessions)
        except BaseException:
            await asyncio.to_thread(engine.stop)
            store.close()
            raise
        service._reuse.learn_stored()
        if quantise is not None:
            service._ageing = Ageing(lambda: service._quantise(None, quantise.order), quantise.every_s)
        return service

    @property
    def warnings(self) -> tuple[str, ...]:
        """What opening the store, or a check of the models, found wrong, a sentence each; a person should see them
        before they are needed."""
        opening = self._store.opening
        found = [finding.message for finding in opening.unreadable]
        if opening.index_rebuilt is not None and opening.rows_added:
            bundles = format_plural(opening.rows_added, "bundle")
            found.append(f"The index was made anew from {bundles}: {opening.index_rebuilt}.")
        if opening.rows_dropped:
            gone = format_plural(opening.rows_dropped, "bundle")
            found.append(f"{gone} that the index knew can be found no more, nor woken.")
        found += [
            f"{each.path} has other bytes than when it was last read, and the same size and times. The model is "
            "identified by what it has now; what slept before is refused unless the file is put back."
            for each in self._changed_unseen
        ]
        return tuple(found)

    async def prepare_close(self) -> CloseReport:
        """Put every changed session to sleep, by the rules of `close`; all of them stay in memory.

        If each could be kept, no more work is taken, so that the `close` which is to follow loses nothing. If not, the
        report says which and why, and the sessions are served as before. Meanwhile requests for a session are refused,
        and those that have begun are waited for: callers cancel what is running first. Runs to its end, as `close`.
        """
        if self._closing is not None:
            return await self.close()
        if self._preparing is None:
            self._preparing = asyncio.ensure_future(self._prepare_close())
        return await to_the_end(self._preparing)

    async def _prepare_close(self) -> CloseReport:
        report = await self._residency.keep_all()
        if report.failed:
            self._preparing = None
        return report

    async def close(self) -> CloseReport:
        """Take no more work, put every changed session to sleep, and let the store go.

        Callers cancel what is running first. A session that cannot be kept is in the report, with why. It runs to its
        end even when the caller is cancelled; whoever asks again waits for the same end, and has the same report. No
        budget of the store's size or of the day costs a session its last sleep; what the disk must keep free may.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        return await to_the_end(self._closing)

    async def _close(self) -> CloseReport:
        prepared = await self._preparing if self._preparing is not None else CloseReport((), {})
        report = await self._residency.keep_all()
        await self._residency.close()
        if self._ageing is not None:
            await self._ageing.close()
        await self._reuse.close()
        await asyncio.to_thread(self._encoder.close)
        await asyncio.to_thread(self._analyst.close)
        await asyncio.to_thread(self._maintenance.close)
        await asyncio.to_thread(self._hibernation.close)
        await asyncio.to_thread(self._engine.stop)
        self._store.close()
        return CloseReport((*prepared.slept, *report.slept), report.failed, report.empty)

    async def status(self) -> Status:
        """The daemon as a whole."""
        self._require_open()
        stored = {row.uri for row in self._store.iter_sessions()}
        return Status(
            version=__version__,
            pid=os.getpid(),
            store=str(self._store.path),
            models=tuple(listing.model_info(model) for model in self._models.values()),
            sessions_awake=len(self._residency.awake),
            sessions_asleep=len(stored - self._residency.awake.keys()),
            memory=self._residency.memory.info(),
            blas=library_in_use() or "the BLAS that MLX ships",
            uptime_s=time.monotonic() - self._started,
            prefix_hits=self._reuse.hits,
            prefix_misses=self._reuse.misses,
            cached_tokens=self._reuse.cached_tokens,
        )

    async def create(
        self,
        *,
        session: str,
        model: str | None = None,
        labels: Sequence[str] = (),
        sampling: Sampling | None = None,
        system: str | None = None,
    ) -> SessionInfo:
        """A new, empty session. It is in memory only until its first sleep.

        Raises:
            InvalidUri, SessionExists, UnknownModel; InvalidDraft, LimitExceeded for what could never be slept.
        """
        uri = _uri_of_new(session)
        chosen = self._model_named(model)
        settings = sampling or Sampling()
        async with self._residency.turn(uri):
            if uri in self._residency.awake or self._store.find_session(uri) is not None:
                raise _exists(uri)
            state = await self._engine.call(lambda: chosen.new_state(initial_key(settings)))
            created = Session(uri, chosen, state, settings, labels=tuple(labels), system=system)
            require_session_map(created.to_map())
            self._residency.admit(created)
            return listing.info_of_awake(created)

    async def append(
        self, *, session: str, text: str | None = None, tokens: Sequence[int] | None = None, emit: Emit
    ) -> AppendResult:
        """Read text or tokens to the end of the session's ledger: all, or nothing if it fails or is cancelled.

        Raises:
            InvalidTokens, ContextOverflow, GenerationFailed, and what a wake raises.
        """
        if (text is None) == (tokens is None):
            raise InvalidTokens("Give either text or tokens to append.")
        started = time.monotonic()
        async with self._residency.woken(self._resolve(session), emit) as (use, live):
            ids = list(tokens) if tokens is not None else await self._encoder.text(live, text or "")
            generation.require_valid(live.model, ids)
            live = await self._room_for(use, live, len(ids), emit)
            cached = await self._read(live, ids, emit, turn_open=False)
            return AppendResult(
                session=str(live.uri),
                tokens_added=len(ids),
                token_count=len(live.state.tokens),
                prefilled_tokens=len(ids) - cached,
                cached_tokens=cached,
                seconds=time.monotonic() - started,
                woken=use.woken,
            )

    async def generate(
        self,
        *,
        session: str,
        max_tokens: int,
        text: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        emit: Emit,
    ) -> GenerateResult:
        """Go on writing at the end of the ledger, after reading `text` if there is any.

        Raises:
            EmptyContext, ContextOverflow, GenerationFailed, and what a wake raises.
        """
        started = time.monotonic()
        async with self._residency.woken(self._resolve(session), emit) as (use, live):
            ids = await self._encoder.text(live, text) if text else []
            if not ids and not live.state.tokens:
                raise EmptyContext(
                    f"{live.uri} has read nothing yet; append a text to it first.", session=str(live.uri)
                )
            live = await self._room_for(use, live, len(ids) + max_tokens, emit)
            cached = await self._read(live, ids, emit, turn_open=False) if ids else 0
            order = WriteOrder(max_tokens, sampling or live.sampling, tuple(stop), prove)
            return await self._write(live, order, emit, read=(len(ids), cached), started=started, woken=use.woken)

    async def chat(
        self,
        *,
        session: str,
        message: str,
        role: str = "user",
        max_tokens: int,
        sampling: Sampling | None = None,
        prove: bool = False,
        emit: Emit,
    ) -> GenerateResult:
        """Read a message in the model's chat template, and answer it. Only the new turn is tokenised.

        Raises:
            TemplateUnusable, ContextOverflow, GenerationFailed, and what a wake raises.
        """
        started = time.monotonic()
        async with self._residency.woken(self._resolve(session), emit) as (use, live):
            ids = await self._encoder.turn(live, {"role": role, "content": message})
            live = await self._room_for(use, live, len(ids) + max_tokens, emit)
            cached = await self._read(live, ids, emit, turn_open=True)
            order = WriteOrder(max_tokens, sampling or live.sampling, (), prove, keep_end=True)
            return await self._write(live, order, emit, read=(len(ids), cached), started=started, woken=use.woken)

    async def sleep(self, *, session: str, emit: Emit) -> SleepResult:
        """Make a session durable and free its memory. The receipt tells what the next wake gives; asking again tells
        the same, with nothing written.

        Raises:
            EmptyContext, NoSpace and what else a store refuses; the session then stays awake.
        """
        started = time.monotonic()
        async with self._residency.turn(self._resolve(session)) as use:
            return await to_the_end(self._sleep(use.uri, emit, started))

    async def wake(
        self,
        *,
        session: str,
        version: int | None = None,
        at_token: int | None = None,
        strict: bool = False,
        emit: Emit,
    ) -> WakeResult:
        """Put a session's state back, at its last version or an earlier one, with nothing prefilled.

        The version is named by `version`, or behind an `@` of `session`: by number, tag, or digits of its bundle id.
        at_token: how many of its tokens are wanted, all if None. Where its caches can be cut back to them, one token is
            computed for their logits; else what lies behind the nearest record is.
        strict: refuse it too if another device, library or version computed it, which may differ in the last bits.

        Raises:
            AmbiguousVersion: several versions fit what is behind the `@`.
            SessionAwake: another version or position was asked for while the session is awake.
            NoSuchPosition: the version has fewer tokens than are wanted.
            CanaryFailed: the state does not compute what it did when it slept.
            IdentityMismatch, OwnerMismatch, CorruptBlock, ...: why it was refused; nothing live has changed.
        """
        started = time.monotonic()
        if VERSION_MARK in session:
            self._require_open()
            row = await self._hibernation.on_io(lambda: self._store.resolve_version(session))
            session, version = str(row.uri), row.version
        async with self._residency.turn(self._resolve(session)) as use:
            order = WakeOrder(version, at_token, strict)
            live = await self._residency.live(use.uri)
            if live is None:
                return await self._residency.bring_back(use, order, emit, started)
            _require_as_ordered(live, order)
            if strict:
                require_nothing_differs(live.differs, model=live.model.name)
            return listing.wake_result(
                live, bytes_read=0, tokens_prefilled=0, seconds=time.monotonic() - started, already_awake=True
            )

    async def list_sessions(self, *, namespace: str | None = None) -> list[SessionInfo]:
        """All sessions, or those of one namespace, by name."""
        self._require_open()
        newest = {row.uri: row for row in self._store.iter_sessions()}
        held = self._residency.awake
        gone = {uri for uri, row in newest.items() if uri in held and held[uri].gave_way_to(row.bundle_id)}
        awake = held.keys() - gone
        stored_bytes = self._store.index.stored_bytes()
        found = [
            listing.info_of_awake(held[uri], newest.get(uri), stored_bytes.get(uri, 0))
            if uri in awake
            else listing.info_of_asleep(newest[uri], stored_bytes.get(uri, 0))
            for uri in sorted(awake | newest.keys())
        ]
        return [info for info in found if namespace is None or info.namespace == namespace]

    async def show(self, *, session: str) -> SessionDetail:
        """One session in full; a sleeping one is read from its bundle and stays asleep.

        Raises:
            SessionNotFound, AmbiguousName, and what a damaged bundle raises.
        """
        uri = self._resolve(session)
        async with self._residency.turn(uri):
            versions = self._store.versions(uri)
            marks = await self._hibernation.on_io(lambda: listing.marks_to_show(self._store, uri))
            live = await self._residency.live(uri)
            if live is not None:
                return listing.detail_of_awake(live, versions, marks)
            self._residency.require_row(uri)
            models = self._models.values()
            return await self._hibernation.on_io(lambda: listing.detail_of_asleep(self._store, versions, marks, models))

    async def analyse(
        self, *, session: str, kind: str | None = None, labels: Sequence[str] | None = None, emit: Emit
    ) -> AnalysisResult:
        """Figures of a stored version: of the newest of a session, awake or asleep, or of the one behind an `@`.

        kind, labels: what the artifact is called; by default `kv-analysis`, and the session's labels, its model and the
            version. Other requests, for this session too, go on meanwhile.

        Raises:
            SessionNotFound: also of a session that is awake and has never slept. AmbiguousName, AmbiguousVersion.
            MalformedSnapshot, and what a damaged bundle raises.
        """
        started = time.monotonic()
        name, _, _ = session.partition(VERSION_MARK)
        uri = self._resolve(name)
        if uri in self._residency.awake and self._store.find_session(uri) is None:
            raise SessionNotFound(
                f"{uri} is awake and has never slept, and what is analysed is what is stored; put it to sleep first.",
                session=str(uri),
            )
        found = await self._analyst.analyse(session, kind=kind, labels=labels, emit=emit)
        live = self._residency.awake.get(found.row.uri)
        return AnalysisResult(
            session=str(found.row.uri),
            version=found.row.version,
            bundle_id=found.row.bundle_id.hex(),
            token_count=found.row.token_count,
            awake_tokens=len(live.state.tokens) if live is not None else None,
            artifact=found.artifact,
            seconds=time.monotonic() - started,
        )

    async def fork(
        self,
        *,
        session: str,
        name: str,
        at_token: int | None = None,
        labels: Sequence[str] | None = None,
        emit: Emit,
    ) -> ForkResult:
        """A new session `name` that begins as `session` stands, or as a version of it behind an `@`: it sleeps, is
        durable, and has all blocks in common with it. What an awake session has not slept is put to sleep for it.

        at_token: with only so many tokens; what lies behind the last full block is computed as by a wake at that token.
        labels: the fork's own; those of the other session if None.

        Raises:
            SessionExists: there is a session of that name.
            SessionNotFound, AmbiguousName, AmbiguousVersion, EmptyContext, NoSuchPosition, what a sleep raises, and, at
            an earlier token, what a wake raises; then there is no fork, and the other session is as it was.
        """
        started = time.monotonic()
        self._require_open()
        wanted = _uri_of_new(name)
        source, row = self._resolve(session.partition(VERSION_MARK)[0]), None
        if VERSION_MARK in session:
            row = await self._hibernation.on_io(lambda: self._store.resolve_version(session))
        if wanted == source:
            raise _exists(wanted)
        async with self._residency.turns_of(source, wanted) as use:
            if wanted in self._residency.awake or self._store.find_session(wanted) is not None:
                raise _exists(wanted)
            kept = None if labels is None else tuple(labels)
            order = await to_the_end(self._order_of_fork(source, row, wanted, at_token, kept, emit))
            if order.tokens < order.row.token_count:
                await self._residency.room_aside(use, order.row)
            forked = await to_the_end(self._forking.fork(order, emit))
        return listing.result_of_fork(order, forked, seconds=time.monotonic() - started)

    async def delete(self, *, session: str) -> DeleteResult:
        """Remove a session and all its versions, from memory and from disk. Bytes that others share stay.

        A session that is not listed, because repair has set all its versions aside, needs its full name.

        Raises:
            SessionNotFound, AmbiguousName.
        """
        uri = self._resolve_to_delete(session)
        async with self._residency.turn(uri):
            return await to_the_end(self._delete(uri))

    async def maintain(
        self,
        *,
        operation: str,
        session: str | None = None,
        dry_run: bool = False,
        keep_last: int | None = None,
        keep_days: float | None = None,
        cold_after_days: float | None = None,
        bits: int | None = None,
        after_days: float | None = None,
    ) -> MaintenanceResult:
        """Look after the store: gc, empty_quarantine, compact, repair, rebuild_index, prune, or forget a session; or
        quantise one, or all that have slept for `after_days`.

        Operations run one after the other; sessions are served meanwhile. What has begun runs to its end.

        Raises:
            SessionNotFound, AmbiguousName, InvalidPolicy, CorruptMarks, and what else the store refuses.
            SessionAwake: the session is to be quantised, and is awake.
        """
        self._require_open()
        if operation == "quantise":
            return await self._quantise(session, order_of(session, bits, after_days, dry_run=dry_run))
        if operation == "forget" and session is not None:
            uri = self._resolve_to_forget(session)
            async with self._residency.turn(uri):
                return await to_the_end(self._forget(uri, dry_run=dry_run))
        uri_or_all = None if session is None else self._store.resolve(session)
        order = Order(operation, uri_or_all, dry_run, keep_last, keep_days, cold_after_days)
        return await to_the_end(self._maintenance.carry_out(order))

    async def mark(
        self,
        *,
        session: str,
        tag: str | None = None,
        untag: str | None = None,
        pinned: bool | None = None,
        move: bool = False,
    ) -> MarksResult:
        """Tag or pin the version that `session` means, or take such a mark off.

        Raises:
            SessionNotFound, AmbiguousName, AmbiguousVersion, InvalidTag, TagTaken, MarkNotFound, CorruptMarks.
        """
        self._require_open()
        marking = partial(set_mark, self._store, session, tag=tag, untag=untag, pinned=pinned, move=move)
        return marks_of(await to_the_end(self._hibernation.on_writer(marking)))

    async def import_bundle(self, *, bundle_id: str, session: str | None = None) -> SleepResult:
        """Adopt the bundle of that id from the store's folder `incoming`, under its own name or another.

        Raises:
            SessionExists: a session of that name is awake.
            NameTaken: `session` is another session, which has nothing to do with it.
            Corruption, and what else the store refuses; the store is then as it was.
        """
        started = time.monotonic()
        self._require_open()
        handed = bytes.fromhex(bundle_id)
        wanted = None if session is None else _uri_of_new(session)
        owner = (
            wanted if wanted is not None else await self._hibernation.on_io(partial(owner_of, self._store.path, handed))
        )
        async with self._residency.turn(owner):
            if owner in self._residency.awake:
                raise SessionExists(
                    f"{owner} is awake; put it to sleep first, or import under another name.", session=str(owner)
                )
            adopting = partial(self._store.adopt_incoming, handed, as_uri=wanted, only_kin=True)
            receipt = await to_the_end(self._maintenance.run(adopting))
        return listing.receipt_of_sleep(receipt, seconds=time.monotonic() - started)

    async def _sleep(self, uri: SessionUri, emit: Emit, started: float) -> SleepResult:
        live = await self._residency.live(uri)
        if live is None:
            row = self._residency.require_row(uri)
            durable = await self._hibernation.on_io(lambda: listing.durable_of_asleep(self._store, row))
            return listing.receipt_of_kept(durable, uri, already_asleep=True)
        looked_at = len(live.state.tokens) if live.is_cut_short else None
        kept = await self._residency.put_away(live, emit)
        if isinstance(kept, Durable):
            return listing.receipt_of_kept(kept, uri, looked_at=looked_at)
        return listing.receipt_of_sleep(kept, seconds=time.monotonic() - started)

    async def _order_of_fork(
        self,
        source: SessionUri,
        row: IndexRow | None,
        uri: SessionUri,
        at_token: int | None,
        labels: tuple[str, ...] | None,
        emit: Emit,
    ) -> ForkOrder:
        """Which version is to be forked: what an awake session has not slept is put to sleep for it."""
        live = await self._residency.live(source) if row is None else None
        if live is not None:
            if live.durable is None or live.needs_sleep or not await self._hibernation.is_kept(live):
                await self._residency.keep(live, emit)
            row = self._residency.require_row(source)
            if at_token is None and live.is_cut_short:
                at_token = len(live.state.tokens)
        return ForkOrder(row or self._residency.require_row(source), uri, at_token, labels)

    async def _delete(self, uri: SessionUri) -> DeleteResult:
        if not self._store.can_be_deleted(uri):
            if uri not in self._residency.awake:
                self._residency.require_row(uri)  # raises
            self._residency.drop(uri)
            self._reuse.forget(uri)
            return DeleteResult(str(uri), 0, 0, 0)
        report = await self._hibernation.on_writer(lambda: self._store.delete_session(uri))
        # Only now: what cannot be removed from the disk must not be lost from memory.
        self._residency.drop(uri)
        self._reuse.forget(uri)
        return DeleteResult(
            session=str(uri),
            versions_deleted=report.versions_deleted,
            bundles_deleted=report.bundles_deleted,
            bytes_freed=report.bytes_freed,
            problems=problems_told(report.problems),
            problems_left_out=max(0, len(report.problems) - MAX_PROBLEMS_TOLD),
        )

    async def _forget(self, uri: SessionUri, *, dry_run: bool) -> MaintenanceResult:
        try:
            result = await self._maintenance.carry_out(Order("forget", uri, dry_run))
        except SessionNotFound:
            if uri not in self._residency.awake:
                raise
            result = nothing_done("forget", dry_run=dry_run)  # it has never slept
        live = self._residency.awake.get(uri)
        if live is None:
            return result
        if not dry_run:
            self._residency.drop(uri)  # only now, as in `_delete`
            self._reuse.forget(uri)
        return with_awake(result, str(uri), len(live.state.tokens))

    async def _quantise(self, session: str | None, order: QuantiseOrder) -> MaintenanceResult:
        """Keep one session in fewer bits, or all that are old enough, one after the other, each in its turn."""
        tally = Tally(order)
        uris = [row.uri for row in self._store.iter_sessions()] if session is None else [self._resolve(session)]
        for uri in uris:
            async with self._residency.turn(uri) as use:
                if session is not None and uri in self._residency.awake:
                    raise SessionAwake(f"{uri} is awake; put it to sleep first.", session=str(uri))
                row = self._store.find_session(uri) if session is None else self._residency.require_row(uri)
                if row is not None:  # else it was deleted meanwhile
                    await self._quantise_one(use, row, order, tally)
        return tally.report()

    async def _quantise_one(self, use: Use, row: IndexRow, order: QuantiseOrder, tally: Tally) -> None:
        try:
            plan = await self._quantising.plan(row, order, is_awake=row.uri in self._residency.awake)
            if plan.left is not None or order.dry_run:
                tally.add(plan, None)
                return
            await self._residency.room_aside(use, row, times=2)
            tally.add(plan, await to_the_end(self._quantising.carry_out(plan, order.bits)))
        except TorporError as error:
            tally.fail(row.uri, error)

    async def _room_for(self, use: Use, live: Session, count: int, emit: Emit) -> Session:
        """The session, once it has room for so many tokens more, in its context and in memory."""
        generation.require_room(live.model, live.state, count)
        return await self._residency.room_for(use, count, emit)

    async def _read(self, live: Session, ids: Sequence[int], emit: Emit, *, turn_open: bool) -> int:
        """Read tokens; how many of them need not be read, because another session had."""
        loop = asyncio.get_running_loop()
        before = live.state
        adopted = await self._reuse.adopt(live, ids, self._residency.awake.get, emit) if not before.tokens else None
        if adopted is not None:
            live.state = adopted.state
        held = len(live.state.tokens)

        def on_tokens(done: int, total: int) -> None:
            loop.call_soon_threadsafe(emit, Progress("prefill", done, total))

        try:
            rest = ids[adopted.cached_tokens :] if adopted else ids
            await self._engine.run(generation.read(live.model, live.state, rest, on_tokens))
        finally:
            # A cancellation may come when all has been read already: what is in the ledger is there to stay.
            if len(live.state.tokens) > held:
                live.turn_open, live.dirty = turn_open, True
                live.system = None if turn_open else live.system  # a chat's first turn has it before it
                self._reuse.note(live)
            else:
                live.state = before
        return adopted.cached_tokens if adopted else 0

    async def _write(
        self,
        live: Session,
        order: WriteOrder,
        emit: Emit,
        *,
        read: tuple[int, int],
        started: float,
        woken: WakeResult | None,
    ) -> GenerateResult:
        loop = asyncio.get_running_loop()
        held = len(live.state.tokens)
        first_token_s: list[float] = []
        written = Written()

        def on_token(token: int | None, text: str) -> None:
            if not first_token_s:
                first_token_s.append(time.monotonic() - started)
            live.dirty = True
            loop.call_soon_threadsafe(emit, Token(token, text))

        before = live.sampling, live.state.random_key, live.dirty
        try:
            await self._settle_sampling(live, order.sampling)
            await self._engine.run(generation.write(live.model, live.state, order, written, on_token))
            final = await self._engine.call(lambda: _final_digest(live.state)) if order.prove else None
        except BaseException:
            # Whoever fails after a token was committed (a tokenizer, a caller that went away), it is there to stay,
            # with the settings it was drawn by. Before that the session is as it was.
            if len(live.state.tokens) > held:
                live.dirty = True
            else:
                live.sampling, live.state.random_key, live.dirty = before
            raise
        self._reuse.note(live)
        return GenerateResult(
            session=str(live.uri),
            text=written.text,
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
        )

    async def _settle_sampling(self, live: Session, wanted: Sampling) -> None:
        """Make the wanted parameters the session's. The random key starts anew only with another seed (BR22)."""
        if wanted != live.sampling:
            if wanted.seed != live.sampling.seed:
                live.state.random_key = await self._engine.call(lambda: initial_key(wanted))
            live.sampling = wanted
            live.dirty = True

    def _weights_bytes(self) -> int:
        return sum(model.weights_bytes for model in self._models.values())

    def _require_working(self) -> None:
        self._require_open()
        if self._preparing is not None:
            raise ServiceClosed("The daemon was told to stop, and puts its sessions to sleep; try again in a moment.")

    def _require_open(self) -> None:
        if self._closing is not None:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")

    def _resolve(self, name: str) -> SessionUri:
        self._require_open()
        return self._store.resolve(name, also=self._residency.awake)

    def _resolve_to_delete(self, name: str) -> SessionUri:
        """As `_resolve`; but a session of which nothing is listed may have versions that repair has set aside."""
        try:
            return self._resolve(name)
        except SessionNotFound:
            uri = _uri_of_new(name)
            if not self._store.can_be_deleted(uri):
                raise
            return uri

    def _resolve_to_forget(self, name: str) -> SessionUri:
        """As `_resolve`; but a session that is gone may have left bytes, which a forget that was cut off still owes."""
        try:
            return self._resolve(name)
        except SessionNotFound:
            return _uri_of_new(name)

    def _model_named(self, name: str | None) -> LoadedModel:
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise UnknownModel(
                f"No model is loaded as {name!r}; there is {', '.join(map(repr, self._models))}. "
                f"Start the daemon with --model {name}=FOLDER.",
                model=name,
                loaded=list(self._models),
            )
        return self._models[name]


def _require_served(adapters: Mapping[str, AdapterChoice], models: Mapping[str, str]) -> None:
    for name in adapters:
        if name not in models:
            raise UnknownModel(
                f"There is an adapter for {name!r}, and no such model is to be served, only "
                f"{', '.join(map(repr, models))}. Give each adapter the name of its model.",
                model=name,
                loaded=list(models),
            )


def _uri_of_new(session: str) -> SessionUri:
    """The URI that a new session's name stands for: a bare name is in the default namespace."""
    if "://" in session:
        return SessionUri.parse(session)
    namespace, slash, name = session.rpartition("/")
    return SessionUri.parse(f"torpor://{namespace if slash else DEFAULT_NAMESPACE}/{name}")


def _exists(uri: SessionUri) -> SessionExists:
    return SessionExists(f"{uri} exists already; use it, delete it, or choose another name.", session=str(uri))


def _final_digest(state: LiveState) -> str:
    assert state.last_logits is not None
    return generation.logits_digest(state.last_logits)


def _ignore(_event: object) -> None:
    """For work that nobody watches."""


def _require_as_ordered(live: Session, order: WakeOrder) -> None:
    """Refuse to wake a session at another version or position than the one at which it is awake; and at a position that
    there would not be if it slept."""
    version, held = live.durable.version if live.durable else None, len(live.state.tokens)
    slept = live.durable.token_count if live.durable and not (live.needs_sleep and order.version is None) else held
    if order.at_token is not None and order.at_token > slept and order.version in (None, version):
        raise no_such_position(slept, order.at_token)
    changed = live.dirty or (live.is_cut_short and order.at_token is None)
    other_version = order.version is not None and (order.version != version or changed)
    if not other_version and order.at_token in (None, held):
        return
    wanted = [
        f"token {order.at_token}" if order.at_token is not None else "",
        f"version {order.version}" if order.version is not None else "",
    ]
    raise SessionAwake(
        f"{live.uri} is awake{' and has changed' if live.dirty else f' at version {version}'}, with "
        f"{format_plural(held, 'token')}; put it to sleep before waking {' of '.join(filter(None, wanted))}.",
        session=str(live.uri),
        version=order.version,
        at_token=order.at_token,
    )
