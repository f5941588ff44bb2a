"""The sleep of one session: its steps and their threads.

The engine thread cuts, because that is MLX; disk work and hashing run on other threads, so that other sessions go on.
Callers hold the session alone (`sessions.Turns`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

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
from ...memvid.store import Receipt, Store, VersionDraft
from ...memvid.uri import SessionUri, not_found
from ...snapshot.capture import Cut, cut
from ...snapshot.lossy import LossyTokens
from ..api.events import OnEvent
from ..disk.making_room import Room
from ..disk.store_threads import StoreThreads, reporter
from ..disk.upkeep_thread import UpkeepThread
from ..engine.engine import Engine
from ..errors import ServiceClosed
from ..events.bus import Bus
from ..events.events import LedgerKept, SleepCause
from ..models import canary
from ..sessions.sessions import Session
from ..sessions.tracing import tell_sleep
from ..tasks.door import Door, LastSleep
from .version import Base, is_said_by, ledger_of, map_behind, map_of, parent_of
from .waking import Waking


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a session is put to sleep.

    last: the daemon stops, and this has to be done in time.
    may_wait: nothing is lost without this sleep, so a stopping daemon gives it up.
    covers: as of `VersionDraft`.
    lossy: tokens that the version keeps in few bits; None to keep all exact.
    ledger_alone: the version keeps no keys and values.
    branch: what the version says of the branch that it is, and of those below it.
    """

    last: LastSleep | None = None
    may_wait: bool = False
    covers: bool = True
    lossy: LossyTokens | None = None
    ledger_alone: bool = False
    branch: Mapping[str, Any] = field(default_factory=dict)


ORDINARY: Final = Terms()


Run = Callable[[Callable[[], Receipt]], Awaitable[Receipt]]
"""Runs work off the event loop."""


class Versions:
    """Writes versions of sessions into a store: the one place of the daemon that does. waking: wakes sessions from it.

    on_version: called with the receipt of each new version. on_damage: of `Waking`.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        upkeep: UpkeepThread,
        room: Room,
        door: Door,
        bus: Bus,
        *,
        on_version: Callable[[Receipt], None],
        on_damage: Callable[[SessionUri], None],
    ) -> None:
        self.threads = StoreThreads()
        self.waking = Waking(store, engine, self.threads, bus, on_damage)
        self._door = door
        self._on_version = on_version
        self._store = store
        self._engine = engine
        self._bus = bus
        self._upkeep = upkeep
        self._room = room

    async def write(self, draft: VersionDraft, run: Run | None = None) -> Receipt:
        """Write a version. run: where, if not on the thread of writes. Raises as `Store.write_bundle`."""
        receipt = await (run or self.threads.on_writer)(partial(self._store.write_bundle, draft))
        self._on_version(receipt)
        return receipt

    async def sleep(self, session: Session, emit: OnEvent, *, cause: SleepCause, terms: Terms = ORDINARY) -> Receipt:
        """Make the session's state durable; it stays in memory, clean. On failure it is as it was. cause: for the
        events. Where the store's budget leaves no room, some is made first.

        Raises:
            SnapshotError: the state cannot be kept.
            StoreError: it could not be made durable, for example without room on the disk.
            StopDeadline: the daemon stops, and its time is over. ServiceClosed: it stops, and this may wait.
        """
        with tell_sleep(self._bus, session, cause) as tell_end:
            receipt = await self._room.after(partial(self._sleep, session, emit, terms))
            tell_end(receipt)
        return receipt

    async def _sleep(self, session: Session, emit: OnEvent, terms: Terms) -> Receipt:
        async with session.versioning:
            receipt = await self._with_remedies(session, partial(self._write_all, session, emit, terms))
            session.dirty, session.acknowledged = False, None
            session.state.checkpoints.became_durable(checkpoints_in(receipt.entries, receipt.block_tokens))
        return receipt

    async def keep_ledger(self, session: Session, why: str) -> None:
        """Make the session's whole ledger durable, with the blocks that are durable already, unless the newest version
        says the same (after a refused stop). The session still needs its sleep. why: the code of the error that keeps
        it from that.

        Raises StoreError: not even the ledger could be made durable."""
        async with session.versioning:
            if await self.threads.on_io(partial(self._has_ledger, session)):
                return
            receipt = await self._with_remedies(session, partial(self._write_ledger, session))
        self.tell_ledger(receipt, why)

    def tell_ledger(self, receipt: Receipt, why: str) -> None:
        """Tell of a version that ends in a ledger. why: the code of the error behind it."""
        version, tokens, unread = receipt.version, receipt.token_count, receipt.unread_tokens
        self._bus.publish(LedgerKept(receipt.uri, version, tokens, unread, receipt.bytes_written, why))

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

    async def _with_remedies(
        self, session: Session, write: Callable[[Sequence[BlockEntry]], Awaitable[Receipt]]
    ) -> Receipt:
        """Write a version of a session. write: does it, with these blocks of its last version where they still match.
        Each fault has one remedy and then one more try. After a remedy further down this list, those above it may be
        tried again:

        - Blocks of the last version are damaged, gone or unreadable. All of them are in memory, so the version refers
          to none.
        - The disk has no room beside the pack of a repack. The sleep waits for the repack to end.
        """
        durable = session.durable.entries if session.durable else ()
        entries, ended_before = durable, self._upkeep.repacks_ended
        is_whole = waited = False
        with self._upkeep.sleeps, contextlib.ExitStack() as claims:
            while True:
                try:
                    return await write(entries)
                except Corruption as error:
                    if not entries and (is_whole or not isinstance(error, BlockMissing)):
                        raise
                    entries, is_whole = (), True
                except (NoSpace, BudgetExceeded) as error:
                    if waited or (isinstance(error, BudgetExceeded) and error.details.get("which") != FREE_BYTES):
                        raise
                    waited = True
                    claims.enter_context(self._upkeep.claims)
                    if not await self._upkeep.wait_for_room(ended_before):
                        raise
                    entries, is_whole = durable, False

    async def _write_all(self, session: Session, emit: OnEvent, terms: Terms, durable: Sequence[BlockEntry]) -> Receipt:
        """Write a version with all tokens in blocks, and refer to those of `durable` where possible; or with none."""
        self._require_time(terms)
        if terms.ledger_alone:
            return await self._write_ledger(session, ())
        snapshot = await self._engine.call(lambda: self._cut(session, durable, terms.lossy))
        report = reporter("sleep", emit)

        def on_progress(done: int, total: int) -> None:
            report(done, total)
            self._require_time(terms)

        doubted = (
            ()
            if terms.last or self._door.stopping
            else await self.threads.on_writer(partial(self._doubted, session, snapshot))
        )
        receipt = await self.write(
            VersionDraft(
                uri=session.uri,
                identity=session.model.identity,
                parent=parent_of(session),
                reused=snapshot.reused,
                blocks=snapshot.drafts(),
                session={**map_of(session), **terms.branch},
                block_tokens=snapshot.token_count,
                on_progress=on_progress,
                doubted=doubted,
                covers=terms.covers,
            )
        )
        session.last_read.note(doubted)
        session.became(receipt, snapshot.reused, session.computed_by())
        return receipt

    async def _write_ledger(self, session: Session, durable: Sequence[BlockEntry]) -> Receipt:
        """Write a version with the blocks of `durable` that still match the caches, and the rest of the ledger."""
        base = Base.of(session, durable)
        receipt = await self.write(ledger_of(session, base))
        session.became(receipt, base.blocks, base.backend)
        return receipt

    def _has_ledger(self, session: Session) -> bool:
        """Whether the newest version is the last one of the session, and has its whole ledger already."""
        durable, newest = session.durable, self._store.find_session(session.uri)
        if durable is None or newest is None or newest.bundle_id != durable.bundle_id:
            return False
        base = Base.of(session)
        try:
            with self._store.open_session(session.uri, durable.version) as reader:
                has_all_blocks = len(base.blocks) == len(reader.entries)
                return has_all_blocks and is_said_by(reader.manifest, map_behind(session, base))
        except StoreError:
            return False

    def _doubted(self, session: Session, snapshot: Cut) -> tuple[BlockEntry, ...]:
        scrubbed_s = read_ns(self._store.load_scrub_mark(), session.uri) / 1e9
        return session.last_read.doubted(snapshot.reused, scrubbed_s)

    def _require_time(self, terms: Terms) -> None:
        if terms.may_wait and self._door.stopping is not None:
            raise ServiceClosed(
                "The daemon was told to stop, so this was given up, and nothing has changed; ask again."
            )
        for order in {terms.last, self._door.stopping}:
            if order is not None:
                order.require_time()

    def _cut(self, session: Session, durable: Sequence[BlockEntry], lossy: LossyTokens | None) -> Cut:
        """The state with its canary, on the engine thread."""
        is_lossy = session.loss is not None
        return cut(
            session.state,
            session.model.layout,
            durable=durable,
            unchanged_tokens=session.unchanged_tokens,
            canary=canary.take(session.model, session.state, is_lossy=is_lossy),
            is_lossy=is_lossy,
            lossy=lossy,
        )


def checkpoints_in(entries: Iterable[BlockEntry], token_count: int) -> list[int]:
    """The positions of the state records before a token."""
    return [entry.start for entry in entries if entry.kind == "state" and entry.start < token_count]
