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

from ..memvid.blocks import BlockEntry
from ..memvid.budget import FREE_BYTES
from ..memvid.bundle import BundleReader
from ..memvid.compaction_plan import CompactionPolicy
from ..memvid.errors import BlockMissing, BudgetExceeded, Corruption, IndexFailed, NoSpace, StoreError
from ..memvid.salvaged import salvaged_from, salvaged_of
from ..memvid.sizes import format_plural
from ..memvid.store import Receipt, Store
from ..memvid.uri import SessionUri
from ..snapshot import restore
from ..snapshot.canary import Policy, Verdict
from ..snapshot.capture import Cut, cut
from ..snapshot.identity import circumstances_in, decide_bits, require_circumstances, require_same
from ..snapshot.lossy import Loss, worst
from ..snapshot.state import LiveState, token_array
from . import canary
from .bus import Bus
from .compactor import Compactor
from .engine import Engine, Steps
from .errors import SessionAwake, StopDeadline
from .events import SleepCause, WakeCause, WakeEnded, WakeVerified
from .generation import find_logits, replay
from .models import LoadedModel
from .results import Emit, Progress, Stage
from .sampler import initial_key
from .sessions import Durable, Session, sampling_of
from .telling import tell_sleep, tell_wake
from .unread import UNREAD
from .way import Way

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


@dataclass(frozen=True, slots=True)
class LastSleep:
    """A sleep of a daemon that stops. until: by the monotonic clock, when it must be written; None: it takes what it
    takes."""

    until: float | None = None

    def require_time(self) -> None:
        """Raises StopDeadline once the time is over."""
        if self.until is not None and time.monotonic() >= self.until:
            raise StopDeadline(
                "The daemon stops, and the time that it has for that is over; what the session has read is kept, and "
                "computed again when it is used next. Give it more time with torpor serve --stop-within."
            )

    def watching(self, report: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """What is told of progress, and ends the writing when there is no more time for it."""

        def told(done: int, total: int) -> None:
            report(done, total)
            self.require_time()

        return told


@dataclass(frozen=True, slots=True)
class Woken:
    """A session that was read back, how many bytes of state that took, whether all of them were hashed, and what the
    canary said."""

    session: Session
    bytes_read: int
    verified: bool
    canary: Verdict
    canary_seconds: float


class Hibernation:
    """Puts sessions to sleep in a store and wakes them from it.

    on_damage: told of a session of which a wake has found that its bytes are not those that were written.
    """

    def __init__(
        self, store: Store, engine: Engine, way: Way, bus: Bus, *, canary: Policy = "always", trusting: bool = False
    ) -> None:
        self._bus = bus
        self.on_damage: Callable[[SessionUri], None] = _ignore
        self._canary = canary
        self._trusting = trusting
        self._store = store
        self._way = way
        self._engine = engine
        self._read = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="torpor-read")
        self._write = ThreadPoolExecutor(1, thread_name_prefix="torpor-write")
        self._fill = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="torpor-fill")
        self._compactor = Compactor(store, CompactionPolicy(), way)

    async def sleep(self, session: Session, emit: Emit, *, cause: SleepCause, last: LastSleep | None = None) -> Receipt:
        """Make the session's state durable; it stays in memory, clean. On failure it is as it was.

        cause: what for, as it is told. last: the daemon stops, so what is refused now is lost. Then the store may
        become larger than its budget, and more may be written than in a day; only what the disk must keep free is kept.

        Raises:
            SnapshotError: the state cannot be kept.
            StoreError: it could not be made durable, for example for want of room.
            StopDeadline: it was the last, and there was no time for it.
        """
        with tell_sleep(self._bus, session, cause) as tell_end, self._compactor.giving_way():
            receipt = await self._keep_with_room(session, emit, last)
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
        durable = session.durable
        if durable is None:
            return False

        def look() -> bool:
            try:
                with self._store.open_session(session.uri, durable.version) as reader:
                    for entry in reader.entries:
                        reader.read_header(entry)
                    return bool(reader.bundle_id == durable.bundle_id)
            except StoreError:
                return False

        return await self.on_io(look)

    async def is_superseded(self, session: Session) -> bool:
        """Whether nothing has happened in the session since its wake, and a repair has brought back the version that
        it was saved from."""
        if session.saved_from is None:
            return False

        def look() -> bool:
            try:
                newest = self._store.find_session(session.uri)
                return newest is not None and session.gave_way_to(newest.bundle_id)
            except StoreError:
                return False

        return await self.on_io(look)

    async def _keep_with_room(self, session: Session, emit: Emit, last: LastSleep | None) -> Receipt:
        """Cut and write a snapshot; once more where the disk had no room for it beside a file that a compaction was
        writing: that one comes to its end first."""
        ended_before = self._way.ended()
        try:
            return await self._keep_all(session, emit, last)
        except (NoSpace, BudgetExceeded) as error:
            if isinstance(error, BudgetExceeded) and error.details.get("which") != FREE_BYTES:
                raise
            with self._way.claimed():
                if not await asyncio.to_thread(self._way.wait_for_room, ended_before):
                    raise
                return await self._keep_all(session, emit, last)

    async def _keep_all(self, session: Session, emit: Emit, last: LastSleep | None) -> Receipt:
        """Cut and write a snapshot, referring to the last one's blocks as far as they can be relied on."""
        entries = session.durable.entries if session.durable else ()
        try:
            return await self._keep_indexed(session, entries, emit, last)
        except Corruption as error:
            if not entries and not isinstance(error, BlockMissing):
                raise
            # What the snapshot would have referred to is damaged or gone, but all of it is in memory here.
            return await self._keep_indexed(session, (), emit, last)

    async def _keep_indexed(
        self, session: Session, durable: tuple[BlockEntry, ...], emit: Emit, last: LastSleep | None
    ) -> Receipt:
        """As `_keep`; an index that fails is made anew from the bundles, for what is awake is nowhere else."""
        try:
            return await self._keep(session, durable, emit, last)
        except IndexFailed:
            await self.on_writer(self._store.rebuild_index)
            return await self._keep(session, durable, emit, last)

    async def _keep(
        self, session: Session, durable: tuple[BlockEntry, ...], emit: Emit, last: LastSleep | None
    ) -> Receipt:
        """Cut and write a snapshot that refers to what it can of `durable`."""
        if last is not None:
            last.require_time()
        snapshot = await self._engine.call(lambda: self._cut(session, durable))
        on_progress = _reporter("sleep", emit)
        if last is not None:
            on_progress = last.watching(on_progress)
        return await self.on_writer(
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
                beyond_budget=last is not None,
            )
        )

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

    async def begin(self, model: LoadedModel, random_key: Callable[[], mx.array]) -> LiveState:
        """The state of a session that has read nothing, with the key that is made of it on the engine thread."""
        return await self._engine.call(lambda: model.new_state(random_key()))

    async def wake(self, uri: SessionUri, order: WakeOrder, model: LoadedModel, emit: Emit) -> Woken:
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

    async def _wake(self, reader: BundleReader, order: WakeOrder, model: LoadedModel, emit: Emit) -> Woken:
        begun, uri = time.monotonic(), reader.manifest.uri
        kept = reader.manifest.session
        if not reader.manifest.token_count and UNREAD in kept and order.at_token is None:
            return await self._begin_kept(reader, model)
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
        differs = require_circumstances(kept.get("backend"), model.backend, model=model.name, strict=order.strict)
        filling = await self._engine.call(lambda: restore.allocate(plan))
        on_progress = _reporter("wake", emit)
        # An earlier token may have no canary, and then the hashes are all that proves it.
        trusting = self._trusting and not order.hashing and order.at_token is None
        await self.on_io(partial(filling.run, reader, self._fill, on_progress, trusting=trusting))
        self._bus.publish(WakeVerified(uri, plan.read_bytes, not trusting, time.monotonic() - begun))
        assembly = _Assembly(model, filling, self._canary, foreign=decide_bits(differs))
        state = await self._engine.run(assembly.steps(initial_key(sampling_of(kept))))
        session = Session.woken(uri, model, state, durable_of(reader, plan.read_bytes), kept)
        session.differs, session.slept_by = differs, circumstances_in(kept.get("backend"))
        session.loss = _loss_of(session, plan)
        # What lies behind was computed again, in other calls where one was cut: maybe not the bits of the blocks.
        session.unchanged_tokens = plan.resumed_tokens
        session.saved_from = salvaged_from(reader.manifest)
        told = salvaged_of(reader.manifest)
        session.salvaged = told and told.within(plan.target_tokens)
        return Woken(session, plan.read_bytes, not trusting, assembly.verdict, assembly.canary_seconds)

    async def _begin_kept(self, reader: BundleReader, model: LoadedModel) -> Woken:
        """A session of which nothing but its ledger was kept, before that is read."""
        manifest = reader.manifest
        require_same(manifest.identity, model.identity, model=model.name)
        state = await self.begin(model, lambda: initial_key(sampling_of(manifest.session)))
        session = Session.woken(manifest.uri, model, state, durable_of(reader, 0), manifest.session)
        return Woken(session, 0, verified=True, canary="not_run", canary_seconds=0.0)

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work that only reads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._read, work)

    async def on_writer(self, work: Callable[[], Result]) -> Result:
        """Run store work that writes, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._write, work)

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


def _checkpoints_in(entries: Iterable[BlockEntry], token_count: int) -> list[int]:
    return [entry.start for entry in entries if entry.kind == "state" and entry.start < token_count]


def durable_of(reader: BundleReader, logical_bytes: int) -> Durable:
    """The snapshot that a reader reads, as the last one of a session."""
    manifest = reader.manifest
    return Durable(
        manifest.version, reader.bundle_id, manifest.parent, manifest.token_count, logical_bytes, reader.entries
    )


def _reporter(stage: Stage, emit: Emit) -> Callable[[int, int], None]:
    """Progress from any thread, delivered on the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, Progress(stage, done, total))

    return report


def _ignore(_uri: SessionUri) -> None:
    """For damage that nobody sees to."""


def require_as_ordered(live: Session, order: WakeOrder) -> None:
    """Refuse to wake a session at another version or position than the one at which it is awake; and at a position that
    there would not be if it slept.

    Raises:
        SessionAwake, NoSuchPosition.
    """
    version, held = live.durable.version if live.durable else None, len(live.state.tokens)
    slept = live.durable.token_count if live.durable and not (live.needs_sleep and order.version is None) else held
    if order.at_token is not None and order.at_token > slept and order.version in (None, version):
        raise restore.no_such_position(slept, order.at_token)
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
