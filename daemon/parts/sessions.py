"""The sessions: in memory, by their words, as trees of branches; and what several verbs do with one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...memvid.access.sessions import Named
from ...memvid.answers import DeleteReport, VersionInfo
from ...memvid.errors import RemoteUnreachable, SessionNotFound
from ...memvid.format.manifest import require_session_map
from ...memvid.uri import SessionUri, names_version, parse_reference, session_in
from ..api.creating import CreateRequest
from ..api.events import OnEvent, ignore
from ..api.sampling import Sampling
from ..api.session import Look
from ..branches.stepping import Stepping
from ..branches.trees import Forest
from ..chat.conversing import Conversing
from ..chat.folds import Folds
from ..chat.prompt_io import Exchanges
from ..chat.recalling import Recalling
from ..disk.maintenance import with_bounded_problems
from ..engine.sampler import initial_key
from ..errors import SessionAwake
from ..events.accounts import timed
from ..events.bus import Bus
from ..events.events import SessionCreated, SessionDeleted
from ..memory.line import Use
from ..models.chat_template import Root
from ..options.current import CurrentOptions
from ..prefixes.heads import Heads
from ..prefixes.prefix_history import Reasons
from ..prefixes.request_diary import RequestDiary
from ..prefixes.reuse import PrefixReuse
from ..residency import listing
from ..residency.awake import AwakeSessions
from ..residency.labels import Labels
from ..residency.listing import Roll
from ..residency.planning import Planning
from ..residency.residency import Residency
from ..residency.stopping import LastSleeps
from ..sessions.chats import Chat
from ..sessions.sessions import Session, Turns
from ..tasks.cancellation import LeftMidway, to_the_end
from ..tasks.door import Door
from ..upkeep.writing_behind import WritingBehind
from .models import ModelParts
from .store import StoreParts

if TYPE_CHECKING:
    from ..disk.remote import Taken


class SessionParts:
    """All sessions of the store, and all that is known of them in memory."""

    def __init__(
        self,
        store: StoreParts,
        models: ModelParts,
        awake: AwakeSessions,
        turns: Turns,
        door: Door,
        bus: Bus,
        options: CurrentOptions,
    ) -> None:
        self._store, self._models, self._door, self._bus = store, models, door, bus
        self._hits: Counter[SessionUri] = Counter()
        disk, versions, threads = store.disk, store.versions, store.versions.threads
        engine, encoder, shelf = models.engine, models.encoder, models.shelf
        self.awake, self.turns = awake, turns
        standing, putting_away = store.standing, store.putting_away
        self.residency = residency = Residency(
            disk,
            versions,
            store.journal,
            awake,
            turns,
            standing,
            putting_away,
            models.memory,
            models.loading,
            door,
            bus,
            store.remote,
        )
        self.last_sleeps = LastSleeps(versions, putting_away, awake, turns, models.memory)
        self.planning = Planning(versions, residency, shelf)
        self.reuse = PrefixReuse(disk, engine, versions, bus, self._hits, options.now.prefix_reuse)
        self.heads = Heads(disk, threads)
        if store.remote is not None:
            store.remote.on_pulled = self.heads.learn
        self.reasons = Reasons(encoder, self.reuse, self.awake.get)
        self._diary = RequestDiary(disk.diary, self.reasons, bus, store.writing_diary.note)
        self.recalling = Recalling(disk, threads, encoder, residency, store.journal)
        self.conversing = Conversing(encoder, residency, engine, bus)
        self.exchanges = Exchanges(engine, residency, self.reuse, self.reasons, bus, store.journal)
        self.folds = Folds(disk, versions, residency, encoder, self.conversing, self.exchanges, self.forget_words, bus)
        self.forest, self.stepping = Forest(engine, models.memory, models.loading), Stepping(engine)
        self.roll = Roll(disk, self.awake, store.remote)
        self.labels = Labels(residency, self._hits, self.roll, self.delete_session)
        self.writing_behind = WritingBehind(
            store.upkeep_loop, disk, engine, versions, store.room, awake, store.journal, door, bus
        )

    def start(self) -> None:
        """Begin to learn what the stored sessions begin with."""
        self.reuse.learn_stored()
        self.heads.learn_stored()

    async def close(self) -> None:
        """Forget all sessions and branches in memory."""
        await self.forest.close()
        await self.reuse.close()
        await self.heads.close()
        self.awake.clear()

    # --- names

    def resolve(self, name: str) -> SessionUri:
        """The session that a client names. Raises SessionNotFound, AmbiguousName."""
        self._door.require_open()
        with self._telling_of_the_remote():
            return self._store.disk.resolve(name, also=self.awake)

    async def named(self, session: str, *, look: bool = False) -> Named:
        """What a client names: a session, a version of it, or a place within. look, and what it raises: as
        `Sessions.named`."""
        self._door.require_open()
        with self._telling_of_the_remote():
            if not names_version(session):  # nothing is awaited: requests for a session take their turns as they come
                return self._store.disk.named(session, self.awake)
            awake = frozenset(self.awake)
            return await self._store.on_io(lambda: self._store.disk.named(session, awake, look=look))

    @contextlib.contextmanager
    def _telling_of_the_remote(self) -> Iterator[None]:
        """A name that is not here may be one of the remote, spelled otherwise."""
        try:
            yield
        except SessionNotFound as error:
            if self._store.remote is None or "version" in error.details:
                raise
            there = "What the remote has, `torpor ls --remote` lists."
            raise SessionNotFound(f"{error.message} {there}", **error.details) from error

    async def named_by_number(self, session: str, *, look: bool = False) -> Named:
        """As `named`, for what goes on by the version's number. Raises AmbiguousVersion: that means another version."""
        named = await self.named(session, look=look)
        if named.row is not None:
            self._store.disk.require_numbered(named.row)
        return named

    async def bring_if_missing(self, session: str, *, asking: OnEvent | None = None) -> Taken | None:
        """Let a session that only the remote has be one of this store. asking, what it gives and raises: as of
        `Residency.hold`; and InvalidUri."""
        if self._store.remote is None or self.is_here(session):
            return None
        uri = parse_reference(session_in(session))
        head = await self._store.remote.head(uri)
        if head is None or (head.is_empty and head.awake_at is None):
            return None
        async with self.residency.turn(uri):
            return await self.residency.hold(uri, asking=asking)

    def is_here(self, session: str) -> bool:
        """Whether this store has a session, or may have it: its name means several."""
        try:
            self.resolve(session_in(session))
        except SessionNotFound:
            return False
        return True

    async def stored(self, session: str) -> VersionInfo:
        """The version that a client names; of a session its newest. Raises SessionNotFound: also if it is awake and has
        none yet. AmbiguousVersion, InvalidUri."""
        named = (await self.named(session, look=True)).require_whole()
        uri, disk = named.uri, self._store.disk
        if named.row is None and uri in self.awake and disk.find_session(uri) is None:
            raise SessionNotFound(
                f"{uri} is awake, and no version of it is stored yet; `torpor save {uri}` makes one.", session=str(uri)
            )
        return named.row or self._store.standing.require_row(uri)

    def is_free(self, uri: SessionUri) -> bool:
        """Whether a new session may have a name: no session has it, and no request holds it."""
        return self._store.standing.is_free(uri) and not self.turns.users(uri)

    # --- what happens in a turn

    def claim(self, uri: SessionUri) -> Use:
        """A place in the order of requests, for one that holds no session."""
        return Use(uri, next(self._models.memory.numbers))

    @contextlib.asynccontextmanager
    async def woken(
        self,
        session: str,
        emit: OnEvent,
        *,
        create: bool,
        model: str | None = None,
        labels: Sequence[str] = (),
        durable: bool = False,
        unnamed: bool = True,
    ) -> AsyncIterator[tuple[Use, Session]]:
        """Hold a session alone, awake; a new one where there is none and `create` says so. What has changed in it is
        durable at the end. model, labels: of a new one; the default model if None. durable: whether that also holds
        where neither the option nor the session wants a journal of turns. unnamed: as of `CreateRequest`.

        Raises:
            StoreError: it is not durable, though the session has it in memory.
        """
        if create:
            self._door.require_open()
            uri = parse_reference(session)
            held = self.residency.woken(
                uri,
                emit,
                lambda use: self.begin(use, uri, CreateRequest(session, model=model, labels=labels, unnamed=unnamed)),
            )
        else:
            with contextlib.suppress(RemoteUnreachable):  # who asks for a new one then gets it, as far as is known here
                await self.bring_if_missing(session)
            held = self.residency.woken(uri := self.resolve(session), emit)
        async with held as (use, live):
            try:
                with self.reasons.of_what_reads(uri):
                    yield use, live
            except LeftMidway:
                await self.acknowledge(uri, unnamed=unnamed)
                raise
            await self.acknowledge(uri, durable=durable, unnamed=unnamed)

    async def begin(self, use: Use, uri: SessionUri, wanted: CreateRequest) -> Session:
        """Make a new session; the caller holds its turn, and has seen that there is none."""
        model, settings = self._models.place_for(wanted.model).name, wanted.sampling or Sampling()
        async with self._models.loading.using(model, use) as chosen:
            settings.require_known(chosen.layout.vocabulary)
            state = await self._store.waking.begin(chosen, initial_key)
            root = Root(tuple(wanted.tools), wanted.template_arguments or {})
            created = Session(
                uri,
                chosen,
                state,
                settings,
                labels=tuple(wanted.labels),
                chat=Chat(wanted.system, root),
                durability=wanted.durability,
                unnamed=wanted.unnamed,
            )
            require_session_map(created.to_map())
            self.awake.admit(created)
            self._bus.publish(SessionCreated(uri, chosen.name))
            return created

    async def acknowledge(self, uri: SessionUri, *, durable: bool = False, unnamed: bool = True) -> None:
        """Make what has changed in an awake session durable; as of `woken`, for a request that holds it."""
        live = self.awake.get(uri)
        if live is not None:
            live.unnamed = live.unnamed and unnamed
            try:
                with timed("durable_seconds"):
                    await self._store.journal.acknowledge(live)
                    if live.acknowledged is not None:
                        self.writing_behind.note(uri)
                    if durable and live.dirty and not self._store.journal.keeps(live):
                        await self.keep_whole(live)
            finally:
                if not live.is_mere_look and not live.state.is_lost:  # else what is durable is what was said
                    self.heads.note(live)

    async def keep_whole(self, live: Session) -> None:
        """Write what has changed in an awake session as a version of its own. Raises as a sleep."""
        await to_the_end(self._store.putting_away.keep(live, ignore, "journal"))

    # --- looks

    def look(self, live: Session) -> Look | None:
        """The position of a session that is only looked at."""
        return listing.look_of(live, self._store.disk.find_session(live.uri))

    def is_at_look(self, uri: SessionUri) -> bool:
        """Whether the next use of a session finds it at a look, and not at its end."""
        live = self.awake.get(uri)
        return live is not None and live.is_mere_look

    # --- ends

    async def delete_session(self, uri: SessionUri, *, everywhere: bool = True) -> DeleteReport:
        """Remove a session; the caller holds its turn. everywhere: also from the remote, which has it alone, perhaps.
        Raises SessionNotFound."""
        disk, report = self._store.disk, DeleteReport(str(uri), 0, 0)
        remote = self._store.remote if everywhere else None
        is_here = disk.can_be_deleted(uri) or uri in self.awake
        if not is_here and remote is None:
            self._store.standing.require_row(uri)  # raises
        await self.writing_behind.let_go(uri)
        self.tell_no_more(uri)
        there = None if remote is None else await remote.drop(uri)
        keys, kept = ((), ()) if there is None else (there.keys, there.problems)
        if not (is_here or keys or kept):
            self._store.standing.require_row(uri)  # raises
        if not is_here and kept and kept[0].code == SessionNotFound.code:
            raise SessionNotFound(kept[0].message, session=str(uri), suggestions=[])
        if disk.can_be_deleted(uri):
            report = await self._store.on_writer(lambda: disk.delete_session(uri))
        # Only now: a session that cannot be removed from the disk must not be lost from memory.
        self.forget(uri)
        self._bus.publish(SessionDeleted(uri, report.versions_deleted, report.bytes_freed))
        problems = (*report.problems, *kept)
        return with_bounded_problems(replace(report, problems=problems, remote_objects=len(keys)))

    async def delete_version(self, uri: SessionUri, bundle_id: str) -> DeleteReport:
        """Delete one version from the disk. Raises SessionNotFound. SessionAwake: the session is awake at it."""
        live, row = self.awake.get(uri), self._store.standing.require_row(uri, bundle_id)
        if live is not None and live.durable is not None and live.durable.bundle_id == row.bundle_id:
            raise SessionAwake(
                f"{uri} is awake, and version {row.version} is its last one; put it to sleep first, or delete it "
                "whole.",
                session=str(uri),
            )
        await self.writing_behind.let_go(uri)
        remote = self._store.remote
        kept = () if remote is None else await remote.drop_version(uri, bundle_id)
        report = await self._store.on_writer(lambda: self._store.disk.delete_version(uri, bundle_id))
        if live is None and not self._store.disk.can_be_deleted(uri):
            self.forget(uri)  # it was the last one
        self._bus.publish(SessionDeleted(uri, report.versions_deleted, report.bytes_freed))
        return with_bounded_problems(replace(report, problems=(*report.problems, *kept)))

    def forget(self, uri: SessionUri) -> None:
        """Free the memory of a session that is not on the disk any more, and forget its words."""
        self.awake.drop(uri)
        if self._store.remote is not None:
            self._store.remote.forget(uri)
        self.forget_words(uri)

    async def learn_words(self, uri: SessionUri) -> None:
        """Let transcripts find a session that was made of another one, or came from elsewhere."""
        live = self.awake.get(uri)
        if live is not None:
            self.heads.note(live)
        else:
            await self.heads.learn(uri)

    def tell_no_more(self, uri: SessionUri) -> None:
        """A session is about to go: the diary gets no more of what requests under way have of it."""
        self._diary.forget(uri)

    def forget_words(self, uri: SessionUri) -> None:
        """Forget all tokens and text of a deleted session, and let the diary do so, all in one step of the loop: what
        ends behind it cannot know the session any more."""
        self._diary.end(uri)
        self.reuse.forget(uri)
        self.heads.forget(uri)
        self.reasons.forget(uri)
        self._hits.pop(uri, None)
