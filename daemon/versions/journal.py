"""Turns that count before a sleep: when a request is answered, its tokens are durable.

Owns what of a session goes into the journal of the store, and when it is flushed. A record has what a ledger without
state has (`version.py`): the tokens behind the blocks of the last version, the model calls that read them, the random
key, the texts' digests. So what an opening makes of it after a crash wakes as such a ledger does, in the same calls.

Records that come while one flush is under way wait for the next, which serves all of them. Where many turns are under
way, a flush waits a little for others to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from ...memvid.errors import Corruption, LimitExceeded, RemoteError, RemoteUnreachable, StoreError
from ...memvid.format.journal import JournalRecord
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..options.current import CurrentOptions
from ..sessions.sessions import Session
from ..tasks.cancellation import in_any_case, to_the_end
from .version import Base, map_behind
from .writing import Versions

if TYPE_CHECKING:
    from ..disk.remote import Remote


_BYTES_A_TOKEN: Final = 24
"""Of a record: the token's id, the size of a model call, and as much again: a system text stands there twice, and its
tokens are what a first request reads."""

_BYTES_A_MESSAGE: Final = 256
"""Of two text maps, at most, with what stands around a message."""

_BYTES_A_CALL: Final = 16
"""Of two text maps."""

_BYTES_A_BIAS: Final = 32
"""Of a token of a `logit_bias`."""

_BYTES_A_RUN: Final = 8
"""Of what tells how the tokens in blocks were read."""

_BYTES_ELSE: Final = 16 * 1024
"""Of what stands in each record: identity, sampling, names, origins."""

_MANY: Final = 16
"""A flush waits while so many turns are under way. With fewer it would mostly wait in vain."""

_WAIT_SHARE: Final = 16
"""Such a flush waits for this part of the time that a turn took: one more of the others ends within it, at least."""

_MOST_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A turn that has ended and is not durable yet. took_s: how long it was under way."""

    session: Session
    took_s: float
    written: asyncio.Future[None]


@dataclass(eq=False, repr=False)
class TurnJournal:
    """Keeps the turns of awake sessions. Callers hold the session alone."""

    _store: Store
    _versions: Versions
    _options: CurrentOptions
    _remote: Remote | None

    def __post_init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._flushing: asyncio.Task[None] | None = None
        self._begun: dict[SessionUri, float] = {}  # when each turn under way began
        self._few = asyncio.Event()
        self._alone: WeakValueDictionary[SessionUri, asyncio.Lock] = WeakValueDictionary()

    async def make_room(self, session: Session, more_tokens: int) -> None:
        """Take the disk space for the record of a session that grows by so many tokens. Raises StoreError: there is
        none. Nothing has changed."""
        if not self.keeps(session):
            return
        self._begun.setdefault(session.uri, time.monotonic())
        base, tokens = Base.of(session), len(session.state.tokens) + more_tokens
        said = session.chat.text_map
        roots = [session.chat.root.to_text(), *(text for _, text in said.roots * 2)]
        texts = (session.chat.system, said.system, said.system, *roots, *session.labels)
        wanted = sum(len(text.encode()) for text in texts if text)
        wanted += _BYTES_A_CALL * sum(len(turn.calls) for turn in said.turns)
        wanted += _BYTES_A_BIAS * len(session.sampling.logit_bias)
        wanted += _BYTES_A_MESSAGE * (len(said.turns) + 2) + _BYTES_A_RUN * session.state.passes.run_count + _BYTES_ELSE
        take = partial(self._store.make_room_to_acknowledge, session.uri)
        with contextlib.suppress(LimitExceeded):  # then it is made a version
            try:
                record_bytes = wanted + _BYTES_A_TOKEN * (tokens - base.held)
                await self._versions.threads.on_journal(partial(take, record_bytes, base.bundle_id))
            except Corruption:  # the turn cannot stand behind that version
                await self._versions.threads.on_journal(partial(take, wanted + _BYTES_A_TOKEN * tokens))

    def give_back_room(self, uri: SessionUri) -> None:
        """What was not used of the room that a request took: it has ended."""
        self._end(uri)
        self._store.give_back_room(uri)

    async def acknowledge(self, session: Session) -> None:
        """Make durable what the session has beyond its last version. A cancellation is ignored: the turn is done, and
        its answer says so.

        Raises:
            StoreError: it is not durable. The session has it in memory.
            LeaseLost: another machine may have the session by now, so nothing is told.
            RemoteError: it was to be durable in the remote first, and is not there, as far as is known.
            With both, the session leaves memory at the end of the request, and is as it was last told.
        """
        try:
            self._require_lease(session)
            if self.keeps(session) and session.dirty and session.state.tokens:
                await in_any_case(self._acknowledge(session))
                self._require_lease(session)  # a flush may take long
        except RemoteError:
            # A later version would have what nobody was told, beside what another machine goes on with. Where no
            # journal keeps the turns, memory alone has those that were told.
            session.state.is_lost = session.state.is_lost or self.keeps(session)
            raise

    async def _send(self, session: Session) -> bool:
        """Where each turn has to survive this machine, send it before it is durable here: what this machine comes back
        with then, others have seen, and may have gone on from. False: it is too long for a record."""
        if self._remote is None or self._options.now.remote_turns != 0:
            return True
        try:
            for relying in (True, False):
                if await self._remote.send_turns(self._record_of(session, relying=relying)):
                    return True
        except LimitExceeded:
            return False
        raise RemoteUnreachable(
            f"The turn of {session.uri} is not in {self._remote.url}, which has not answered since the session began. "
            "Try again, or serve with a --remote-turns above 0.",
            session=str(session.uri),
        )

    def _require_lease(self, session: Session) -> None:
        if self._remote is not None:
            self._remote.require(session.uri)

    @asynccontextmanager
    async def between_turns(self, uri: SessionUri) -> AsyncIterator[None]:
        """While no turn of a session is made durable: `Session.acknowledged` is what the journal has of it, and stays
        so."""
        lock = self._alone.setdefault(uri, asyncio.Lock())
        async with lock:
            yield

    def keeps(self, session: Session) -> bool:
        """Whether the session's turns come here."""
        return self._options.now.durability == "turn" and session.durability is None

    async def _acknowledge(self, session: Session) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        took_s = self._end(session.uri)
        async with self.between_turns(session.uri):
            is_sent = await self._send(session)
            told = None if is_sent else self._store.acknowledged_turns(session.uri)
            self._waiting.append(_Waiting(session, took_s, written))
            if self._flushing is None:
                self._flushing = asyncio.ensure_future(self._flush())
            try:
                await written
                is_written = True
            except LimitExceeded:
                is_written = False
        if not is_written or not is_sent:
            # Not between turns: a write behind waits there, and the sleep may have to wait for that to make room.
            receipt = await to_the_end(self._versions.sleep(session, ignore, cause="journal"))
        if not is_sent and self._remote is not None and self._remote.has(session.uri):
            try:
                await self._remote.push(session.uri)
            except RemoteError:
                take_back = partial(self._take_back, session.uri, receipt.version, told)
                await to_the_end(self._versions.threads.on_writer(take_back))
                raise

    def _take_back(self, uri: SessionUri, version: int, told: JournalRecord | None) -> None:
        """A version has a turn that is not told: it goes. told: the turns that it had from the journal."""
        if told is not None:
            self._store.acknowledge([told])
        self._store.delete_version(uri, version)

    def _record_of(self, session: Session, *, relying: bool) -> JournalRecord:
        """relying: its tokens stand behind the blocks of the last version that it was woken from or put to sleep as."""
        newest = self._store.find_session(session.uri)
        base = Base.of(session) if relying else Base.none(session)
        return JournalRecord(
            uri=session.uri,
            session=map_behind(session, base),
            newest=None if newest is None else (newest.version, newest.bundle_id),
            base=base.bundle_id,
            held=base.held,
            identity=None if base.bundle_id is not None else session.model.identity,
        )

    async def _flush(self) -> None:
        try:
            while self._waiting:
                await self._let_others_end()
                batch, self._waiting = self._waiting, []
                await self._write(batch)
        finally:
            self._flushing = None

    def _end(self, uri: SessionUri) -> float:
        """A turn is under way no more; how long it was, in seconds."""
        now = time.monotonic()
        took_s = now - self._begun.pop(uri, now)
        if len(self._begun) < _MANY:
            self._few.set()
        return took_s

    async def _let_others_end(self) -> None:
        """While many turns are under way, wait a little for some of them, so that one flush serves more."""
        if len(self._begun) >= _MANY:
            self._few.clear()
            wait_s = min(_MOST_WAIT_S, min(each.took_s for each in self._waiting) / _WAIT_SHARE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._few.wait(), wait_s)

    async def _write(self, batch: Sequence[_Waiting], *, relying: bool = True) -> None:
        """Write records with one flush; where that is refused, each alone, so that one refuses no other. relying: as
        for `_record_of`."""

        def acknowledge() -> list[JournalRecord]:
            records = [self._record_of(each.session, relying=relying) for each in batch]
            self._store.acknowledge(records)
            return records

        try:
            records = await self._versions.threads.on_journal(acknowledge)
        except Exception as error:  # noqa: BLE001 - told to those that wait for it
            if len(batch) > 1 and isinstance(error, StoreError):
                for one in batch:
                    await self._write([one])
                return
            if relying and isinstance(error, Corruption):  # the version behind which it stands was pruned or stripped
                await self._write(batch, relying=False)
                return
            for each in batch:
                each.written.set_exception(error)
        else:
            for each, record in zip(batch, records, strict=True):
                each.session.acknowledged = record.session
                if self._remote is not None:
                    self._remote.on_turn(record)
                each.written.set_result(None)

    async def replay(self, uri: SessionUri) -> None:
        """Make a version of turns whose session has left memory without a sleep. Raises StoreError: it cannot be made
        now. Until it can, the session is not to be used."""
        if self._store.has_turns(uri):
            await self._versions.threads.on_writer(partial(self._store.replay_turns, uri))
