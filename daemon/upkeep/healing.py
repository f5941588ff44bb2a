"""Healing: damaged blocks are computed again from the stored tokens, before a repair gives them up.

For a session with a damaged block in its newest version: wake the part before the block, read the later tokens in the
same model calls as before, and sleep. In the same environment this gives the same bits, and so the same block ids; the
repair that follows then mends the damaged version from the new blocks. In another environment the new version replaces
the damaged one, and tells what was computed again.

An awake session needs no computing: all of it is in memory, and it sleeps again without the damaged blocks.

If a version ends in a ledger alone (`ledgers.py`), its damaged part may become part of that ledger. The next use then
computes it.

Three cases cannot be healed. If the ledger or the record at its end is damaged, the repair saves the longest sound
beginning and sets the damaged file aside. If healing is impossible only now (no memory or disk space, a model that
cannot be loaded, a daemon that stops), nothing is touched, for any caller. If this daemon never can (it does not serve
the model), a repair that a user asks for goes on, and the daemon's own does not. A repair covers the whole store, so
all damaged sessions are healed first.

A stop waits for at most one block and one model call; a session that is not healed by then is as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from ...errors import TorporError
from ...memvid.checking.set_aside_versions import LOST
from ...memvid.errors import Corruption, ReadBackFailed, SessionNotFound, StoreError, UnsafePath, UnsupportedFormat
from ...memvid.format.blocks import BlockEntry
from ...memvid.format.lossy import LOSSY
from ...memvid.format.reader import BundleReader
from ...memvid.format.salvaged import salvaged_of
from ...memvid.store import IndexRow, Receipt, Store
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...snapshot.errors import (
    CanaryFailed,
    ContextTooShort,
    IdentityMismatch,
    LayoutMismatch,
    MalformedSnapshot,
    UnsupportedCache,
)
from ...snapshot.identity import require_same
from ...snapshot.passes import Passes, tokens_of
from ...snapshot.restore import read_checkpoint
from ...snapshot.state import LiveState, token_array
from ..api.events import ignore
from ..api.session import Recomputed
from ..engine.admission import standing_back
from ..engine.engine import Engine, Steps
from ..engine.generation import read_again
from ..engine.sampler import initial_key
from ..errors import NotRecomputable, RepairPutOff, ServiceClosed, SessionBusy, UnknownModel, sentence_of
from ..events.bus import Bus, code_of
from ..events.events import HealFailed, SessionHealed, StoreRepaired
from ..models.models import LoadedModel
from ..residency.residency import Residency
from ..sessions.sessions import Durable, Session, tree_in
from ..sessions.unprocessed_tail import unread_in
from ..sleep.hibernation import Hibernation
from ..sleep.maintenance import Maintenance
from ..sleep.orders import WakeOrder
from ..sleep.waking import durable_of
from ..tasks.cancellation import to_the_end

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
Left = Literal["settled", "not_here", "not_now"]

_CANNOT_BE: Final = (Corruption, NotRecomputable, SessionNotFound)
_NOT_HERE: Final = (
    UnknownModel,
    IdentityMismatch,
    LayoutMismatch,
    UnsupportedCache,
    MalformedSnapshot,
    ContextTooShort,
    CanaryFailed,
    UnsupportedFormat,
    UnsafePath,  # a repair leaves it alone, with all that may need it
)

_MAX_TOLD: Final = 4
"""Sessions that the message of a refusal names."""
_MOST_LISTED: Final = 1_000
"""Sessions that its details name."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The sound part of a version. first_broken: the first position in a damaged span, or the last position. records:
    positions of sound records up to there. end: the record at the version's end; None if a ledger goes on behind it and
    has to take the damaged part in."""

    tokens: Sequence[int]
    first_broken: int
    records: tuple[int, ...]
    end: BlockEntry | None

    def start(self, passes: Passes, *, by_token: bool) -> int:
        """Where reading can go on in the same calls as before: at the end of a call, or at a record for caches that
        cannot be cut by token."""
        return whole_calls(passes, self.first_broken) if by_token else max(self.records, default=0)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result for a damaged session. `settled`: healed, or it cannot be; a repair may go on. `not_here`: another
    daemon could heal it. `not_now`: this one can another time; `why` tells the reason."""

    left: Left = "settled"
    why: str = ""


_SETTLED: Final = _Outcome()


@dataclass(eq=False, repr=False)
class Healing:
    """Heals sessions, each in its turn, and then repairs the store."""

    _store: Store
    _engine: Engine
    _hibernation: Hibernation
    _maintenance: Maintenance
    _residency: Residency
    _bus: Bus

    def __post_init__(self) -> None:
        self.healed = self.failed = 0

    async def mend(self, uri: SessionUri) -> None:
        """Heal this session and all others with a damaged newest version, and repair the store. The repair is put off
        if one of them could be healed, but not by this daemon now.

        Raises:
            StoreError: the store cannot be repaired now. ServiceClosed: the daemon stops; sessions not healed yet are
                as they were.
        """
        with standing_back():
            left = await self._heal([uri])
        self._require_going_on()
        if all(each.left == "settled" for each in left.values()):
            held = await to_the_end(self._maintenance.run(self._held_back))
            for held_uri, versions in held.items():
                self._tell_failure(held_uri, _refusal(held_uri, versions))
            if held:
                return
            self._require_going_on()
            report = await to_the_end(self._maintenance.run(self._store.repair))
            kinds = [action.kind for action in report.actions]
            self._bus.publish(
                StoreRepaired(
                    None,
                    mended=kinds.count("rewrite") + kinds.count("restore"),
                    salvaged=kinds.count("salvage"),
                    quarantined=kinds.count("quarantine"),
                    problems=len(report.problems),
                )
            )

    async def heal(self) -> None:
        """Heal all sessions with a damaged newest version, as far as this daemon can, before a repair that a user asked
        for.

        Raises:
            RepairPutOff: some could be healed, only not now, and a repair would give them up. ServiceClosed: the daemon
                stops.
        """
        left = await self._heal([])
        if put_off := {uri: each.why for uri, each in left.items() if each.left == "not_now"}:
            raise _put_off(put_off)
        self._require_going_on()

    async def foresee(self) -> dict[SessionUri, tuple[int, str]]:
        """The plan of `heal`: the damaged newest versions, and a sentence on each. Memory and disk space are not
        checked."""
        damaged = await asyncio.to_thread(self._damaged, ())
        told = {uri: await self._foresee(uri) for uri in damaged}
        return {uri: each for uri, each in told.items() if each is not None}

    async def _foresee(self, uri: SessionUri) -> tuple[int, str] | None:
        try:
            async with self._residency.turn(uri):
                return await self._foresee_in_turn(uri)
        except TorporError as error:
            row = self._store.find_session(uri)
            return None if row is None or _outcome_of(error).left != "not_now" else (row.version, sentence_of(error))

    async def _foresee_in_turn(self, uri: SessionUri) -> tuple[int, str] | None:
        row = self._store.find_session(uri)
        if row is None:
            return None  # deleted meanwhile
        live = self._residency.putting_away.live(uri)
        if live is not None and live.holds_all_of(row.bundle_id):
            return row.version, "It is awake, and is written anew."
        found = await self._hibernation.threads.on_io(lambda: self._look(row))
        if found is None:
            return None
        model = self._residency.weights.facts(row.model) if found.end is not None else None
        if model is not None:
            with self._store.open_session(uri, row.version) as reader:
                require_same(reader.manifest.identity, model.identity, model=model.name)
        computed = format_plural(len(found.tokens) - found.first_broken, "token")
        return row.version, f"{computed} or more that are damaged, or stand behind that, are computed again."

    async def _heal(self, suspects: Sequence[SessionUri]) -> dict[SessionUri, _Outcome]:
        """Heal the suspects, and all other damaged sessions."""
        damaged = await asyncio.to_thread(self._damaged, suspects)  # not on the reading threads: a wake needs those
        return {each: await self._heal_in_turn(each) for each in damaged}

    def _require_going_on(self, _read_bytes: int = 0) -> None:
        """Raise ServiceClosed once the daemon stops: the damage is found again when it is back. On any thread."""
        if self._hibernation.stopping is not None:
            raise ServiceClosed("The daemon stops; what is damaged is healed when it is back.")

    def _unless_stopping(self, steps: Steps[Result]) -> Steps[Result]:
        """Run steps until the daemon stops."""
        with contextlib.closing(steps):
            while True:
                self._require_going_on()
                try:
                    next(steps)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                yield None

    async def _heal_in_turn(self, uri: SessionUri) -> _Outcome:
        begun = time.monotonic()
        try:
            async with self._residency.turn(uri) as use:
                row = self._store.find_session(uri)
                if row is None:
                    return _SETTLED  # deleted meanwhile
                live = self._residency.putting_away.live(uri)
                if live is not None and live.holds_all_of(row.bundle_id):
                    return await to_the_end(self._keep_awake(live))
                found = await self._hibernation.threads.on_io(lambda: self._look(row))
                if found is None:
                    return _SETTLED
                if found.end is None:
                    await to_the_end(self._heal_ledger(row, found))
                    return _SETTLED
                async with self._residency.room_to_wake(use, row) as model:
                    if self._residency.standing.require_row(uri).version != row.version:
                        raise SessionBusy(f"{uri} gave its memory to others and slept meanwhile.", session=str(uri))
                    receipt, told = await to_the_end(self._compute(row, found, found.end, model))
                await self._lead_on(uri, row, receipt, told.start)
        except TorporError as error:
            self._tell_failure(uri, error)
            return _outcome_of(error)
        self.healed += 1
        _LOG.warning("%s was damaged, and is healed as version %d", uri, receipt.version)
        self._bus.publish(
            SessionHealed(
                uri,
                version=receipt.version,
                tokens=receipt.ledger_tokens,
                recomputed_tokens=told.tokens,
                same_logits=told.same_logits,
                bytes_written=receipt.bytes_written,
                seconds=time.monotonic() - begun,
            )
        )
        return _SETTLED

    async def _keep_awake(self, live: Session) -> _Outcome:
        """Save an awake session as a version without damaged blocks."""
        newest = live.durable
        assert newest is not None
        sound = await asyncio.to_thread(self._sound_beginning, live.uri, newest.version)
        if len(sound) == len(newest.entries):
            return _SETTLED
        live.durable = replace(newest, entries=sound)
        live.tree = await asyncio.to_thread(self._tree_of, live)
        try:
            await self._residency.putting_away.keep(live, ignore, "heal")
        except TorporError as error:
            live.durable = newest
            self._tell_failure(live.uri, error)
            return _Outcome("not_now", sentence_of(error))  # all of it is in memory
        finally:
            live.tree = {}
        return _SETTLED

    def _tree_of(self, live: Session) -> Mapping[str, Any]:
        """The tree that the version of an awake session has, if the session has not changed since."""
        with contextlib.suppress(StoreError):
            if live.durable is not None and not live.dirty:
                with self._store.open_session(live.uri, live.durable.version) as reader:
                    return tree_in(reader.manifest.session)
        return {}

    async def _lead_on(self, uri: SessionUri, row: IndexRow, receipt: Receipt, recomputed_from: int) -> None:
        """Move a session that was woken at an earlier token of the damaged version onto the new one, and its turns in
        the journal with it: a repair may take the damaged one away."""
        self._residency.awake.lead_on(uri, row.bundle_id, receipt)
        live = self._residency.awake.get(uri)
        if live is not None and live.durable is not None and live.durable.bundle_id == row.bundle_id:
            live.durable = Durable.of(receipt, dict(live.model.backend))
            live.unchanged_tokens = min(live.unchanged_tokens, recomputed_from)
            await self._residency.journal.acknowledge(live)

    def _tell_failure(self, uri: SessionUri, error: TorporError) -> None:
        self.failed += 1
        _LOG.warning("%s cannot be healed: %s: %s", uri, error.code, error.message)
        self._bus.publish(HealFailed(uri, code_of(error)))

    def _held_back(self) -> dict[SessionUri, list[int]]:
        """Earlier versions that could be computed again, and that a repair would give up now: those with a mark, and
        those with tokens that no sound version begins with. Nothing heals earlier versions. Reads the whole store.

        Raises StoreError: a part of the store could not be read."""
        report = self._store.repair(dry_run=True)
        lost = {finding.path for finding in report.problems if finding.code == LOST}
        going: dict[SessionUri, set[int]] = {}
        for action in report.actions:
            if action.path in lost and action.session is not None and action.version is not None:
                going.setdefault(action.session, set()).add(action.version)
        held: dict[SessionUri, list[int]] = {}
        for uri, versions in going.items():
            if found := self._held_of(uri, versions):
                held[uri] = found
        return held

    def _held_of(self, uri: SessionUri, going: Container[int]) -> list[int]:
        rows = self._store.versions(uri)
        kept = [ledger for row in rows if row.version not in going and (ledger := self._ledger_of(row)) is not None]
        marked = self._marked(uri)
        held = []
        for row in rows:
            ledger = self._ledger_of(row) if row.version in going and self._is_computable(row) else None
            if ledger is None:
                continue
            if marked is None or row.bundle_id in marked or not any(each.startswith(ledger) for each in kept):
                held.append(row.version)
        return held

    def _marked(self, uri: SessionUri) -> Collection[bytes] | None:
        """The bundles of a session with a mark; None if that is unknown."""
        try:
            return self._store.marks(uri).numbers.keys()
        except StoreError:
            return None

    def _is_computable(self, row: IndexRow) -> bool:
        try:
            return self._look(row) is not None
        except (*_CANNOT_BE, MalformedSnapshot):
            return False

    def _ledger_of(self, row: IndexRow) -> bytes | None:
        """All tokens of a version, uint32; None if they are damaged."""
        try:
            with self._store.open_session(row.uri, row.version) as reader:
                unread = unread_in(reader.manifest.session, row.uri)
                return reader.tokens() + (unread.tokens.tobytes() if unread is not None else b"")
        except (*_CANNOT_BE, MalformedSnapshot):
            return None

    def _damaged(self, suspects: Sequence[SessionUri]) -> list[SessionUri]:
        """The suspects, and all others with a damaged newest version. Reads the whole store."""
        known: dict[BlockEntry, bool] = {}
        rows = [row for row in self._store.iter_sessions() if row.uri not in suspects]
        return [*suspects, *(row.uri for row in rows if not self._is_whole(row, known))]

    def _is_whole(self, row: IndexRow, known: dict[BlockEntry, bool]) -> bool:
        try:
            with self._store.open_session(row.uri, row.version) as reader:
                for entry in reader.entries:
                    if entry not in known:
                        known[entry] = _is_sound(reader, entry, self._require_going_on)
                return all(known[entry] for entry in reader.entries)
        except SessionNotFound:
            return True  # deleted meanwhile
        except StoreError:
            return False  # the check in its turn tells damage from a failed read

    def _sound_beginning(self, uri: SessionUri, version: int) -> tuple[BlockEntry, ...]:
        """The blocks of a version that a sleep may refer to: the sound ones before the first damaged span. Raises
        StoreError: a block could not be read.
        """
        try:
            with self._store.open_session(uri, version) as reader:
                reader.tokens()
                sound = []
                for entry in reader.entries:
                    if _is_sound(reader, entry, self._require_going_on):
                        sound.append(entry)
                    elif entry.kind == "span":
                        break
                return tuple(sound)
        except (Corruption, SessionNotFound):
            return ()

    def _look(self, row: IndexRow) -> _Found | None:
        with self._store.open_session(row.uri, row.version) as reader:
            return _look(reader, self._require_going_on)

    async def _heal_ledger(self, row: IndexRow, found: _Found) -> None:
        """Move the damaged part into the ledger behind it; the next use computes it."""
        receipt = await self._residency.ledgers.keep_less(row, found.first_broken, found.records)
        await self._lead_on(row.uri, row, receipt, receipt.token_count)
        self.healed += 1
        _LOG.warning("%s was damaged before its ledger, and has more of it in version %d", row.uri, receipt.version)

    async def _compute(
        self, row: IndexRow, found: _Found, last: BlockEntry, model: LoadedModel
    ) -> tuple[Receipt, Recomputed]:
        """Write a new version of a sleeping session, with the damaged part computed again."""
        reader = await self._hibernation.threads.on_io(lambda: self._store.open_session(row.uri, row.version))
        try:
            require_same(reader.manifest.identity, model.identity, model=model.name)
            end = await self._engine.call(lambda: read_checkpoint(reader, last, model.layout))
            start = found.start(end.passes, by_token=model.layout.by_token)
            state = await self._state_at(start, row, reader, model)
            same = await self._engine.run(self._unless_stopping(read_again(model, state, found.tokens, end)))
            session = Session.woken(row.uri, model, state, durable_of(reader, 0), reader.manifest.session)
            session.salvaged = salvaged_of(reader.manifest)
            session.tree = tree_in(reader.manifest.session)
        finally:
            reader.close()
        session.recomputed = Recomputed(row.version, start, len(found.tokens) - start, same)
        session.came_from(reader.manifest.session, start)
        session.unchanged_tokens, session.dirty = start, True
        receipt = await self._hibernation.sleep(session, ignore, cause="heal", may_wait=True, covers=False)
        return receipt, session.recomputed

    async def _state_at(self, start: int, row: IndexRow, reader: BundleReader, model: LoadedModel) -> LiveState:
        """The session's state after `start` tokens."""
        if start:
            order = WakeOrder(row.version, start, cause="heal")
            return (await self._hibernation.waking.wake(row.uri, order, model, ignore)).session.state
        return await self._hibernation.waking.begin(model, initial_key)


def _outcome_of(error: TorporError) -> _Outcome:
    """The outcome of an error. A repair needs no memory or model, and would give up a session that is put off."""
    if isinstance(error, _CANNOT_BE) and not isinstance(error, ReadBackFailed):
        return _SETTLED
    return _Outcome("not_here" if isinstance(error, _NOT_HERE) else "not_now", sentence_of(error))


def _put_off(put_off: Mapping[SessionUri, str]) -> RepairPutOff:
    told = "; ".join(f"{uri} ({why.rstrip('.')})" for uri, why in list(put_off.items())[:_MAX_TOLD])
    more = f"; and {len(put_off) - _MAX_TOLD} others" if len(put_off) > _MAX_TOLD else ""
    return RepairPutOff(
        f"Nothing was repaired: that would cut sessions short that can be computed again, only not now: {told}{more}. "
        "Solve that and repair again; or stop the daemon and repair without it, which cuts them to their sound part.",
        sessions={str(uri): why for uri, why in list(put_off.items())[:_MOST_LISTED]},
    )


def _refusal(uri: SessionUri, versions: Sequence[int]) -> RepairPutOff:
    told = ", ".join(map(str, versions[:_MAX_TOLD])) + (", ..." if len(versions) > _MAX_TOLD else "")
    return RepairPutOff(
        f"Nothing is repaired unasked: that would give up earlier versions of {uri} ({told}), which are damaged but "
        "have all their tokens. Put back their files from a backup, prune them, or ask for a repair.",
        session=str(uri),
    )


def whole_calls(passes: Passes, token_count: int) -> int:
    """The tokens of the whole calls among the first `token_count` tokens: reading can go on behind them as before."""
    position = 0
    for size in passes:
        if position + tokens_of(size) > token_count:
            break
        position += tokens_of(size)
    return position


def _look(reader: BundleReader, on_bytes: Callable[[int], None]) -> _Found | None:
    """Find the damage of a version; None if there is none. on_bytes: called with the bytes read; may raise.

    Raises:
        Corruption: its ledger is damaged. StoreError: a part of it could not be read. NotRecomputable: the record at
            its end is damaged, or it is lossy.
    """
    tokens = token_array(reader.tokens())
    broken = [entry for entry in reader.entries if not _is_sound(reader, entry, on_bytes)]
    if not broken:
        return None
    is_lossy = reader.manifest.session.get(LOSSY) is not None
    goes_on = unread_in(reader.manifest.session, reader.manifest.uri) is not None
    if is_lossy and not goes_on:
        raise NotRecomputable(
            f"{reader.manifest.uri} was kept in fewer bits, and what rests on those cannot be computed again.",
            session=str(reader.manifest.uri),
        )
    ends = [entry for entry in reader.entries if entry.kind == "state" and entry.start == len(tokens)]
    end = ends[-1] if ends and ends[-1] not in broken and not is_lossy else None
    if end is None and not goes_on:
        raise NotRecomputable(
            f"{reader.manifest.uri} has no sound record of its last position.", session=str(reader.manifest.uri)
        )
    first = min((entry.start for entry in broken if entry.kind == "span"), default=len(tokens) - 1)
    records = (entry.start for entry in reader.entries if entry.kind == "state" and entry not in broken)
    return _Found(tokens, first, tuple(each for each in records if each <= first), end)


def _is_sound(reader: BundleReader, entry: BlockEntry, on_bytes: Callable[[int], None]) -> bool:
    """Whether a block is intact. Raises StoreError if it could not be read, which proves nothing."""
    try:
        with reader.holding(entry) as file:
            file.check_payloads(entry.id, on_bytes)
    except Corruption:
        return False
    return True
