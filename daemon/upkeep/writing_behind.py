"""Write behind: full blocks of awake sessions are written while these are used. So a crash leaves little to compute
again, and a sleep little to write.

Each time a version is made that has all tokens of the last acknowledged turn: the first ones in blocks, the others as
the end of its ledger, as the journal has them. It is a stand-in, and goes once a later version covers it
(`retaining.py`).

Rules:
- A session is due once it has so many full blocks behind its newest version (`BLOCKS_DUE`). Nothing else counts: not
  whether it rests, nor whether a request has it.
- A version ends at the first end of a model call at or behind the last full block: so the tokens behind it can be
  computed again in the same calls. Where a cache has no blocks (a window, a recurrence), the last checkpoint ends it.
- No request waits for the blocks. They are copied on the engine between the steps of others, one at a time, and written
  and flushed while the session goes on: their tokens stay as they are, for what takes them back makes a version first.
  Only a turn that ends while the version is published waits for that: for a small flush, a rename and a row.
- What the version says is the turn that is acknowledged last when its blocks are on the disk.
- It writes at most a tenth of the time. Without room it tries again later, and refuses no request.
- Only sessions whose turns stand in the journal are written: the others are to be lost with their memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final

from ...memvid.format.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockDraft, BlockEntry
from ...memvid.format.manifest import UNREAD, tail_in
from ...memvid.limits import MIB
from ...memvid.store import Receipt, Store, VersionDraft
from ...memvid.uri import SessionUri
from ...snapshot.capture import cut, span_sources
from ..disk.making_room import Room
from ..engine.engine import Engine, Steps
from ..events.bus import Bus
from ..events.events import BlocksWritten
from ..residency.awake import AwakeSessions
from ..sessions.sessions import Session
from ..tasks.door import Door
from ..versions.journal import TurnJournal
from ..versions.version import with_more_blocks
from ..versions.writing import Versions, checkpoints_in
from .loop import SessionJob, Upkeep

BLOCKS_DUE: Final = 2
"""So many full blocks behind its newest version make a session due. With one, a session would have a version for every
256 tokens; with two a crash costs less than 512, and what comes while they are written."""

_MOST_BYTES: Final = 64 * MIB
"""Of the blocks of one version, which are copied; a larger block is written alone."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A version that is being written. durable: the session's newest version before it. ended: set once it has left
    nothing half done on the disk."""

    live: Session
    durable: Receipt | None
    permit: _Permit = field(default_factory=lambda: _Permit())
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The first `end` tokens of a session: blocks that it has on the disk, and new ones in memory of their own.
    seconds: that it took to copy them."""

    end: int
    reused: Sequence[BlockEntry]
    drafts: Sequence[BlockDraft]
    seconds: float


class WritingBehind(SessionJob):
    """Writes blocks of one session after the other."""

    name: ClassVar = "write behind"

    def __init__(
        self,
        upkeep: Upkeep,
        store: Store,
        engine: Engine,
        versions: Versions,
        room: Room,
        awake: AwakeSessions,
        journal: TurnJournal,
        door: Door,
        bus: Bus,
    ) -> None:
        self._store = store
        self._engine = engine
        self._versions = versions
        self._room = room
        self._awake = awake
        self._journal = journal
        self._door = door
        self._bus = bus
        self._writing: _Write | None = None
        super().__init__(upkeep)

    async def let_go(self, uri: SessionUri) -> None:
        """Before a session is deleted: from now on, until its next turn, no version of it comes."""
        self._noted.pop(uri, None)
        if (live := self._awake.get(uri)) is not None:
            live.acknowledged = None
        if self._writing is not None and self._writing.live.uri == uri and not self._writing.permit.withdraw():
            await self.settled()  # it is being published

    async def settled(self) -> None:
        """Wait until a write that was given up has left nothing on the disk."""
        if self._writing is not None:
            await self._writing.ended.wait()

    async def look_at(self, uri: SessionUri) -> float | None:
        live = self._awake.get(uri)
        if live is None or not self._is_due(live):
            return None
        return await self._room.after(partial(self._look_at, live))

    async def _look_at(self, live: Session) -> float | None:
        async with self._thread.piece():
            if not self._is_due(live):  # any more
                return None
            begun = time.monotonic()
            try:
                return await self._write(live)
            except _GivenUp:
                return time.monotonic() - begun

    def _is_due(self, live: Session) -> bool:
        if live.acknowledged is None or not self._door.is_working:
            return False
        full = _full(_tokens_of(live.acknowledged) - 1) - _full(_written(live))
        return full >= BLOCKS_DUE * BLOCK_TOKENS and self._journal.keeps(live)

    async def _write(self, live: Session) -> float:
        """Write a version, unless there is nothing to write yet. Gives the seconds that it took, without waiting."""
        begun, loop = time.monotonic(), asyncio.get_running_loop()
        writing = self._writing = _Write(live, live.durable)
        try:
            copy = await self._engine.run(_copying(self._engine, writing))
            if copy is None:
                return 0.0
            begun = time.monotonic()
            async with AsyncExitStack() as stack:
                said = partial(self._said, writing, copy.end, stack)
                draft = VersionDraft(
                    uri=live.uri,
                    identity=live.model.identity,
                    parent=writing.durable.bundle_id if writing.durable else None,
                    reused=copy.reused,
                    blocks=copy.drafts,
                    session=lambda: asyncio.run_coroutine_threadsafe(said(), loop).result(),
                    block_tokens=copy.end,
                    on_progress=lambda *_: writing.permit.require(),
                    before_publishing=writing.permit.use,
                )
                receipt = await self._versions.write(draft, self._thread.run)
                seconds = copy.seconds + time.monotonic() - begun
                if self._goes_on(writing):
                    await self._adopt(live, receipt, copy)
        finally:
            self._writing = None
            writing.ended.set()
        self._bus.publish(
            BlocksWritten(
                live.uri,
                receipt.version,
                receipt.token_count,
                receipt.unread_tokens,
                receipt.bytes_written,
                seconds,
            )
        )
        self.note(live.uri)  # there may be more than a version takes
        return seconds

    def _goes_on(self, writing: _Write) -> bool:
        """Whether the session stands where it stood when its blocks were copied, or behind that."""
        live = writing.live
        is_same = self._awake.get(live.uri) is live and live.durable is writing.durable
        return is_same and live.acknowledged is not None

    async def _said(self, writing: _Write, end: int, stack: AsyncExitStack) -> Mapping[str, Any]:
        """The session map of the version, once its blocks are on the disk. No turn is acknowledged from then on and no
        sleep makes a version, until the stack ends. Raises _GivenUp: the session has slept meanwhile, or left memory;
        or what is acknowledged stands behind more blocks, which a heal has taken since."""
        await stack.enter_async_context(self._journal.between_turns(writing.live.uri))
        await stack.enter_async_context(writing.live.versioning)
        said = writing.live.acknowledged
        if said is None or not self._goes_on(writing) or said[UNREAD]["start"] > end:
            raise _GivenUp
        return await asyncio.to_thread(with_more_blocks, said, writing.live, end)

    async def _adopt(self, live: Session, receipt: Receipt, copy: _Copy) -> None:
        """The session stands behind the new version. It is still dirty: the tokens behind the blocks have no state
        there."""
        live.became(receipt, copy.reused, live.computed_by())
        positions, end = checkpoints_in(receipt.entries, copy.end + 1), copy.end
        await self._engine.call(lambda: live.state.checkpoints.became_durable(positions, up_to=end))


def _copying(engine: Engine, writing: _Write) -> Steps[_Copy | None]:
    """Copy what the next version has in new blocks, one at a time; None if that is nothing. In between the session may
    read and write on: the rows of its tokens stay."""
    live, durable = writing.live, writing.durable
    state, unchanged = live.state, live.unchanged_tokens
    begun, seconds = time.monotonic(), 0.0
    if state.is_lost or not state.tokens or not (end := end_of_blocks(live)):
        return None
    engine.release(state)
    held = replace(
        cut(
            state,
            live.model.layout,
            durable=durable.entries if durable else (),
            unchanged_tokens=unchanged,
            is_lossy=live.loss is not None,
            end=end,
        ),
        spans=(),  # who holds them has the next model call copy all of them
    )
    drafts: list[BlockDraft] = []
    for start in range(held.reused_tokens, end, BLOCK_TOKENS):
        if drafts:
            seconds += time.monotonic() - begun
            yield None
            begun = time.monotonic()
            engine.release(state)
        drafts += replace(held, spans=span_sources(state, live.model.layout)).copied(start)
    return _Copy(end, held.reused, drafts, seconds + time.monotonic() - begun)


def end_of_blocks(live: Session) -> int:
    """How many tokens of a session the next version behind has in blocks; 0 if no more than its last version."""
    if live.acknowledged is None:
        return 0
    state, count, held = live.state, _tokens_of(live.acknowledged), _written(live)
    if not live.model.layout.by_token:
        later = [each.position for each in state.checkpoints if held < each.position < count]
        return max((each for each in later if each <= held + _most_tokens(live)), default=min(later, default=0))
    full, written = _full(count - 1), _full(held)
    if full <= written:
        return 0
    end = state.passes.end_behind(min(full, written + _most_tokens(live)))
    return end if end < count else 0


def _tokens_of(acknowledged: Mapping[str, Any]) -> int:
    """All tokens of an acknowledged turn."""
    start: int = acknowledged[UNREAD]["start"]
    return start + len(tail_in(acknowledged)) // TOKEN_BYTES


def _written(live: Session) -> int:
    return min(live.durable.block_tokens, live.unchanged_tokens) if live.durable else 0


def _full(token_count: int) -> int:
    return token_count - token_count % BLOCK_TOKENS


def _most_tokens(live: Session) -> int:
    block_bytes = sum(slot.size_bytes for slot in live.model.layout.span_slots(BLOCK_TOKENS))
    return BLOCK_TOKENS * max(1, _MOST_BYTES // max(1, block_bytes))


class _GivenUp(Exception):  # never leaves this module
    pass


class _Permit:
    """Lets a write be published or given up, and never both. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_used = self._is_withdrawn = False

    def require(self) -> None:
        if self._is_withdrawn:
            raise _GivenUp

    def use(self) -> None:
        with self._lock:
            self.require()
            self._is_used = True

    def withdraw(self) -> bool:
        """Give it up; False if it is being published already."""
        with self._lock:
            self._is_withdrawn = not self._is_used
            return self._is_withdrawn
