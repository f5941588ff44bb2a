"""Healing: blocks that are damaged or missing are computed again from the stored tokens.

For a session whose newest version is not whole: wake the part before the first such block, read the later tokens in the
same model calls as before, and sleep. In the same environment this gives the same bits, and so the same block ids: the
damaged version is whole again, for its blocks are in a pack. In another environment the new version comes after the
damaged one, and tells what was computed again.

The store is repaired first: that copies what is sound out of damaged packs, with the tokens of damaged blocks, and
gives nothing up. Only what is lacking then is computed.

An awake session needs no computing: all of it is in memory, and it sleeps again without the damaged blocks.

If a version ends in a ledger alone (`version.py`), its damaged part may become part of that ledger. The next use then
computes it.

Where the ledger or the record at its end is damaged, nothing can be healed: the version stays, whole up to the damage.
A stripped version is whole without its keys and values, and is not healed.

A stop waits for at most one block and one model call; a session that is not healed by then is as it was.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from ...errors import TorporError
from ...memvid.answers import Action, MaintenanceReport, VersionInfo
from ...memvid.checking.check import exhausted
from ...memvid.errors import CorruptBlock, Corruption, SessionNotFound, StoreError
from ...memvid.format.blocks import BlockEntry
from ...memvid.format.manifest import LOSSY
from ...memvid.format.records import DamagedVersion, VerifyReport
from ...memvid.store import Receipt, Store, VersionDraft
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot.identity import require_same
from ...snapshot.passes import Passes
from ...snapshot.restore import read_checkpoint
from ...snapshot.state import LiveState, token_array
from ..api.events import ignore
from ..api.session import Recomputed
from ..engine.admission import standing_back
from ..engine.engine import Engine, Steps
from ..engine.generation import read_again
from ..engine.sampler import initial_key
from ..errors import NotRecomputable, ServiceClosed, SessionBusy, sentence_of
from ..events.bus import Bus, code_of
from ..events.events import HealFailed, SessionHealed, StoreRepaired
from ..memory.model_registry import Shelf
from ..models.models import LoadedModel
from ..residency.residency import Residency
from ..sessions.sessions import Session, tree_in
from ..sessions.unprocessed_tail import unread_in
from ..tasks.cancellation import to_the_end
from ..tasks.door import Door
from ..versions.orders import WakeOrder
from ..versions.version import with_fewer_blocks
from ..versions.writing import Terms, Versions
from .loop import NOW, Job, Upkeep

_LOG = logging.getLogger(__name__)

_AWAKE: Final = "It is awake, and is written anew."

Result = TypeVar("Result")


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
        return passes.whole_calls(self.first_broken) if by_token else max(self.records, default=0)


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The plan for the newest version of a session. is_healed: that version is whole then, and not another one."""

    version: int
    sentence: str
    is_healed: bool = True


class Healing(Job[SessionUri]):
    """Repairs the store, and heals sessions, each in its turn. to_heal: the sessions in whose files a check has found
    faults, with these."""

    name: ClassVar = "heal"

    def __init__(
        self,
        upkeep: Upkeep,
        store: Store,
        engine: Engine,
        versions: Versions,
        residency: Residency,
        shelf: Shelf,
        door: Door,
        bus: Bus,
        to_heal: dict[SessionUri, VerifyReport],
    ) -> None:
        self._store = store
        self._engine = engine
        self._versions = versions
        self._residency = residency
        self._shelf = shelf
        self._door = door
        self._bus = bus
        self._to_heal = to_heal
        self.healed = self.failed = 0
        self._seen: set[str] = set()
        """The files of which the last repair has told faults that it could not mend."""
        super().__init__(upkeep)

    def due(self) -> Iterable[tuple[SessionUri, float]]:
        return ((uri, NOW) for uri in self._to_heal)

    async def piece(self, uri: SessionUri) -> None:
        """Repair the store, and heal this session if its newest version is not whole then. Without faults that the last
        repair has not seen, there is nothing to repair."""
        report = self._to_heal[uri]
        if not self._seen.issuperset(finding.path for finding in report.findings):
            try:
                await self._repair()
            except StoreError as error:  # it is tried again when this session is read again
                _LOG.warning("the store cannot be repaired: %s: %s", error.code, error.message)
        with standing_back():
            await self._heal(report)
        if self._to_heal[uri] is report:  # else it was read again meanwhile
            del self._to_heal[uri]
        self._upkeep.look_again()

    async def _repair(self) -> None:
        report = await to_the_end(self._thread.order(self._store.repair))
        self._seen = {problem.path for problem in report.problems}
        kinds = [action.kind for action in report.actions]
        copied, moved = kinds.count("copy"), kinds.count("move")
        self._bus.publish(StoreRepaired(None, copied=copied, moved=moved, problems=len(report.problems)))

    async def heal(self) -> list[Action]:
        """Heal all sessions whose newest version is not whole, as far as this daemon can now; what was healed. Raises
        ServiceClosed: the daemon stops."""
        report = await self._versions.threads.on_io(self._verify)
        return await self._heal(report)

    async def foresee(self, plan: MaintenanceReport) -> MaintenanceReport:
        """The plan of a repair with that of `heal` behind it: the damaged newest versions, each with a sentence; and
        without the problems that go with it. Memory and disk space are not checked."""
        report = await self._versions.threads.on_io(self._verify)
        told = [(each, foreseen) for each in self._newest_damaged(report) if (foreseen := await self._foresee(each))]
        healings = [
            _healing(each.uri, foreseen.version, foreseen.sentence, is_healed=foreseen.is_healed)
            for each, foreseen in told
        ]
        blocks = {block for each, foreseen in told if foreseen.is_healed for block in each.blocks}
        healed = {
            (str(each.uri), each.version) for each in report.damaged if each.blocks and blocks.issuperset(each.blocks)
        }
        left = tuple(problem for problem in plan.problems if (problem.session, problem.version) not in healed)
        return replace(plan, actions=(*plan.actions, *healings), problems=left)

    async def _foresee(self, damaged: DamagedVersion) -> _Foreseen | None:
        uri = damaged.uri
        try:
            async with self._residency.turn(uri):
                return await self._foresee_in_turn(damaged)
        except TorporError as error:
            if (row := self._store.find_session(uri)) is None:
                return None
            return _Foreseen(row.version, f"It is not computed again: {sentence_of(error)}", is_healed=False)

    async def _foresee_in_turn(self, damaged: DamagedVersion) -> _Foreseen | None:
        uri = damaged.uri
        row = self._store.find_session(uri)
        if row is None:
            return None  # deleted meanwhile
        live = self._residency.awake.get(uri)
        if live is not None and live.holds_all_of(row.bundle_id):
            return _Foreseen(row.version, _AWAKE)
        found = await self._versions.threads.on_io(lambda: self._look(row, damaged))
        if found is None:
            return None
        if found.end is not None and (model := self._facts(row.model)) is not None:
            with self._store.open_session(uri, row.version) as reader:
                require_same(reader.manifest.identity, model.identity, model=model.name)
        computed = format_plural(len(found.tokens) - found.first_broken, "token")
        sentence = f"{computed} or more that are damaged, or stand behind that, are computed again."
        return _Foreseen(row.version, sentence, is_healed=found.end is not None)

    def _facts(self, name: str) -> LoadedModel | None:
        """A served model, maybe without its weights; None if it was never loaded. Raises UnknownModel: it is not
        served."""
        place = self._shelf.place(name)
        return place.model or place.facts

    def _verify(self) -> VerifyReport:
        return exhausted(self._unless_stopping(self._store.verifying(deep=True)))

    def _newest_damaged(self, report: VerifyReport) -> list[DamagedVersion]:
        """The newest versions that are not whole, but for stripped ones."""
        newest = {uri: self._store.find_session(uri) for uri in {each.uri for each in report.damaged}}
        return [
            each
            for each in report.damaged
            if (row := newest[each.uri]) is not None and row.bundle_id == each.bundle_id and not each.is_stripped
        ]

    async def _heal(self, report: VerifyReport) -> list[Action]:
        """Heal what a check has found; what was healed."""
        tried = [await self._heal_in_turn(each) for each in self._newest_damaged(report)]
        self._require_going_on()
        return [healed for healed in tried if healed is not None]

    def _require_going_on(self) -> None:
        """Raise ServiceClosed once the daemon stops: the damage is found again when it is back. On any thread."""
        if self._door.stopping is not None:
            raise ServiceClosed("The daemon stops; what is damaged is healed when it is back.")

    def _unless_stopping(self, steps: Generator[Any, None, Result]) -> Steps[Result]:
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

    async def _heal_in_turn(self, damaged: DamagedVersion) -> Action | None:
        begun, uri = time.monotonic(), damaged.uri
        try:
            async with self._residency.turn(uri) as use:
                row = self._store.find_session(uri)
                if row is None:
                    return None  # deleted meanwhile
                live = self._residency.awake.get(uri)
                if live is not None and live.holds_all_of(row.bundle_id):
                    return await to_the_end(self._keep_awake(live, damaged))
                found = await self._versions.threads.on_io(lambda: self._look(row, damaged))
                if found is None:
                    return None
                if found.end is None:
                    return await to_the_end(self._heal_ledger(row, found))
                async with self._residency.room_to_wake(use, row) as model:
                    if self._residency.standing.require_row(uri).version != row.version:
                        raise SessionBusy(f"{uri} gave its memory to others and slept meanwhile.", session=str(uri))
                    receipt, told = await to_the_end(self._compute(row, found, found.end, model))
                await self._lead_on(uri, row, receipt, told.start)
        except TorporError as error:
            self._tell_failure(uri, error)
            return None
        self.healed += 1
        _LOG.warning("%s was damaged, and is healed as version %d", uri, receipt.version)
        self._bus.publish(
            SessionHealed(
                uri,
                version=receipt.version,
                tokens=receipt.token_count,
                recomputed_tokens=told.tokens,
                same_logits=told.same_logits,
                bytes_written=receipt.bytes_written,
                seconds=time.monotonic() - begun,
            )
        )
        computed = format_plural(told.tokens, "token")
        return _healing(uri, receipt.version, f"{computed} were damaged, or stood behind that, and are computed again.")

    async def _keep_awake(self, live: Session, damaged: DamagedVersion) -> Action | None:
        """Save an awake session as a version without damaged blocks."""
        newest = live.durable
        assert newest is not None
        sound = await self._versions.threads.on_io(partial(self._sound_beginning, live.uri, newest.version, damaged))
        if sound == newest.entries:
            return None
        live.durable = replace(newest, entries=sound or ())
        terms = Terms(branch=await self._versions.threads.on_io(partial(self._tree_of, live)))
        try:
            await self._residency.putting_away.keep(live, ignore, "heal", terms)
        except TorporError as error:
            live.durable = newest
            self._tell_failure(live.uri, error)  # all of it stays in memory
            return None
        return _healing(live.uri, live.durable.version, _AWAKE)

    def _tree_of(self, live: Session) -> Mapping[str, Any]:
        """The tree that the version of an awake session has, if the session has not changed since."""
        with contextlib.suppress(StoreError):
            if live.durable is not None and not live.dirty:
                with self._store.open_session(live.uri, live.durable.version) as reader:
                    return tree_in(reader.manifest.session)
        return {}

    async def _lead_on(self, uri: SessionUri, row: VersionInfo, receipt: Receipt, recomputed_from: int) -> None:
        """Move a session that was woken at an earlier token of the damaged version onto the new one, and its turns in
        the journal with it."""
        live = self._residency.awake.get(uri)
        if live is not None and live.durable is not None and live.durable.bundle_id == row.bundle_id:
            live.durable, live.durable_by = receipt, dict(live.model.backend)
            live.unchanged_tokens = min(live.unchanged_tokens, recomputed_from)
            await self._residency.journal.acknowledge(live)

    def _tell_failure(self, uri: SessionUri, error: TorporError) -> None:
        self.failed += 1
        _LOG.warning("%s cannot be healed: %s: %s", uri, error.code, error.message)
        self._bus.publish(HealFailed(uri, code_of(error)))

    def _sound_beginning(self, uri: SessionUri, version: int, damaged: DamagedVersion) -> tuple[BlockEntry, ...] | None:
        """The blocks of a version that a sleep may refer to: the sound ones before the first damaged span; None if its
        manifest is not there. Raises StoreError: a block could not be read.
        """
        try:
            with self._store.open_session(uri, version) as reader:
                broken = self._broken(reader, damaged)
                end = min(
                    (entry.start for entry in broken if entry.kind == "span"), default=reader.manifest.block_tokens
                )
                return tuple(entry for entry in reader.entries if entry.end <= end and entry not in broken)
        except (Corruption, SessionNotFound):
            return None

    def _look(self, row: VersionInfo, damaged: DamagedVersion) -> _Found | None:
        with self._store.open_session(row.uri, row.version) as reader:
            tokens = token_array(reader.tokens())
            return _look(reader, tokens, self._broken(reader, damaged))

    def _broken(self, reader: BundleReader, damaged: DamagedVersion) -> list[BlockEntry]:
        """The blocks of a version that were found damaged, and still are. Raises StoreError if one could not be read,
        which proves nothing."""
        lacking, broken = set(damaged.blocks), []
        for entry in reader.entries:
            if entry.id in lacking:
                self._require_going_on()
                if not _is_sound(reader, entry):
                    broken.append(entry)
        return broken

    async def _heal_ledger(self, row: VersionInfo, found: _Found) -> Action:
        """Move the damaged part into the ledger behind it; the next use computes it."""
        draft = await self._versions.threads.on_io(lambda: self._with_fewer_blocks(row, found))
        receipt = await self._versions.write(draft)
        self._versions.tell_ledger(receipt, CorruptBlock.code)
        await self._lead_on(row.uri, row, receipt, receipt.block_tokens)
        self.healed += 1
        _LOG.warning("%s was damaged before its ledger, and has more of it in version %d", row.uri, receipt.version)
        return _healing(row.uri, receipt.version, "Its next use computes the damaged part again.")

    def _with_fewer_blocks(self, row: VersionInfo, found: _Found) -> VersionDraft:
        with self._store.open_session(row.uri, row.version) as reader:
            return with_fewer_blocks(reader, found.first_broken, found.records)

    async def _compute(
        self, row: VersionInfo, found: _Found, last: BlockEntry, model: LoadedModel
    ) -> tuple[Receipt, Recomputed]:
        """Write a new version of a sleeping session, with the damaged part computed again."""
        reader = await self._versions.threads.on_io(lambda: self._store.open_session(row.uri, row.version))
        try:
            require_same(reader.manifest.identity, model.identity, model=model.name)
            end = await self._engine.call(lambda: read_checkpoint(reader, last, model.layout))
            start = found.start(end.passes, by_token=model.layout.by_token)
            state = await self._state_at(start, row, reader, model)
            same = await self._engine.run(self._unless_stopping(read_again(model, state, found.tokens, end)))
            session = Session.woken(row.uri, model, state, reader.receipt(), reader.manifest.session, start)
            terms = Terms(may_wait=True, covers=False, branch=tree_in(reader.manifest.session))
        finally:
            reader.close()
        again = Recomputed(row.version, start, len(found.tokens) - start, same)
        session.provenance = replace(session.provenance, recomputed=again)
        session.unchanged_tokens, session.dirty = start, True
        receipt = await self._versions.sleep(session, ignore, cause="heal", terms=terms)
        return receipt, again

    async def _state_at(self, start: int, row: VersionInfo, reader: BundleReader, model: LoadedModel) -> LiveState:
        """The session's state after `start` tokens."""
        if start:
            order = WakeOrder(row.version, start, cause="heal")
            return (await self._versions.waking.wake(row.uri, order, model, ignore)).session.state
        return await self._versions.waking.begin(model, initial_key)


def _healing(uri: SessionUri, version: int, sentence: str, *, is_healed: bool = True) -> Action:
    return Action("heal" if is_healed else "keep", "", str(uri), version, 0, sentence)


def _look(reader: BundleReader, tokens: Sequence[int], broken: Sequence[BlockEntry]) -> _Found | None:
    """What is to be done for a version with these tokens and broken blocks; None if it has no such blocks.

    Raises:
        NotRecomputable: the record at its end is damaged, or it is lossy.
    """
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


def _is_sound(reader: BundleReader, entry: BlockEntry) -> bool:
    """Whether a pack has a block as it was written. Raises StoreError if it could not be read."""
    try:
        with reader.holding(entry, checked=True):
            return True
    except Corruption:
        return False
