"""Sleep and wake of one session: which thread does what, in the order that `design.md` gives.

The engine thread cuts and assembles, because that is MLX; everything that waits for the disk or hashes runs on
threads of its own, so that other sessions go on. Callers hold the session alone (`sessions.Turns`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ...memvid.disk.budget import FREE_BYTES
from ...memvid.errors import (
    BlockMissing,
    BudgetExceeded,
    BundleMissing,
    Corruption,
    IndexFailed,
    NoSpace,
    SessionNotFound,
    StoreError,
)
from ...memvid.folder.scrub_mark import read_ns
from ...memvid.format.blocks import BlockEntry
from ...memvid.format.bundle import BundleReader
from ...memvid.format.ledger_tail import UNREAD, unread_of
from ...memvid.format.salvaged import Salvaged, salvaged_from, salvaged_of
from ...memvid.maintenance.compaction_plan import CompactionPolicy
from ...memvid.store import Receipt, Store
from ...memvid.uri import SessionUri, not_found
from ...snapshot import restore
from ...snapshot.canary import Policy, Verdict
from ...snapshot.capture import Cut, cut
from ...snapshot.identity import Difference, decide_bits, require_circumstances, require_same
from ...snapshot.lossy import Loss, worst
from ...snapshot.state import LiveState, token_array
from ..api.events import OnEvent, ProgressEvent, Stage
from ..api.session import Recomputed
from ..api.waking import RecomputePolicy
from ..engine.engine import Engine, Steps
from ..engine.generation import find_logits, replay
from ..engine.sampler import initial_key
from ..errors import ServiceClosed, StopDeadline
from ..events.bus import Bus
from ..events.events import SleepCause, WakeCause, WakeEnded, WakeVerified
from ..models import canary
from ..models.models import LoadedModel
from ..models.rates import Measured, Rates
from ..sessions.sessions import Durable, Session, sampling_of
from ..sessions.tracing import tell_sleep, tell_wake
from ..sessions.unprocessed_tail import without_unread
from .choosing import Choice
from .compactor import Compactor
from .disk_space import Way
from .recomputing import Recomputing

# Threads that look into the store and read snapshots. Writing has one of its own: the store takes one writer at a
# time, and those that wait for it must not keep a wake from its thread.
READ_THREADS = 2
# Threads that fill and hash slots during wakes. Hashing and reading release the GIL; two keep two cores busy.
FILL_THREADS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """What is asked of a wake. version: the last one if None; at_token: how many of its tokens, all if None.

    strict: refuse what was computed by another device, library or version too. hashing: hash all that is read, whatever
        the daemon trusts: what is written anew from it would seal a flipped bit with a digest of its own. cause: what
        for, as it is told.
    """

    version: int | None = None
    at_token: int | None = None
    strict: bool = False
    hashing: bool = False
    cause: WakeCause = "asked"

    @property
    def may_recompute(self) -> bool:
        """Whether it is to be a session that somebody uses; for what else is read of it, what is stored is wanted."""
        return self.cause in ("asked", "warm") and not self.hashing


@dataclass(frozen=True, slots=True)
class LastSleep:
    """A sleep of a daemon that stops. until: by the monotonic clock, when it must be written; None: it takes what it
    takes."""

    until: float | None = None

    def share(self, seconds: float) -> float:
        """So many seconds, or a quarter of those that are left, if that is less."""
        return seconds if self.until is None else min(seconds, max(0.0, self.until - time.monotonic()) / 4)

    def require_time(self) -> None:
        """Raises StopDeadline once the time is over."""
        if self.until is not None and time.monotonic() >= self.until:
            raise StopDeadline(
                "The daemon stops, and the time that it has for that is over. Give it more with torpor serve "
                "--stop-within."
            )


@dataclass(frozen=True, slots=True)
class _Terms:
    """On what terms a state is written; see `Hibernation.sleep`."""

    last: LastSleep | None
    may_wait: bool


@dataclass(frozen=True, slots=True)
class Woken:
    """A session that was read back, how many bytes of state that took, whether all of them were hashed, and what the
    canary said."""

    session: Session
    bytes_read: int
    verified: bool
    canary: Verdict
    canary_seconds: float


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a wake will do: what it would read and compute to restore the session, whether it takes what it reads for
    what was written, what computed it otherwise than what computes here, and whether it is restored or recomputed."""

    plan: restore.WakePlan
    trusting: bool
    differs: tuple[Difference, ...]
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Brought:
    """A state that was restored or recomputed, as `Woken` tells of it. unchanged_tokens: as of `Session`."""

    state: LiveState
    bytes_read: int
    verified: bool
    verdict: Verdict
    canary_seconds: float
    unchanged_tokens: int
    recomputed: Recomputed | None = None


class Hibernation:
    """Puts sessions to sleep in a store and wakes them from it.

    on_damage: told of a session when a wake has found that its bytes are not those that were written.
    stopping: the last sleeps of a daemon that has begun to stop; those that had begun before have no longer either.
    recomputing: says whether a wake restores or recomputes.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        way: Way,
        bus: Bus,
        recomputing: Recomputing | None = None,
        *,
        canary: Policy = "always",
        trusting: bool = False,
    ) -> None:
        self._recomputing = recomputing or Recomputing(engine, Measured(store), "off")
        self._bus = bus
        self.on_damage: Callable[[SessionUri], None] = _ignore
        self.stopping: LastSleep | None = None
        self._canary = canary
        self._trusting = trusting
        self._store = store
        self._way = way
        self._engine = engine
        self._read = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="torpor-read")
        self._write = ThreadPoolExecutor(1, thread_name_prefix="torpor-write")
        self._fill = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="torpor-fill")
        self._compactor = Compactor(store, CompactionPolicy(), way)

    async def sleep(
        self,
        session: Session,
        emit: OnEvent,
        *,
        cause: SleepCause,
        last: LastSleep | None = None,
        may_wait: bool = False,
    ) -> Receipt:
        """Make the session's state durable; it stays in memory, clean. On failure it is as it was.

        cause: what for, as it is told. last: the daemon stops, so what is refused now is lost. Then the store may
        become larger than its budget, and more may be written than in a day; only what the disk must keep free is kept.
        may_wait: nothing is lost without it, so a daemon that begins to stop has its time for others.

        Raises:
            SnapshotError: the state cannot be kept.
            StoreError: it could not be made durable, for example for want of room.
            StopDeadline: the daemon stops, and there was no time for it. ServiceClosed: it stops, and this may wait.
        """
        with tell_sleep(self._bus, session, cause) as tell_end, self._compactor.giving_way():
            receipt = await self._keep_with_room(session, emit, _Terms(last, may_wait))
            tell_end(receipt)
            self._compactor.consider(receipt)
        session.durable = Durable.of(receipt)
        session.unchanged_tokens = receipt.token_count
        session.dirty = session.rewound = False
        session.state.checkpoints.became_durable(_checkpoints_in(receipt.entries, receipt.token_count))
        session.saved_from = session.lossy = None
        return receipt

    async def is_kept(self, session: Session) -> bool:
        """Whether the session's last snapshot is still there, with blocks that have the right ids: what a session that
        has not changed relies on when its memory is freed. Their bytes are not read again."""
        try:
            await self.require_kept(session)
        except StoreError:
            return False
        return True

    async def require_kept(self, session: Session) -> None:
        """As `is_kept`, with why not.

        Raises:
            StoreError: it is not there, or not to be relied on.
        """
        durable = session.durable

        def look() -> None:
            with self._store.open_session(session.uri, durable.version if durable else None) as reader:
                if durable is None or reader.bundle_id != durable.bundle_id:
                    raise not_found(session.uri, ())
                for entry in reader.entries:
                    reader.read_header(entry)

        await self.on_io(look)

    async def is_gone(self, session: Session) -> bool:
        """Whether the session's last snapshot is not there any more: neither damaged nor out of reach."""
        durable = session.durable
        if durable is None:
            return True

        def look() -> bool:
            try:
                with self._store.open_session(session.uri, durable.version) as reader:
                    return bool(reader.bundle_id != durable.bundle_id)
            except (BundleMissing, SessionNotFound):
                return True
            except StoreError:
                return False

        return await self.on_io(look)

    def is_superseded(self, session: Session) -> bool:
        """Whether nothing has happened in the session since its wake, and a fuller or newer version has come back."""
        if not session.is_untouched:
            return False
        try:
            return session.gave_way_to(self._store.find_session(session.uri), self._store.versions)
        except StoreError:
            return False

    async def _keep_with_room(self, session: Session, emit: OnEvent, terms: _Terms) -> Receipt:
        """Cut and write a snapshot; once more where the disk had no room for it beside a file that a compaction was
        writing: that one comes to its end first."""
        ended_before = self._way.ended()
        try:
            return await self._keep_all(session, emit, terms)
        except (NoSpace, BudgetExceeded) as error:
            if isinstance(error, BudgetExceeded) and error.details.get("which") != FREE_BYTES:
                raise
            with self._way.claimed():
                if not await asyncio.to_thread(self._way.wait_for_room, ended_before):
                    raise
                return await self._keep_all(session, emit, terms)

    async def _keep_all(self, session: Session, emit: OnEvent, terms: _Terms) -> Receipt:
        """Cut and write a snapshot, referring to the last one's blocks as far as they can be relied on."""
        entries = session.durable.entries if session.durable else ()
        try:
            return await self._keep_indexed(session, entries, emit, terms)
        except Corruption as error:
            if not entries and not isinstance(error, BlockMissing):
                raise
            # What the snapshot would have referred to is damaged, gone or cannot be read, but all of it is in memory.
            return await self._keep_indexed(session, (), emit, terms)

    async def _keep_indexed(
        self, session: Session, durable: tuple[BlockEntry, ...], emit: OnEvent, terms: _Terms
    ) -> Receipt:
        """As `_keep`; an index that fails is made anew from the bundles, for what is awake is nowhere else."""
        try:
            return await self._keep(session, durable, emit, terms)
        except IndexFailed:
            await self.on_writer(self._store.rebuild_index)
            return await self._keep(session, durable, emit, terms)

    async def _keep(self, session: Session, durable: tuple[BlockEntry, ...], emit: OnEvent, terms: _Terms) -> Receipt:
        """Cut and write a snapshot that refers to what it can of `durable`."""
        self._require_time(terms)
        snapshot = await self._engine.call(lambda: self._cut(session, durable))
        report = _reporter("sleep", emit)

        def on_progress(done: int, total: int) -> None:
            report(done, total)
            self._require_time(terms)

        doubted = () if terms.last or self.stopping else await self.on_writer(partial(self._doubted, session, snapshot))
        receipt = await self.on_writer(
            partial(
                self._store.write_bundle,
                uri=session.uri,
                identity=session.model.identity,
                parent=session.durable.bundle_id if session.durable else None,
                reused=snapshot.reused,
                blocks=snapshot.drafts(),
                session={**session.to_map(), "backend": session.computed_by()},
                token_count=snapshot.token_count,
                on_progress=on_progress,
                beyond=None if terms.last is None else "budgets",
                doubted=doubted,
            )
        )
        unread = {entry.id for entry in snapshot.reused} - {entry.id for entry in doubted}
        session.last_read.keep(receipt.entries, unread)
        return receipt

    def _doubted(self, session: Session, snapshot: Cut) -> tuple[BlockEntry, ...]:
        scrubbed_s = read_ns(self._store.load_scrub_mark(), session.uri) / 1e9
        return session.last_read.doubted(snapshot.reused, scrubbed_s)

    def _require_time(self, terms: _Terms) -> None:
        if terms.may_wait and self.stopping is not None:
            raise ServiceClosed(
                "The daemon was told to stop, so this was given up, and nothing has changed; ask again."
            )
        for order in {terms.last, self.stopping}:
            if order is not None:
                order.require_time()

    def _cut(self, session: Session, durable: tuple[BlockEntry, ...]) -> Cut:
        """The state with its canary, on the engine thread."""
        is_lossy = session.loss is not None
        return cut(
            session.state,
            session.model.layout,
            durable=durable,
            unchanged_tokens=session.unchanged_tokens,
            canary=canary.take(session.model, session.state, is_lossy=is_lossy) if self._canary != "never" else None,
            is_lossy=is_lossy,
            lossy=session.lossy,
        )

    @property
    def recompute_policy(self) -> RecomputePolicy:
        """When wakes compute the tokens again instead of restoring them."""
        return self._recomputing.policy

    def forget(self, uri: SessionUri) -> None:
        """Know nothing of a session that is gone."""
        self._recomputing.forget(uri)

    def rates_of(self, model: LoadedModel) -> Rates:
        """What this daemon has measured of a model."""
        return self._recomputing.measured.of(model)

    async def begin(self, model: LoadedModel, random_key: Callable[[], mx.array]) -> LiveState:
        """The state of a session that has read nothing, with the key that is made of it on the engine thread."""
        return await self._engine.call(lambda: model.new_state(random_key()))

    async def wake(self, uri: SessionUri, order: WakeOrder, model: LoadedModel, emit: OnEvent) -> Woken:
        """Read a session back, onto the model of its name. All of it is verified before a session exists; nothing live
        is touched.

        Where no record is of the position that is wanted, what is missing is computed: of a state that is cut by token
        its logits, of another what lies behind the nearest record. That alone makes no version: of what a repair saved,
        it would be a newer one than the version that may come back.

        Raises:
            StoreError: it is not in the store, or not what the index says, or damaged.
            SnapshotError: it belongs to another model, or to none that this version can restore.
            GenerationFailed: the model failed on it.
        """
        with tell_wake(self._bus, uri, order.cause, order.version) as tell_end:
            try:
                with await self.on_io(lambda: self._store.open_session(uri, order.version)) as reader:
                    woken = await self._wake(reader, order, model, emit)
            except Corruption:
                if order.cause != "heal":
                    self.on_damage(uri)
                raise
            tell_end(partial(_end_of_wake, woken, order.cause))
        return woken

    async def look(self, uri: SessionUri, order: WakeOrder, model: LoadedModel) -> tuple[BundleReader, Prospect | None]:
        """What a wake would do, by the manifest and the headers of the blocks alone; None where there is nothing but a
        ledger to read. Nothing is taken, told or changed; the reader is to be closed. Of the model its weights are not
        needed.

        Raises:
            What `wake` raises before it reads a block.
        """
        reader = await self.on_io(lambda: self._store.open_session(uri, order.version))
        try:
            if is_ledger_alone(reader, order):
                require_same(reader.manifest.identity, model.identity, model=model.name)
                return reader, None
            return reader, await self._look(reader, order, model)
        except BaseException:
            reader.close()
            raise

    async def _look(self, reader: BundleReader, order: WakeOrder, model: LoadedModel) -> Prospect:
        plan = await self.on_io(
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
        # An earlier token may have no canary, nor may the end of a state behind which a ledger goes on: then the hashes
        # are all that proves it.
        trusting = self._trusting and not order.hashing and order.at_token is None and plan.has_logits
        choice = self._recomputing.choose(reader, plan, model, differs, hashed=not trusting, at_token=order.at_token)
        return Prospect(plan, trusting, differs, choice)

    async def _wake(self, reader: BundleReader, order: WakeOrder, model: LoadedModel, emit: OnEvent) -> Woken:
        begun, uri = time.monotonic(), reader.manifest.uri
        if is_ledger_alone(reader, order):
            return await self._begin_kept(reader, model)
        kept = reader.manifest.session if order.at_token is None else without_unread(reader.manifest.session)
        prospect = await self._look(reader, order, model)
        plan, brought = prospect.plan, None
        if prospect.choice.way == "recompute" and order.may_recompute:
            brought = await self._recompute(reader, plan, model)
        is_restored = brought is None
        brought = brought or await self._restore(reader, prospect, model, begun, emit)
        session = Session.woken(uri, model, brought.state, durable_of(reader, plan.read_bytes), kept)
        session.came_from(kept, brought.unchanged_tokens)
        if is_restored and brought.verified:
            session.last_read.note(plan.spans)
        session.loss = _loss_of(session, plan)
        session.unchanged_tokens = brought.unchanged_tokens
        session.recomputed = brought.recomputed or session.recomputed
        session.saved_from = salvaged_from(reader.manifest)
        session.salvaged = _salvaged_in(session, plan.target_tokens, reader)
        return Woken(session, brought.bytes_read, brought.verified, brought.verdict, brought.canary_seconds)

    async def _restore(
        self, reader: BundleReader, prospect: Prospect, model: LoadedModel, begun: float, emit: OnEvent
    ) -> _Brought:
        plan, trusting = prospect.plan, prospect.trusting
        looked = time.monotonic()
        filling = await self._engine.call(lambda: restore.allocate(plan))
        await self.on_io(partial(filling.run, reader, self._fill, _reporter("wake", emit), trusting=trusting))
        filled = time.monotonic()
        self._bus.publish(WakeVerified(reader.manifest.uri, plan.read_bytes, not trusting, filled - begun))
        assembly = _Assembly(model, filling, self._canary, foreign=decide_bits(prospect.differs))
        state = await self._engine.run(assembly.steps(initial_key(sampling_of(reader.manifest.session))))
        measured = self._recomputing.measured
        measured.add(model, "restore_trusting" if trusting else "restore_verified", plan.read_bytes, filled - looked)
        if not state.computed_tokens:
            measured.add(model, "fixed", 1, looked - begun + time.monotonic() - filled)
        # What lies behind was computed again, in other calls where one was cut: maybe not the bits of the blocks.
        unchanged = plan.resumed_tokens
        return _Brought(state, plan.read_bytes, not trusting, assembly.verdict, assembly.canary_seconds, unchanged)

    async def _recompute(self, reader: BundleReader, plan: restore.WakePlan, model: LoadedModel) -> _Brought | None:
        sampling = sampling_of(reader.manifest.session)
        begin = partial(self.begin, model, lambda: initial_key(sampling))
        again = await self._recomputing.compute(reader, plan, model, begin, self.on_io)
        if again is None:
            return None
        return _Brought(
            again.state, again.bytes_read, True, again.verdict, 0.0, again.unchanged_tokens, again.recomputed
        )

    async def _begin_kept(self, reader: BundleReader, model: LoadedModel) -> Woken:
        """A session whose ledger alone was kept, before that is read."""
        manifest = reader.manifest
        require_same(manifest.identity, model.identity, model=model.name)
        state = await self.begin(model, lambda: initial_key(sampling_of(manifest.session)))
        session = Session.woken(manifest.uri, model, state, durable_of(reader, 0), manifest.session)
        session.salvaged = _salvaged_in(session, 0, reader)
        return Woken(session, 0, verified=True, canary="not_run", canary_seconds=0.0)

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._read, work)

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._write, work)

    async def on_indexed_writer(self, work: Callable[[], Result]) -> Result:
        """As `on_writer`; an index that fails is made anew from the bundles, and the work done once more."""
        try:
            return await self.on_writer(work)
        except IndexFailed:
            await self.on_writer(self._store.rebuild_index)
            return await self.on_writer(work)

    def close(self) -> None:
        """Wait for what is being written, and end the threads."""
        self._write.shutdown()
        self._compactor.close()
        self._read.shutdown()
        self._fill.shutdown()


@dataclass(slots=True)
class _Assembly:
    """What turns filled memory into a state, on the engine thread, and proves it.

    foreign: whether what computed the state may have computed other bits than what computes here.
    """

    model: LoadedModel
    filling: restore.Filling
    policy: Policy
    foreign: bool
    verdict: Verdict = "not_run"
    canary_seconds: float = 0.0

    def steps(self, random_key: mx.array) -> Steps[LiveState]:
        """The state that was read, its canary run, brought to the position that is wanted: what lies behind the record
        is computed as it was before, and logits that no record has are found by reading the last token once more.

        random_key: that of a new session, for a state that no record has one for.
        """
        state, plan = self.filling.assemble(self.model.new_caches(), random_key), self.filling.plan
        if plan.resumed_tokens:
            self._prove(state)
            yield None
        behind = token_array(plan.tokens)[plan.resumed_tokens :]
        if behind:
            sizes = list(plan.passes.between(plan.resumed_tokens, plan.target_tokens))
            yield from replay(self.model, state, behind, sizes)
        elif not plan.has_logits:
            find_logits(self.model, state)
        return state

    def _prove(self, state: LiveState) -> None:
        expected = self.filling.expected
        if expected is None or self.policy == "never" or (self.policy == "changed" and not self.foreign):
            return
        begun = time.monotonic()
        expected = replace(expected, exact=expected.exact and not self.foreign)
        self.verdict = canary.check(self.model, state, expected)
        self.canary_seconds = time.monotonic() - begun


def _end_of_wake(woken: Woken, cause: WakeCause, seconds: float) -> WakeEnded:
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


def _loss_of(session: Session, plan: restore.WakePlan) -> Loss | None:
    """What a woken session has lost, by what its map says and by what its blocks are. What was computed again is not
    among it, and where that is all of it, nothing is lost."""
    found = worst(session.loss, plan.loss)
    return found and found.within(plan.resumed_tokens)


def _salvaged_in(session: Session, restored_tokens: int, reader: BundleReader) -> Salvaged | None:
    """What a woken session has to tell of a repair; the ledger behind what was restored goes on from it, too."""
    told, behind = salvaged_of(reader.manifest), len(session.unread.tokens) if session.unread else 0
    return told and told.within(restored_tokens + behind)


def is_ledger_alone(reader: BundleReader, order: WakeOrder) -> bool:
    """Whether a version has nothing but a ledger, all of which has to be read again."""
    manifest = reader.manifest
    return not manifest.token_count and UNREAD in manifest.session and order.at_token is None


def _checkpoints_in(entries: Iterable[BlockEntry], token_count: int) -> list[int]:
    return [entry.start for entry in entries if entry.kind == "state" and entry.start < token_count]


def durable_of(reader: BundleReader, logical_bytes: int) -> Durable:
    """The snapshot that a reader reads, as the last one of a session."""
    manifest = reader.manifest
    return Durable(
        manifest.version, reader.bundle_id, manifest.parent, manifest.token_count, logical_bytes, reader.entries,
        unread_of(manifest),
    )  # fmt: skip


def _reporter(stage: Stage, emit: OnEvent) -> Callable[[int, int], None]:
    """Progress from any thread, delivered on the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, ProgressEvent(stage, done, total))

    return report


def _ignore(_uri: SessionUri) -> None:
    """For damage that nothing sees to."""
