"""What the daemon can be asked for: one method a verb, all on the event loop, none of which knows of wires.

Every request for a session takes its turn, so two never see it half changed. A session that sleeps is woken by the
request that needs it. What has begun to change durable state runs to its end even if the client goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import __version__
from ..errors import TorporError
from ..memvid.disk.budget import Budget
from ..memvid.disk.location import default_store_path
from ..memvid.errors import SessionNotFound
from ..memvid.exchange.incoming import owner_of
from ..memvid.format.manifest import require_session_map
from ..memvid.operations import Order, set_mark
from ..memvid.store import IndexRow, Receipt, Store
from ..memvid.units import format_plural
from ..memvid.uri import VERSION_MARK, SessionUri, parse_reference
from ..snapshot.blas import library_in_use
from ..snapshot.canary import Policy
from ..snapshot.digests import DigestCache, FileCheck, default_cache_path
from ..snapshot.kv_format import KvChoice
from .api.recomputed import RecomputePolicy
from .api.results import (
    AnalysisResult,
    AppendResult,
    ClearResult,
    CloseReport,
    DeleteResult,
    Emit,
    FoldResult,
    ForkResult,
    GenerateResult,
    Look,
    MaintenanceResult,
    MarksResult,
    ModelInfo,
    SessionDetail,
    SessionInfo,
    SleepResult,
    StatsResult,
    Status,
    WakePlanResult,
    WakeResult,
    WarmResult,
    WhyResult,
)
from .api.sampling import Sampling
from .chat.conversing import Conversing, require_transcript
from .chat.folds import FoldOrder, Folds
from .chat.prompt_io import Exchanges
from .config.configuring import ConfigFile, Configuring, Settings
from .config.foresight import healed_first
from .engine import generation
from .engine.admission import MAX_WAITING, Priority, Queue, queued
from .engine.buffers import Buffers
from .engine.cancellation import to_the_end
from .engine.decoding import MOST_ROWS, Decoder
from .engine.engine import Engine
from .engine.generation import WriteOrder
from .engine.pieces import NAMES_AT_ONCE, in_pieces
from .engine.sampler import initial_key
from .errors import (
    EmptyContext,
    InvalidTokens,
    InvalidTranscript,
    ServiceClosed,
    SessionAwake,
    SessionBusy,
    SessionExists,
)
from .events.bus import Bus, Subscription, Wanted
from .events.events import SessionCreated, SessionDeleted, SessionForked
from .memory.claims import Use
from .memory.loading import Loader, load_first
from .memory.memory import default_budget
from .memory.model_registry import ModelChoice, Place, Shelf, choices_of
from .memory.watching import ChangePolicy
from .models.adapters import AdapterChoice
from .models.chat_template import Message
from .models.models import DEMO_MODEL_FOLDER, DEMO_MODEL_NAME, LoadedModel
from .models.rates import Measured
from .prefixes.prefix_history import Reasons
from .prefixes.reuse import PrefixReuse, ReusePolicy
from .prefixes.reuse_counts import Hits
from .residency import listing
from .residency.labels import Labels
from .residency.planning import Planning, require_as_ordered
from .residency.residency import Keeping, Residency
from .residency.roll import Roll
from .sessions.encoding import Encoder
from .sessions.sessions import Durable, Session
from .sessions.tracing import told
from .sessions.transcripts import OnDivergence, message_of
from .sleep.disk_space import Way
from .sleep.forking import Forking, ForkOrder
from .sleep.hibernation import Hibernation, LastSleep, WakeOrder
from .sleep.ledgers import Ledgers
from .sleep.maintenance import (
    MAX_PROBLEMS_TOLD,
    Maintenance,
    marks_of,
    nothing_done,
    problems_told,
    result_of,
    with_awake,
)
from .sleep.quantising import Ageing, AgePolicy, QuantiseOrder, Quantising, Tally, order_of
from .sleep.recomputing import Recomputing
from .upkeep.analyst import Analyst
from .upkeep.healing import Healing
from .upkeep.scrubbing import Scrub, ScrubPolicy


class Service:
    """The sessions of one store on the models of one process. Build it with `open`, end it with `close`."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        shelf: Shelf,
        loader: Loader,
        bus: Bus,
        *,
        changed_unseen: Sequence[FileCheck] = (),
        canary: Policy = "always",
        trusting: bool = False,
        memory_budget: int | None = None,
        idle_sleep_s: float | None = None,
        prefix_reuse: ReusePolicy = "exact",
        recompute: RecomputePolicy = "off",
        on_model_change: ChangePolicy = "refuse",
        stop_within_s: float | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._store = store
        self._last_sleep: LastSleep | None = None
        self._changed_unseen = tuple(changed_unseen)
        self._engine = engine
        self._shelf = shelf
        self._loader = loader
        self.bus = bus
        self.queue = Queue(max_waiting)
        way = Way()
        self._measured = Measured(store)
        recomputing = Recomputing(engine, self._measured, recompute)
        self._hibernation = Hibernation(store, engine, way, self.bus, recomputing, canary=canary, trusting=trusting)
        self._maintenance = Maintenance(store, way)
        self._analyst = Analyst(store)
        self._forking = Forking(store, self._hibernation)
        self._quantising = Quantising(store, engine, self._hibernation)
        self._ageing: Ageing | None = None
        self._config: Configuring | None = None
        self._hits = Hits()
        self._reuse = PrefixReuse(store, engine, self._hibernation, self.bus, self._hits, prefix_reuse)
        self._encoder = Encoder()
        self._buffers = Buffers(engine)
        self._residency = Residency(
            store,
            self._hibernation,
            Ledgers(store, self._hibernation, engine, bus),
            shelf,
            loader,
            self._require_working,
            default_budget(shelf.weights_bytes()) if memory_budget is None else memory_budget,
            self._buffers,
            self.bus,
            idle_sleep_s,
            on_model_change,
            stop_within_s,
        )
        self._planning = Planning(self._hibernation, self._residency, shelf)
        self._reasons = Reasons(self._encoder, self._reuse, self._residency.awake.get)
        self._conversing = Conversing(self._encoder, self._residency, engine, bus)
        self._exchanges = Exchanges(engine, self._residency, self._reuse, self._reasons, self._measured, bus)
        self._folds = Folds(
            store,
            self._hibernation,
            self._residency,
            self._encoder,
            self._conversing,
            self._exchanges,
            self._forget_words,
            bus,
        )
        self._healing = Healing(store, engine, self._hibernation, self._maintenance, self._residency, self.bus)
        self._roll = Roll(store, self._residency.awake, self._residency.looks)
        self._labels = Labels(self._residency, self._hits, self._roll, self._delete)
        self._scrub: Scrub | None = None
        self._started = time.monotonic()
        self._preparing: asyncio.Task[CloseReport] | None = None
        self._keeping: asyncio.Task[Keeping] | None = None
        self._closing: asyncio.Task[CloseReport] | None = None

    @classmethod
    async def open(
        cls,
        *,
        store_path: str | os.PathLike[str] | None = None,
        models: Mapping[str, str | ModelChoice] | None = None,
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
        recompute: RecomputePolicy = "off",
        on_model_change: ChangePolicy = "refuse",
        batch_rows: int = MOST_ROWS,
        max_waiting: int = MAX_WAITING,
        scrub: ScrubPolicy | None = None,
        stop_within_s: float | None = None,
    ) -> Service:
        """Take the store (by default the user's), start the engine, and load the models that are to be there from the
        start: a name and how it is served, or its folder or hub name alone; the first is the default. With none, the
        bundled demo model is served under the name "demo". Those that are loaded later are looked at.

        kv, adapters: of the models of which a folder or name is given alone: how all of them quantise keys and values
            as they compute them (not at all if None), and by the name of the model what is loaded on top of it.
        trusting: wakes take the KV on the disk for what was written, without hashing it.
        canary: when a wake proves that the state computes what the slept one did.
        batch_rows: how many sessions of a model may decode in one call; 1: each alone, so that its numbers are to the
            bit what they are where nobody else is served.
        max_waiting: how many requests may wait for their turn, for memory or the engine.
        prefix_reuse: what a new session takes over of those that begin alike: what is to the bit as if it had read it
            itself, all tokens in common (`longest`), or nothing (`off`).
        recompute: whether a wake that would be slower than its tokens are computed again does the latter: never
            (`off`), where the very bits result (`exact`), or always (`fastest`).
        scrub: how sleeping sessions are read again, while nobody wants anything, and healed where they are damaged; not
            at all if None.
        quantise: from which age on sleeping sessions are kept in fewer bits, and in how many; None: all stay exact.
        check_models: read every model file anew, whatever is remembered of it; `warnings` then names those that had
            changed unseen.

        memory_budget: bytes that models and sessions may take; what does not fit sleeps until it is asked for. By
            default the models and a share of what is available beside them (`memory.DEFAULT_SHARE`).
        idle_sleep_s: after how many seconds a session that nobody uses is put to sleep; never if None.
        stop_within_s: seconds that a stop has to put sessions to sleep; of those that it has no time for it keeps the
            ledgers. As long as it takes if None.
        on_model_change: what becomes of a loaded model whose files change: nothing is begun on it until they are back
            (`refuse`), or its sessions are put to sleep and it is loaded anew (`reload`).

        The other budgets are bytes: what the store may hold, may write in a day (UTC), and leaves free on the disk. A
        sleep that would go past one is refused, and its session stays awake. The sleeps of `close` are refused by the
        last of the three only.

        Raises:
            StoreLocked: another daemon has the store.
            ModelUnavailable, ModelFilesMissing: a model cannot be loaded, or what was looked at is no model; the store
                is let go again. What `load_model` raises of an adapter, likewise.
            UnknownModel: an adapter is for a model that is not to be served.
            MemoryBudgetExceeded: the models alone take more than the budget.
        """
        sources = models or {DEMO_MODEL_NAME: str(DEMO_MODEL_FOLDER)}
        shelf = Shelf(choices_of(sources, adapters or {}, kv))
        budget = Budget(store_budget, daily_write_budget, keep_free)
        place = store_path or default_store_path()
        digests = DigestCache(digest_cache or default_cache_path(), full=check_models)
        loader = Loader(digests)
        store = await asyncio.to_thread(lambda: Store.open(place, writable=True, budget=budget))
        bus = Bus()
        engine = Engine(Decoder(batch_rows, bus.from_any_thread()))
        try:
            await load_first(shelf, loader, memory_budget)
            service = cls(
                store,
                engine,
                shelf,
                loader,
                bus,
                changed_unseen=digests.changed_unseen,
                canary=canary,
                trusting=trusting,
                memory_budget=memory_budget,
                idle_sleep_s=idle_sleep_s,
                prefix_reuse=prefix_reuse,
                recompute=recompute,
                on_model_change=on_model_change,
                stop_within_s=stop_within_s,
                max_waiting=max_waiting,
            )
            await service._buffers.bound(service._residency.memory.for_sessions)
        except BaseException:
            loader.close()
            await asyncio.to_thread(engine.stop)
            store.close()
            raise
        service._reuse.learn_stored()
        if scrub is not None:
            service._scrub = Scrub(store, scrub, service.bus, service._healing.mend)
            service._hibernation.on_damage = service._scrub.suspect
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
        if opening.rows_corrected:
            files = format_plural(opening.rows_corrected, "file")
            found.append(
                f"{files} of the store and its index are of different moments (a backup was put back, or the copy is "
                "of a store in use). The index was put right. `torpor verify --deep` tells whether all is there."
            )
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
        and those that have begun are waited for: callers cancel what is running first. Runs to its end, as `close`. The
        stop after one that was refused has its whole time again.
        """
        if self._closing is not None:
            return await self.close()
        if self._keeping is not None:
            return (await to_the_end(self._keeping)).report()
        if self._preparing is None:
            self._preparing = asyncio.ensure_future(self._prepare_close(self._last_sleeps()))
        return await to_the_end(self._preparing)

    async def _prepare_close(self, order: LastSleep) -> CloseReport:
        keeping = Keeping()
        await self._residency.keep_all(order, keeping, give_up=False)
        if keeping.failed and self._keeping is None:  # else somebody has ended the daemon meanwhile
            self._preparing = self._last_sleep = self._hibernation.stopping = None
        return keeping.report()

    def _last_sleeps(self) -> LastSleep:
        """What holds for all sleeps of this stop: its time begins when it is asked for first."""
        if self._last_sleep is None:
            within = self._residency.stop_within_s
            self._last_sleep = LastSleep(None if within is None else time.monotonic() + within)
            self._hibernation.stopping = self._last_sleep
        return self._last_sleep

    async def begin_close(self) -> None:
        """The first half of `close`, for callers that have requests to wait for before the second: from now on the time
        of the stop runs and no more work is begun. What is under way ends, or stops where it may; meanwhile every
        changed session is put to sleep."""
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._begin_close(self._last_sleeps()))
        await to_the_end(self._keeping)

    async def _begin_close(self, order: LastSleep) -> Keeping:
        self._maintenance.stop()
        keeping = Keeping.after(await self._preparing) if self._preparing is not None else Keeping()
        await self._residency.keep_all(order, keeping, give_up=True)
        return keeping

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
        await self.begin_close()
        assert self._keeping is not None
        keeping = await self._keeping
        if self._config is not None:
            await self._config.close()
        # what was under way may have ended with a session in memory that was not there before
        await self._residency.keep_all(self._last_sleeps(), keeping, give_up=True)
        await self._residency.close()
        if self._scrub is not None:
            await self._scrub.close()
        if self._ageing is not None:
            await self._ageing.close()
        await self._reuse.close()
        self._loader.close()
        await asyncio.to_thread(self._encoder.close)
        await asyncio.to_thread(self._analyst.close)
        await asyncio.to_thread(self._maintenance.close)
        await asyncio.to_thread(self._hibernation.close)
        await asyncio.to_thread(self._engine.stop)
        await asyncio.to_thread(self._measured.save)
        self._store.close()
        self.bus.close()
        return keeping.report()

    def follow(self, file: ConfigFile, settings: Settings) -> None:
        """Keep to a configuration file from now on: when it changes, what it says is taken over. settings: those that
        it had at the start."""
        self._config = Configuring(file, settings, self._shelf, self._residency, self.queue, self.bus)

    async def reload_config(self) -> None:
        """Read the configuration file anew, if there is one. What is wrong with it `status` tells; then all stays."""
        self._require_open()
        if self._config is not None:
            await self._config.reload()

    async def status(self) -> Status:
        """The daemon as a whole."""
        self._require_open()
        asleep = await in_pieces(self._roll.count_asleep())
        return Status(
            version=__version__,
            pid=os.getpid(),
            store=str(self._store.path),
            models=tuple(self._info_of(place) for place in self._shelf.places.values()),
            sessions_awake=len(self._residency.awake),
            sessions_asleep=asleep,
            memory=self._residency.memory.info(),
            blas=library_in_use() or "the BLAS that MLX ships",
            uptime_s=time.monotonic() - self._started,
            queue=self.queue.info(),
            prefix_hits=self._reuse.hits,
            prefix_misses=self._reuse.misses,
            cached_tokens=self._reuse.cached_tokens,
            batched_tokens=self._engine.batched_tokens,
            scrub=self._scrub.info(self._healing.healed, self._healing.failed) if self._scrub is not None else None,
            config=None if self._config is None else self._config.info(),
        )

    @told
    @queued
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
            InvalidUri, SessionExists, UnknownModel; InvalidDraft, LimitExceeded for what could never be slept; what
            loading the model raises.
        """
        uri = parse_reference(session)
        name = self._shelf.place(model).name
        settings = sampling or Sampling()
        async with self._residency.turn(uri) as use:
            return listing.info_of_awake(await self._begin(use, uri, name, settings, tuple(labels), system))

    @told
    @queued
    async def append(
        self,
        *,
        session: str,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        priority: Priority = "normal",
        create: bool = False,
        emit: Emit,
    ) -> AppendResult:
        """Read text or tokens to the end of the session's ledger: all, or nothing if it fails or is cancelled.

        create: make the session, on the default model, if there is none of that name.

        Raises:
            InvalidTokens, ContextOverflow, GenerationFailed, and what a wake raises.
        """
        if (text is None) == (tokens is None):
            raise InvalidTokens("Give either text or tokens to append.")
        started = time.monotonic()
        async with self._woken(session, emit, create=create) as (use, live):
            look = self._branch(live)
            ids = list(tokens) if tokens is not None else await self._encoder.text(live, text or "")
            await in_pieces(generation.require_valid(live.model, ids))
            await self._reasons.note(live, "append", ids)
            live = await self._exchanges.room_for(use, live, len(ids), emit)
            cached = await self._exchanges.read(live, ids, emit, turn_open=False)
            return AppendResult(
                session=str(live.uri),
                tokens_added=len(ids),
                token_count=len(live.state.tokens),
                prefilled_tokens=len(ids) - cached,
                cached_tokens=cached,
                seconds=time.monotonic() - started,
                woken=use.woken,
                branched=look,
            )

    @told
    @queued
    async def generate(
        self,
        *,
        session: str,
        max_tokens: int | None = None,
        text: str | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        priority: Priority = "normal",
        create: bool = False,
        emit: Emit,
    ) -> GenerateResult:
        """Go on writing at the end of the ledger, after reading `text` if there is any.

        create: make the session, on the default model, if there is none of that name.
        max_tokens: if None, `DEFAULT_MAX_TOKENS`, or what fits.
        sampling: what is other than the session's own, for this request alone; a seed that is named begins random
            numbers of its own.

        Raises:
            InvalidSampling, EmptyContext, ContextOverflow, GenerationFailed, and what a wake raises.
        """
        started = time.monotonic()
        async with self._woken(session, emit, create=create) as (use, live):
            drawing, look = live.sampling.changed(sampling), self._branch(live)
            ids = await self._encoder.text(live, text) if text else []
            if not ids and not live.state.tokens:
                raise EmptyContext(
                    f"{live.uri} has read nothing yet; append a text to it first.", session=str(live.uri)
                )
            await self._reasons.note(live, "generate", ids)
            count = generation.count_to_write(live.model, len(live.state.tokens) + len(ids), max_tokens)
            live = await self._exchanges.room_for(use, live, len(ids) + count, emit)
            cached = await self._exchanges.read(live, ids, emit, turn_open=False) if ids else 0
            order = WriteOrder(count, drawing, tuple(stop), prove, alone=prove, seeded=_names_seed(sampling))
            read = (len(ids), cached)
            return await self._exchanges.write(
                live, order, emit, read=read, started=started, woken=use.woken, look=look
            )

    @told
    @queued
    async def chat(
        self,
        *,
        session: str,
        message: str | None = None,
        role: str = "user",
        messages: Sequence[Message] | None = None,
        on_divergence: OnDivergence = "refuse",
        max_tokens: int | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        priority: Priority = "normal",
        create: bool = False,
        emit: Emit,
    ) -> GenerateResult:
        """Read a message in the model's chat template, and answer it; or `messages`, the whole chat up to the one that
        is to be answered, of which only what is new is tokenised and read.

        on_divergence: what becomes of a transcript that is not what the session has: refused, or the session goes back
            to where they part, and its present state stays as an earlier version. create, max_tokens, sampling: as for
            `generate`.

        Raises:
            InvalidSampling, InvalidTranscript, TranscriptDiverged; TemplateUnusable, ContextOverflow, GenerationFailed,
            and what a wake raises.
        """
        if (message is None) == (messages is None):
            raise InvalidTranscript("Give either a message or messages, the whole transcript.")
        if messages is not None:
            require_transcript(messages)
        started = time.monotonic()
        async with self._woken(session, emit, create=create) as (use, live):
            drawing, look = live.sampling.changed(sampling), self._branch(live)
            if messages is None:
                turn = await self._conversing.message(live, message_of(role, message or ""))
            else:
                turn = await self._conversing.transcript(live, messages)
            refusing = messages is not None and on_divergence == "refuse"
            await self._reasons.note(live, "chat", turn.ids, turn.at, turn.common, refusing=refusing)
            if messages is not None and refusing:
                self._conversing.require_no_divergence(live, turn, messages)
            count = generation.count_to_write(live.model, turn.at + len(turn.ids), max_tokens)
            self._conversing.require_room(live, turn, count)
            rewinds, computed = turn.at < len(live.state.tokens), 0
            before = live if rewinds else None
            try:
                if rewinds:
                    live = await self._conversing.go_back(use, live, turn, emit)
                    computed = live.state.computed_tokens
                live = await self._exchanges.room_for(use, live, len(turn.ids) + count, emit)
                cached = await self._exchanges.read_turn(live, turn, emit)
                if rewinds:
                    self._reasons.went_back(live.uri)
                order = WriteOrder(
                    count, drawing, tuple(stop), prove, keep_end=True, alone=prove, seeded=_names_seed(sampling)
                )
                read = (len(turn.ids), cached)
                result = await self._exchanges.write(
                    live, order, emit, read=read, started=started, woken=use.woken, look=look
                )
            except BaseException:
                if before is not None:
                    self._conversing.leave_asleep(before)
                raise
            if rewinds:
                prefilled = result.prefilled_tokens + computed
                result = replace(result, rewound_to=turn.at, prefilled_tokens=prefilled)
            return result

    @told
    @queued
    async def set(self, *, session: str, sampling: Mapping[str, float | int], emit: Emit) -> SessionInfo:
        """Change how a session draws its tokens, from now on: what is named, and nothing else. A seed that is named
        begins its random numbers anew. One that sleeps is woken, and its next sleep keeps the change.

        Raises:
            InvalidSampling, and what a wake raises. SessionAwake: it is only looked at.
        """
        async with self._residency.woken(self._resolve(session), emit) as (_, live):
            if (look := self._look(live)) is not None:
                raise SessionAwake(
                    f"{live.uri} is awake for a look at version {look.version}, token {look.token_count}, which a look "
                    "leaves as it is. Put it to sleep and set again, for the session as its newest version has it; or "
                    "fork it, and set the fork.",
                    session=str(live.uri),
                    version=look.version,
                )
            await self._exchanges.change_sampling(live, sampling)
            stored_bytes = sum(row.bundle_bytes for row in self._store.versions(live.uri))
            return listing.info_of_awake(live, self._store.find_session(live.uri), stored_bytes)

    @told
    async def sleep(self, *, session: str, emit: Emit) -> SleepResult:
        """Make a session durable and free its memory. The receipt tells what the next wake gives; asking again tells
        the same, with nothing written.

        Raises:
            EmptyContext, NoSpace and what else a store refuses; the session then stays awake.
        """
        started = time.monotonic()
        async with self._residency.turn(self._resolve(session)) as use:
            return await to_the_end(self._sleep(use.uri, emit, started))

    @told
    @queued
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
        uri, version = await self._version_of(session, version)
        async with self._residency.turn(uri) as use:
            order = WakeOrder(version, at_token, strict)
            live = self._residency.live(use.uri)
            if live is None:
                return await self._wake(use, order, emit, started)
            require_as_ordered(live, order, self._residency.find_row(use.uri, version))
            newest = self._store.find_session(use.uri)
            return listing.wake_result(
                live, newest, bytes_read=0, tokens_prefilled=0, seconds=time.monotonic() - started, already_awake=True
            )

    async def plan_wake(
        self, *, session: str, version: int | None = None, at_token: int | None = None, strict: bool = False
    ) -> WakePlanResult:
        """What `wake` would do if it were asked the same, and how long that would take here. Nothing is done.

        Raises:
            What `wake` would raise before it reads a block. ModelNotLoaded: the model never was, so nobody can tell.
        """
        uri, version = await self._version_of(session, version)
        async with self._residency.turn(uri):
            return await self._planning.plan(uri, WakeOrder(version, at_token, strict))

    async def list_sessions(self, *, namespace: str | None = None) -> list[SessionInfo]:
        """All sessions, or those of one namespace, by name."""
        self._require_open()
        return await in_pieces(self._roll.infos(namespace))

    async def stats(self, *, label: str | None = None, namespace: str | None = None) -> StatsResult:
        """Figures of all sessions, or of those of a namespace or a label, together and by label."""
        self._require_open()
        return await self._labels.stats(label, namespace)

    @told
    @queued
    async def warm(
        self, *, sessions: Sequence[str] = (), label: str | None = None, namespace: str | None = None, emit: Emit
    ) -> WarmResult:
        """Wake sessions before somebody asks for them, those that are named and those of a label, as far as memory is
        free: nobody else goes to sleep for it, and no model is loaded. One that is awake already counts as a hit.

        Raises:
            SessionNotFound: of one that is named; nothing is woken then.
        """
        self._require_open()
        uris = [self._resolve(session) for session in sessions]
        return await self._labels.warm(uris, label, namespace, emit)

    @told
    async def clear(self, *, label: str, namespace: str | None = None, dry_run: bool = False) -> ClearResult:
        """Delete all sessions of a label, each in its turn: from memory and disk, and what new sessions find of them.
        What cannot be deleted is in the report, with why."""
        self._require_open()
        return await self._labels.clear(label, namespace, dry_run=dry_run)

    async def show(self, *, session: str) -> SessionDetail:
        """One session in full; a sleeping one is read from its bundle and stays asleep.

        Raises:
            SessionNotFound, and what a damaged bundle raises.
        """
        uri = self._resolve(session)
        async with self._residency.turn(uri):
            versions = self._store.versions(uri)
            marks = await self._hibernation.on_io(lambda: listing.marks_to_show(self._store, uri))
            live = self._residency.live(uri)
            if live is not None:
                return listing.detail_of_awake(live, versions, marks)
            self._residency.require_row(uri)
            models, look = list(self._shelf.loaded()), self._residency.looks.find(uri)
            return await self._hibernation.on_io(
                lambda: listing.detail_of_asleep(self._store, versions, marks, models, look)
            )

    @told
    async def why(self, *, session: str) -> WhyResult:
        """What became of the prefixes of the last requests for a session, the latest last.

        Raises:
            SessionNotFound.
        """
        uri = self._resolve(session)
        return WhyResult(str(uri), self._reasons.of(uri))

    @told
    async def analyse(
        self, *, session: str, kind: str | None = None, labels: Sequence[str] | None = None, emit: Emit
    ) -> AnalysisResult:
        """Figures of a stored version: of the newest of a session, awake or asleep, or of the one behind an `@`.

        kind, labels: what the artifact is called; by default `kv-analysis`, and the session's labels, its model and the
            version. Other requests, for this session too, go on meanwhile.

        Raises:
            SessionNotFound: also of a session that is awake and has never slept. AmbiguousVersion.
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

    @told
    @queued
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
            SessionNotFound, AmbiguousVersion, EmptyContext, NoSuchPosition, what a sleep raises, and, at
            an earlier token, what a wake raises; then there is no fork, and the other session is as it was.
        """
        started = time.monotonic()
        self._require_open()
        wanted = parse_reference(name)
        source, row = self._resolve(session.partition(VERSION_MARK)[0]), None
        if VERSION_MARK in session:
            row = await self._hibernation.on_io(lambda: self._store.resolve_version(session))
        async with self._residency.turn_with_name(source, wanted) as use:
            kept = None if labels is None else tuple(labels)
            order = await to_the_end(self._order_of_fork(source, row, wanted, at_token, kept, emit))
            if order.at_token not in (None, order.row.token_count):
                async with self._residency.room_to_wake(use, order.row, order.at_token) as model:
                    forked = await to_the_end(self._forking.cut_off(order, model, emit))
            else:
                forked = await to_the_end(self._forking.refer_to_all(order))
        result = listing.result_of_fork(order, forked, seconds=time.monotonic() - started)
        self.bus.publish(
            SessionForked(
                wanted,
                source=order.row.uri,
                tokens=result.token_count,
                tokens_prefilled=result.tokens_prefilled,
                bytes_written=result.bytes_written,
                blocks_reused=result.blocks_reused,
                seconds=result.seconds,
            )
        )
        return result

    @told
    @queued
    async def fold(
        self,
        *,
        session: str,
        name: str,
        summary: str | None = None,
        summarise: int | None = None,
        tail: int = 0,
        labels: Sequence[str] | None = None,
        priority: Priority = "normal",
        emit: Emit,
    ) -> FoldResult:
        """Make `session` durable as it stands and free its memory, and begin a smaller session `name` with its system
        text, a summary of it and its last tokens. It is awake, and durable as well.

        summary: the text; or summarise: of how many tokens at most the model writes one, at the end of the session's
            context, or of what is before the tail where that has no room; that is not kept there. tail: how many of its
            last tokens the new session has as they are, fewer where that lets them begin with a turn. labels: the new
            one's own; those of the other if None.

        Raises:
            InvalidFold, SessionExists, SessionNotFound, EmptyContext, TemplateUnusable, ContextOverflow,
            GenerationFailed, and what a sleep or a wake raises. Then there is no new session, and the other one has
            lost nothing.
        """
        order = FoldOrder(summary, summarise, tail, None if labels is None else tuple(labels))
        wanted = parse_reference(name)
        return await self._folds.make(self._resolve(session), wanted, order, emit)

    @told
    @queued
    async def load_model(self, *, model: str) -> ModelInfo:
        """Load a model, if it is not loaded: others, and sessions that nobody uses, make room for it.

        Raises:
            UnknownModel, MemoryBudgetExceeded, and what loading it raises.
        """
        try:
            await self._residency.load(model)
        except asyncio.CancelledError:
            if self._shelf.place(model).model is None:
                raise  # else what had begun ran to its end
        return self._info_of(self._shelf.place(model))

    @told
    async def unload_model(self, *, model: str) -> ModelInfo:
        """Put the sessions on a model to sleep and free its memory; the next request that needs it loads it again.

        Raises:
            UnknownModel. ModelInUse: a request needs it. What a sleep raises.
        """
        await self._residency.unload(model)
        return self._info_of(self._shelf.place(model))

    @told
    async def delete(self, *, session: str) -> DeleteResult:
        """Remove a session and all its versions, from memory and from disk. Bytes that others share stay.

        So is a session that is not listed, because repair has set all its versions aside.

        Raises:
            SessionNotFound.
        """
        uri = self._resolve_to_delete(session)
        async with self._residency.turn(uri):
            return await to_the_end(self._delete(uri))

    @told
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

        Operations run one after the other; sessions are served meanwhile. What has begun runs to its end. Before a
        repair, what is damaged is computed again, as far as that can be done here.

        Raises:
            SessionNotFound, InvalidPolicy, CorruptMarks, and what else the store refuses.
            SessionAwake: the session is to be quantised, and is awake.
            RepairPutOff: what is damaged can be computed again, only not now; nothing was changed.
        """
        self._require_open()
        if operation == "quantise":
            return await self._quantise(session, order_of(session, bits, after_days, dry_run=dry_run))
        if operation == "forget" and session is not None:
            uri = parse_reference(session)  # one that is gone may have left bytes, which a cut off forget still owes
            async with self._residency.turn(uri):
                return await to_the_end(self._forget(uri, dry_run=dry_run))
        uri_or_all = None if session is None else self._store.resolve(session)
        order = Order(operation, uri_or_all, dry_run, keep_last, keep_days, cold_after_days)
        if operation == "repair":
            self._require_working()
            if dry_run:
                foreseen = await self._healing.foresee()
                plan = await to_the_end(self._maintenance.run(partial(self._store.repair, dry_run=True)))
                return result_of(healed_first(plan, foreseen))
            await self._healing.heal()
        return await to_the_end(self._maintenance.carry_out(order))

    @told
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
            SessionNotFound, AmbiguousVersion, InvalidTag, TagTaken, MarkNotFound, CorruptMarks.
        """
        self._require_open()
        marking = partial(set_mark, self._store, session, tag=tag, untag=untag, pinned=pinned, move=move)
        return marks_of(await to_the_end(self._hibernation.on_writer(marking)))

    @told
    async def import_bundle(self, *, bundle_id: str, session: str | None = None) -> SleepResult:
        """Adopt the bundle of that id from the store's folder `incoming`, under its own name or another.

        Raises:
            SessionExists: a session of that name is awake.
            NameTaken: another session has that name, which has nothing to do with it.
            Corruption, and what else the store refuses; the store is then as it was.
        """
        started = time.monotonic()
        self._require_open()
        handed = bytes.fromhex(bundle_id)
        wanted = None if session is None else parse_reference(session)
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

    async def _wake(self, use: Use, order: WakeOrder, emit: Emit, started: float) -> WakeResult:
        try:
            return await self._residency.bring_back(use, order, emit, started)
        except asyncio.CancelledError:
            if use.woken is None or use.uri not in self._residency.awake:
                raise
            return use.woken  # what had begun ran to its end

    async def _begin(
        self,
        use: Use,
        uri: SessionUri,
        model: str,
        settings: Sampling,
        labels: tuple[str, ...] = (),
        system: str | None = None,
    ) -> Session:
        """A new session, whose turn is held."""
        self._residency.require_new(uri)
        async with self._residency.models.using(model, use) as chosen:
            state = await self._hibernation.begin(chosen, lambda: initial_key(settings))
            created = Session(uri, chosen, state, settings, labels=labels, system=system)
            require_session_map(created.to_map())
            self._residency.admit(created)
            self.bus.publish(SessionCreated(uri, chosen.name))
            return created

    def _woken(
        self, session: str, emit: Emit, *, create: bool
    ) -> contextlib.AbstractAsyncContextManager[tuple[Use, Session]]:
        """Hold a session alone, awake; a new one on the default model where there is none and `create` says so."""
        if not create:
            return self._residency.woken(self._resolve(session), emit)
        self._require_open()
        uri, model = parse_reference(session), self._shelf.place(None).name
        return self._residency.woken(uri, emit, lambda use: self._begin(use, uri, model, Sampling()))

    async def _sleep(self, uri: SessionUri, emit: Emit, started: float) -> SleepResult:
        live = self._residency.live(uri)
        if live is None:
            row, look = self._residency.require_row(uri), self._residency.looks.end(uri)
            durable = await self._hibernation.on_io(lambda: listing.durable_of_asleep(self._store, row))
            return listing.receipt_of_kept(
                durable, uri, already_asleep=look is None, looked_at=look.token_count if look else None
            )
        looked_at = len(live.state.tokens) if live.is_mere_look else None
        kept: Receipt | Durable = await self._residency.put_away(live, emit, "asked")
        if isinstance(kept, Durable):
            row = self._residency.require_row(uri)
            if row.bundle_id != kept.bundle_id:
                kept = await self._hibernation.on_io(lambda: listing.durable_of_asleep(self._store, row))
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
        if row is None:
            live = self._residency.live(source)
            if live is None:
                row, held = self._residency.standing(source)
            else:
                row = await self._residency.keep_changed(live, emit, "fork")
                held = len(live.state.tokens) if live.is_cut_short else None
            at_token = held if at_token is None else at_token
        return ForkOrder(row, uri, at_token, labels)

    async def _delete(self, uri: SessionUri) -> DeleteResult:
        if not self._store.can_be_deleted(uri):
            if uri not in self._residency.awake:
                self._residency.require_row(uri)  # raises
            self._residency.drop(uri)
            self._forget_words(uri)
            self.bus.publish(SessionDeleted(uri, 0, 0))
            return DeleteResult(str(uri), 0, 0, 0)
        report = await self._hibernation.on_writer(lambda: self._store.delete_session(uri))
        # Only now: what cannot be removed from the disk must not be lost from memory.
        self._residency.drop(uri)
        self._forget_words(uri)
        self.bus.publish(SessionDeleted(uri, report.versions_deleted, report.bytes_freed))
        return DeleteResult(
            session=str(uri),
            versions_deleted=report.versions_deleted,
            bundles_deleted=report.bundles_deleted,
            bytes_freed=report.bytes_freed,
            problems=problems_told(report.problems),
            problems_left_out=max(0, len(report.problems) - MAX_PROBLEMS_TOLD),
        )

    def _forget_words(self, uri: SessionUri) -> None:
        """Know no token of a session that is gone, nor any text of it."""
        self._reuse.forget(uri)
        self._reasons.forget(uri)
        self._hits.forget(uri)
        self._hibernation.forget(uri)

    async def _forget(self, uri: SessionUri, *, dry_run: bool) -> MaintenanceResult:
        try:
            result = await self._maintenance.carry_out(Order("forget", uri, dry_run))
        except SessionNotFound:
            if uri not in self._residency.awake:
                raise
            result = nothing_done("forget", dry_run=dry_run)  # it has never slept
        live = self._residency.awake.get(uri)
        if not dry_run:
            self._residency.drop(uri)  # only now, as in `_delete`
            self._forget_words(uri)
        if live is None:
            return result
        return with_awake(result, str(uri), len(live.state.tokens))

    async def _quantise(self, session: str | None, order: QuantiseOrder) -> MaintenanceResult:
        """Keep one session in fewer bits, or all that are old enough, one after the other, each in its turn; those that
        are in use at first come last."""
        tally = Tally(order)
        if session is not None:
            uri = self._resolve(session)
            async with self._residency.turn(uri) as use:
                if uri in self._residency.awake:
                    raise SessionAwake(f"{uri} is awake; put it to sleep first.", session=str(uri))
                await self._quantise_one(use, self._residency.require_row(uri), order, tally)
            return tally.report()
        in_use = []
        for uri in itertools.chain.from_iterable(self._store.iter_uris(NAMES_AT_ONCE)):
            if self._residency.turns.users(uri):
                in_use.append(uri)  # so that the others need not wait for its turn
            else:
                await self._quantise_in_turn(uri, order, tally)
        for uri in in_use:
            await self._quantise_in_turn(uri, order, tally)
        return tally.report()

    async def _quantise_in_turn(self, uri: SessionUri, order: QuantiseOrder, tally: Tally) -> None:
        try:
            async with self._residency.turn(uri) as use:
                row = self._store.find_session(uri)
                if row is not None:  # else it was deleted meanwhile
                    await self._quantise_one(use, row, order, tally)
        except SessionBusy as error:
            tally.fail(uri, error)

    async def _quantise_one(self, use: Use, row: IndexRow, order: QuantiseOrder, tally: Tally) -> None:
        try:
            plan = await self._quantising.leave(row, order, is_awake=row.uri in self._residency.awake)
            plan = plan or await self._quantising.plan(row, order, await self._facts(row.model, use))
            if plan.left is not None or order.dry_run:
                tally.add(plan, None)
                return
            async with self._residency.room_to_wake(use, row, times=2) as model:
                tally.add(plan, await to_the_end(self._quantising.carry_out(plan, order.bits, model)))
        except TorporError as error:
            tally.fail(row.uri, error)

    def about(self, name: object) -> SessionUri | None:
        """The session that a client means, whether there is one or not; None where its text is no name."""
        with contextlib.suppress(TorporError):
            return parse_reference(name.partition(VERSION_MARK)[0]) if isinstance(name, str) else None
        return None

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Subscription:
        """What happens from now on, as events: those of these names, all if None; of one session (there may be none of
        that name yet) or namespace only. It ends when the daemon has put its last session to sleep.

        Raises:
            UnknownEvent, InvalidUri, TooManySubscribers.
        """
        self._require_open()
        uri = None if session is None else parse_reference(session)
        return self.bus.subscribe(Wanted(None if names is None else frozenset(names), uri, namespace))

    def _look(self, live: Session) -> Look | None:
        """Where a session stands that is only looked at."""
        return listing.look_of(live, self._store.find_session(live.uri))

    def _branch(self, live: Session) -> Look | None:
        """What a session leaves behind that goes on from a look; or that has gone on, and behind whose version a newer
        one has come back since: that is told until a sleep has made the branch a version."""
        newest = self._store.find_session(live.uri)
        if newest is None or live.durable is None or not live.dirty or live.rewound:
            return self._look(live)
        if not live.stands_behind(newest, self._store.versions):
            return None
        return Look(live.durable.version, live.unchanged_tokens, newest.version, newest.ledger_tokens)

    async def _facts(self, name: str, use: Use) -> LoadedModel | None:
        """What is known of a model, which is loaded for that if it never was; None if it is not served."""
        if name not in self._shelf:
            return None
        known = self._shelf.facts(name)
        if known is None:
            async with self._residency.models.using(name, use) as known:
                pass
        return known

    def _info_of(self, place: Place) -> ModelInfo:
        residency = self._residency
        return listing.model_info(place, residency.last_use(place.name), residency.sessions_on(place.name))

    def _require_working(self) -> None:
        self._require_open()
        if self._keeping is not None:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
        if self._preparing is not None:
            raise ServiceClosed("The daemon was told to stop, and puts its sessions to sleep; try again in a moment.")

    def _require_open(self) -> None:
        if self._closing is not None:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")

    def _resolve(self, name: str) -> SessionUri:
        self._require_open()
        return self._store.resolve(name, also=self._residency.awake)

    async def _version_of(self, session: str, version: int | None) -> tuple[SessionUri, int | None]:
        """The session, and which version of it is meant: that behind an `@` of its name, or `version`."""
        if VERSION_MARK not in session:
            return self._resolve(session), version
        self._require_open()
        row = await self._hibernation.on_io(lambda: self._store.resolve_version(session))
        return self._resolve(str(row.uri)), row.version

    def _resolve_to_delete(self, name: str) -> SessionUri:
        """As `_resolve`; but a session of which nothing is listed may have versions that repair has set aside."""
        self._require_open()
        uri = parse_reference(name)
        return uri if self._store.can_be_deleted(uri) else self._resolve(name)


def _names_seed(sampling: Mapping[str, float | int] | None) -> bool:
    return sampling is not None and "seed" in sampling


def _ignore(_event: object) -> None:
    """For work that nobody watches."""
