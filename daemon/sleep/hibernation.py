"""The sleep of one session: its steps and their threads.

The engine thread cuts, because that is MLX; disk work and hashing run on other threads, so that other sessions go on.
Callers hold the session alone (`sessions.Turns`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ...memvid.disk.budget import FREE_BYTES
from ...memvid.errors import (
    BlockMissing,
    BudgetExceeded,
    BundleMissing,
    Corruption,
    NoSpace,
    SessionNotFound,
    StoreError,
)
from ...memvid.folder.scrub_mark import read_ns
from ...memvid.format.blocks import BlockEntry
from ...memvid.maintenance.repack_plan import RepackPolicy
from ...memvid.store import Receipt, Store, VersionDraft
from ...memvid.uri import SessionUri, not_found
from ...snapshot.capture import Cut, cut
from ..api.events import OnEvent, ignore
from ..engine.engine import Engine
from ..errors import ServiceClosed
from ..events.bus import Bus
from ..events.events import SleepCause
from ..models import canary
from ..sessions.sessions import Durable, Session
from ..sessions.tracing import tell_sleep
from .disk_space import Way
from .orders import LastSleep
from .repacker import Repacker
from .store_threads import StoreThreads, reporter
from .waking import Waking


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of a sleep; see `Hibernation.sleep`."""

    last: LastSleep | None
    may_wait: bool
    covers: bool


class Hibernation:
    """Puts sessions to sleep in a store. waking: wakes them from it.

    stopping: the limits of all sleeps once the daemon stops, even of those that had begun. on_version: called with a
    session that has a new version.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        way: Way,
        bus: Bus,
    ) -> None:
        self.threads = StoreThreads(store)
        self.waking = Waking(store, engine, self.threads, bus)
        self.stopping: LastSleep | None = None
        self.on_version: Callable[[SessionUri], None] = ignore
        self._store = store
        self._engine = engine
        self._bus = bus
        self._way = way
        self._repacker = Repacker(store, RepackPolicy(), way)

    async def sleep(
        self,
        session: Session,
        emit: OnEvent,
        *,
        cause: SleepCause,
        last: LastSleep | None = None,
        may_wait: bool = False,
        covers: bool = True,
    ) -> Receipt:
        """Make the session's state durable; it stays in memory, clean. On failure it is as it was.

        cause: for the events. last: the daemon stops, so a refused sleep is lost. Then the store's size and the day's
        writes may exceed their budgets; only `keep_free` still holds. may_wait: nothing is lost without this sleep, so
        a stopping daemon gives it up. covers: as of `VersionDraft`.

        Raises:
            SnapshotError: the state cannot be kept.
            StoreError: it could not be made durable, for example without room on the disk.
            StopDeadline: the daemon stops, and its time is over. ServiceClosed: it stops, and this may wait.
        """
        async with session.versioning:
            with tell_sleep(self._bus, session, cause) as tell_end, self._repacker.giving_way():
                receipt = await self._keep_with_remedies(session, emit, _Terms(last, may_wait, covers))
                tell_end(receipt)
                self._repacker.consider(receipt)
            session.durable = Durable.of(receipt, session.computed_by())
            session.unchanged_tokens = receipt.token_count
            session.dirty = session.rewound = False
            session.acknowledged = None
            session.state.checkpoints.became_durable(checkpoints_in(receipt.entries, receipt.token_count))
            session.lossy = None
        self.on_version(session.uri)
        return receipt

    def look_after(self, receipt: Receipt) -> None:
        """Note a version that was made without a sleep: its session may need a repack, and lose others."""
        with self._repacker.giving_way():
            self._repacker.consider(receipt)
        self.on_version(receipt.uri)

    async def is_kept(self, session: Session) -> bool:
        """Whether the session's last snapshot is still there, with blocks of the right ids. An unchanged session relies
        on it when its memory is freed. The bytes are not read again."""
        try:
            await self.require_kept(session)
        except StoreError:
            return False
        return True

    async def require_kept(self, session: Session) -> None:
        """Raise StoreError unless the last snapshot is there and reliable (`is_kept`)."""
        durable = session.durable

        def look() -> None:
            with self._store.open_session(session.uri, durable.version if durable else None) as reader:
                if durable is None or reader.bundle_id != durable.bundle_id:
                    raise not_found(session.uri, ())
                for entry in reader.entries:
                    reader.read_header(entry)
                if not reader.is_whole():
                    whole = reader.whole_up_to()
                    raise BlockMissing(
                        f"{session.uri} is whole up to token {whole} on the disk.", session=str(session.uri)
                    )

        await self.threads.on_io(look)

    async def is_gone(self, session: Session) -> bool:
        """Whether the session's last snapshot is gone, not only damaged or out of reach."""
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

        return await self.threads.on_io(look)

    async def _keep_with_remedies(self, session: Session, emit: OnEvent, terms: _Terms) -> Receipt:
        """Cut and write a snapshot. Each fault has one remedy and then one more try. After a remedy further down this
        list, those above it may be tried again:

        - Blocks of the last snapshot are damaged, gone or unreadable. All of them are in memory, so all are written
          anew.
        - The disk has no room beside the pack of a repack. The sleep waits for the repack to end.
        """
        durable = session.durable.entries if session.durable else ()
        entries, ended_before = durable, self._way.ended()
        is_whole = waited = False
        with contextlib.ExitStack() as claims:
            while True:
                try:
                    return await self._keep(session, entries, emit, terms)
                except Corruption as error:
                    if not entries and (is_whole or not isinstance(error, BlockMissing)):
                        raise
                    entries, is_whole = (), True
                except (NoSpace, BudgetExceeded) as error:
                    if waited or (isinstance(error, BudgetExceeded) and error.details.get("which") != FREE_BYTES):
                        raise
                    waited = True
                    claims.enter_context(self._way.claimed())
                    if not await asyncio.to_thread(self._way.wait_for_room, ended_before):
                        raise
                    entries, is_whole = durable, False

    async def _keep(self, session: Session, durable: tuple[BlockEntry, ...], emit: OnEvent, terms: _Terms) -> Receipt:
        """Cut and write a snapshot that refers to blocks of `durable` where possible."""
        self._require_time(terms)
        snapshot = await self._engine.call(lambda: self._cut(session, durable))
        report = reporter("sleep", emit)

        def on_progress(done: int, total: int) -> None:
            report(done, total)
            self._require_time(terms)

        doubted = (
            ()
            if terms.last or self.stopping
            else await self.threads.on_writer(partial(self._doubted, session, snapshot))
        )
        receipt = await self.threads.on_writer(
            partial(
                self._store.write_bundle,
                VersionDraft(
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
                    covers=terms.covers,
                ),
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
            canary=canary.take(session.model, session.state, is_lossy=is_lossy),
            is_lossy=is_lossy,
            lossy=session.lossy,
        )

    def close(self) -> None:
        """Wait for running writes, and end the threads."""
        self.threads.end_writing()
        self._repacker.close()
        self.threads.close()


def checkpoints_in(entries: Iterable[BlockEntry], token_count: int) -> list[int]:
    """The positions of the state records before a token."""
    return [entry.start for entry in entries if entry.kind == "state" and entry.start < token_count]
