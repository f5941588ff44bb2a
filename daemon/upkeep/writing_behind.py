"""Write behind: full blocks of awake sessions are written while nothing uses these sessions. So a crash leaves less to
compute again, and a sleep less to write.

Each time a version is made that has all tokens of the session: the first ones in blocks, the others as the end of its
ledger, as the journal has them. It is a stand-in, and goes once a later version covers it (`retaining.py`).

Rules:
- A version ends at the first end of a model call at or behind the last full block: so the tokens behind it can be
  computed again in the same calls. Where a cache has no blocks (a window, a recurrence), the last checkpoint ends it.
- A request that wants the session waits for no disk. The blocks are copied first, which is short. Then the write is
  given up, unless the version is just being published; what is given up is never published.
- It writes at most a tenth of the time, and beside requests a two-hundredth: so fewer than one in a hundred gaps of a
  stream can be longer for it. Without room it tries again later, and refuses no request.
- Only sessions whose turns stand in the journal are written: the others are to be lost with their memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ...errors import TorporError
from ...memvid.errors import BudgetExceeded, NoSpace
from ...memvid.format.blocks import BLOCK_TOKENS, BlockDraft
from ...memvid.limits import MIB
from ...memvid.store import Receipt, Store
from ...memvid.uri import SessionUri
from ...snapshot.capture import Cut, cut
from ..engine.admission import giving_way
from ..engine.engine import Engine
from ..events.bus import Bus
from ..events.events import BlocksWritten
from ..residency.residency import Residency
from ..sessions.idling import Idling
from ..sessions.sessions import Durable, Session
from ..sleep.hibernation import Hibernation, checkpoints_in
from ..sleep.ledgers import Behind

_LOG = logging.getLogger(__name__)

QUIET_S: Final = 5.0
"""For so long no request has used a session before its blocks are written: one that is asked turn by turn is not
written between two of them."""

_REST: Final = 9
_REST_BESIDE_REQUESTS: Final = 199
"""The rest behind a write, by its own time."""

_AGAIN_S: Final = 60.0
"""So long after a write that failed, that session is not written, and none at all if there was no room."""

_MOST_BYTES: Final = 64 * MIB
"""Of the blocks of one version, which are copied; a larger block is written alone."""


class WritingBehind(Idling):
    """Writes blocks of one session after the other."""

    def __init__(self, store: Store, engine: Engine, hibernation: Hibernation, residency: Residency, bus: Bus) -> None:
        self._store = store
        self._engine = engine
        self._hibernation = hibernation
        self._residency = residency
        self._bus = bus
        self._not_before: dict[SessionUri | None, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-behind")
        super().__init__(residency.awake, QUIET_S, self._look_at)

    async def close(self) -> None:
        """Wait for a running write, and end."""
        await super().close()
        await asyncio.to_thread(self._thread.shutdown)

    async def settled(self) -> None:
        """Wait until a write that was given up has left nothing on the disk."""
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)

    async def _look_at(self, uri: SessionUri) -> None:
        if self._is_put_off(uri) or self._end_of(uri) is None:
            return
        begun = time.monotonic()
        await self.settled()  # else the session would wait, held alone, for a write that was given up
        try:
            with giving_way() as wanted:
                async with self._residency.turns.take(uri):
                    if (found := self._end_of(uri, alone=True)) is not None and not wanted.is_set():
                        await self._write(*found, wanted)
        except TorporError as error:
            without_room = isinstance(error, (NoSpace, BudgetExceeded))
            self._not_before[None if without_room else uri] = time.monotonic() + _AGAIN_S
            _LOG.warning(
                "blocks of %s were not written behind; tried again in %d s: %s: %s",
                uri,
                _AGAIN_S,
                error.code,
                error.message,
            )
        finally:
            self._residency.memory.look_again()
        rest = _REST if self._bus.quiet_s() else _REST_BESIDE_REQUESTS
        await self._rest(rest * (time.monotonic() - begun))

    def _is_put_off(self, uri: SessionUri) -> bool:
        now = time.monotonic()
        self._not_before = {each: until for each, until in self._not_before.items() if until > now}
        return uri in self._not_before or None in self._not_before

    def _end_of(self, uri: SessionUri, *, alone: bool = False) -> tuple[Session, int] | None:
        """The session and the tokens of its next version; None if there is nothing to write, or not now. alone: whether
        it is held alone."""
        live = self._residency.awake.get(uri)
        if live is None or not self._residency.is_working() or (self._residency.turns.users(uri) and not alone):
            return None
        is_wanted = self._residency.journal.keeps(live) and live.dirty and live.lossy is None and live.unread is None
        return (live, end) if is_wanted and (end := end_of_blocks(live)) else None

    async def _write(self, live: Session, end: int, wanted: asyncio.Event) -> None:
        """Write a version of so many tokens and the ledger behind them, unless the session is wanted first."""
        begun, loop, backend = time.monotonic(), asyncio.get_running_loop(), live.computed_by()
        snapshot = await self._engine.call(partial(_cut, live, end))
        reused = snapshot.reused
        drafts, kept = await loop.run_in_executor(self._thread, partial(_copied, live, snapshot, Behind(end, backend)))
        del snapshot  # it holds the memory of the caches, which the next model call would have to copy
        if wanted.is_set():
            return
        permit = _Permit()
        write = partial(
            self._store.write_bundle,
            uri=live.uri,
            identity=live.model.identity,
            parent=live.durable.bundle_id if live.durable else None,
            reused=reused,
            blocks=drafts,
            session=kept,
            token_count=end,
            on_progress=lambda *_: permit.require(),
            before_publishing=permit.use,
        )
        writing = loop.run_in_executor(self._thread, write)
        await _first_of(writing, wanted)
        if not writing.done() and permit.withdraw():
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
            return
        receipt = await writing
        self._adopt(live, receipt, backend)
        live.last_read.keep(receipt.entries, {entry.id for entry in reused})
        seconds = time.monotonic() - begun
        self._bus.publish(
            BlocksWritten(
                live.uri,
                receipt.version,
                receipt.ledger_tokens,
                receipt.unread_tokens,
                receipt.bytes_written,
                seconds,
            )
        )

    def _adopt(self, live: Session, receipt: Receipt, backend: object) -> None:
        """The session stands behind the new version. It is still dirty: the tokens behind the blocks have no state
        there."""
        live.durable = Durable.of(receipt, backend)
        live.unchanged_tokens = receipt.token_count
        live.rewound, live.saved_from = False, None
        end = receipt.token_count
        live.state.checkpoints.became_durable(checkpoints_in(receipt.entries, end + 1), up_to=end)
        self._hibernation.look_after(receipt)


def end_of_blocks(live: Session) -> int:
    """How many tokens of a session the next version behind has in blocks; 0 if no more than its last version."""
    state, count = live.state, len(live.state.tokens)
    held = min(live.durable.token_count, live.unchanged_tokens) if live.durable else 0
    if not live.model.layout.by_token:
        later = [each.position for each in state.checkpoints if held < each.position < count]
        return max((each for each in later if each <= held + _most_tokens(live)), default=min(later, default=0))
    full, written = _full(count - 1), _full(held)
    if full <= written:
        return 0
    end = state.passes.end_behind(min(full, written + _most_tokens(live)))
    return end if end < count else 0


def _full(token_count: int) -> int:
    return token_count - token_count % BLOCK_TOKENS


def _most_tokens(live: Session) -> int:
    block_bytes = sum(slot.size_bytes for slot in live.model.layout.span_slots(BLOCK_TOKENS))
    return BLOCK_TOKENS * max(1, _MOST_BYTES // max(1, block_bytes))


def _cut(live: Session, end: int) -> Cut:
    return cut(
        live.state,
        live.model.layout,
        durable=live.durable.entries if live.durable else (),
        unchanged_tokens=live.unchanged_tokens,
        is_lossy=live.loss is not None,
        end=end,
    )


def _copied(live: Session, snapshot: Cut, behind: Behind) -> tuple[Sequence[BlockDraft], Mapping[str, Any]]:
    return snapshot.copied(), behind.session_map(live)


async def _first_of(writing: asyncio.Future[Receipt], wanted: asyncio.Event) -> None:
    asked = asyncio.ensure_future(wanted.wait())
    both: list[asyncio.Future[Any]] = [writing, asked]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()


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
