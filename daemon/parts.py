"""The parts of a service, and the functions that its verbs share: names, turns, new sessions.

Owns only the wiring. The verbs are in `verbs/`, start and stop in `service.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from ..memvid.answers import DeleteReport
from ..memvid.folder.retention import Retention
from ..memvid.format.manifest import require_session_map
from ..memvid.format.records import IndexRow
from ..memvid.store import Store
from ..memvid.uri import VERSION_MARK, SessionUri, parse_reference
from .api.creating import CreateRequest
from .api.events import OnEvent, ignore
from .api.process import ShutdownResult, meant_by
from .api.sampling import Sampling
from .api.session import Look
from .branches.stepping import Stepping
from .branches.trees import Forest
from .chat.conversing import Conversing
from .chat.folds import Folds
from .chat.prompt_io import Exchanges
from .chat.recalling import Recalling
from .config.configuring import Configuring
from .engine.admission import Queue
from .engine.buffers import Buffers
from .engine.engine import Engine
from .engine.sampler import initial_key
from .errors import ServiceClosed, SessionAwake
from .events.bus import Bus
from .events.events import SessionCreated, SessionDeleted
from .memory.line import Use
from .memory.loading import Loader
from .memory.model_registry import Place, Shelf
from .models.chat_template import Root
from .options.serve_options import ServeOptions
from .prefixes.heads import Heads
from .prefixes.prefix_history import Reasons
from .prefixes.reuse import PrefixReuse
from .residency import listing
from .residency.labels import Labels
from .residency.listing import Roll
from .residency.planning import Planning
from .residency.residency import Residency
from .residency.stopping import Keeping
from .sessions.encoding import Encoder
from .sessions.sessions import Session
from .sleep.disk_space import Way
from .sleep.forking import Forking
from .sleep.hibernation import Hibernation
from .sleep.maintenance import Maintenance, with_bounded_problems
from .sleep.orders import LastSleep
from .sleep.quantising import Quantising
from .sleep.turn_journal import TurnJournal
from .tasks.cancellation import LeftMidway, to_the_end
from .upkeep.analyst import Analyst
from .upkeep.healing import Healing
from .upkeep.retaining import Retaining
from .upkeep.scrubbing import Scrub
from .upkeep.writing_behind import WritingBehind


class Parts:
    """The parts of one service, over one store and the models of one process. scrub: where it is on."""

    scrub: Scrub | None = None

    def __init__(
        self,
        store: Store,
        engine: Engine,
        shelf: Shelf,
        loader: Loader,
        bus: Bus,
        options: ServeOptions,
        changed_unseen: Sequence[str] = (),
    ) -> None:
        self._options = options
        self.store, self.engine, self.shelf, self.loader, self.bus = store, engine, shelf, loader, bus
        self.last_sleep: LastSleep | None = None
        self.changed_unseen = tuple(changed_unseen)
        self.queue = Queue(options.max_waiting)
        way = Way()
        self.hibernation = Hibernation(store, engine, way, self.bus)
        self.maintenance = Maintenance(store, way)
        self.retaining = Retaining(
            store, self.maintenance, bus, lambda: Retention(self.options.keep_last, self.options.keep_days)
        )
        self.hibernation.on_version = self.retaining.note
        self.analyst = Analyst(store)
        self.forking = Forking(store, self.hibernation)
        self.quantising = Quantising(store, engine, self.hibernation)
        self.config: Configuring | None = None
        self.hits: Counter[SessionUri] = Counter()
        self.reuse = PrefixReuse(store, engine, self.hibernation, self.bus, self.hits, options.prefix_reuse)
        self.encoder = Encoder()
        shelf.on_drop = self.encoder.let_go
        self.buffers = Buffers(engine)
        threads = self.hibernation.threads
        self.journal = TurnJournal(store, threads, lambda: self.options.durability, self.keep_whole)
        self.residency = Residency(
            store,
            self.hibernation,
            self.journal,
            shelf,
            loader,
            self.require_working,
            self.buffers,
            self.bus,
            options,
        )
        self.planning = Planning(self.hibernation, self.residency, shelf)
        self.reasons = Reasons(self.encoder, self.reuse, self.residency.awake.get)
        self.heads = Heads(store, self.hibernation.threads)
        self.recalling = Recalling(store, threads, self.encoder, self.residency, self.journal)
        self.conversing = Conversing(self.encoder, self.residency, engine, bus)
        self.exchanges = Exchanges(engine, self.residency, self.reuse, self.reasons, bus, self.journal)
        hibernation, residency, encoder = self.hibernation, self.residency, self.encoder
        self.folds = Folds(
            store, hibernation, residency, encoder, self.conversing, self.exchanges, self.forget_words, bus
        )
        self.healing = Healing(store, engine, self.hibernation, self.maintenance, self.residency, self.bus)
        self.writing_behind = WritingBehind(store, engine, self.hibernation, self.residency, bus)
        self.forest, self.stepping = Forest(engine, residency.memory, residency.models), Stepping(engine)
        self.roll = Roll(store, self.residency.awake)
        self.labels = Labels(self.residency, self.hits, self.roll, self.delete_session)
        self.started = time.monotonic()
        self.preparing: asyncio.Task[ShutdownResult] | None = None
        self.keeping: asyncio.Task[Keeping] | None = None
        self.closing: asyncio.Task[ShutdownResult] | None = None

    @property
    def options(self) -> ServeOptions:
        return self._options if self.config is None else self.config.options

    def place_for(self, name: str | None) -> Place:
        """The place of the model that a client names, maybe by an alias; None means the default. Raises UnknownModel:
        no model has that name."""
        if name is not None and name not in self.shelf:
            name = meant_by(name, self.options.aliases)
        return self.shelf.place(name)

    async def begin(self, use: Use, uri: SessionUri, wanted: CreateRequest) -> Session:
        """Make a new session; the caller holds its turn."""
        model, settings = self.place_for(wanted.model).name, wanted.sampling or Sampling()
        self.residency.standing.require_new(uri)
        async with self.residency.models.using(model, use) as chosen:
            state = await self.hibernation.waking.begin(chosen, initial_key)
            root = Root(tuple(wanted.tools), wanted.template_arguments or {})
            created = Session(
                uri,
                chosen,
                state,
                settings,
                labels=tuple(wanted.labels),
                system=wanted.system,
                root=root,
                durability=wanted.durability,
            )
            require_session_map(created.to_map())
            self.residency.awake.admit(created)
            self.bus.publish(SessionCreated(uri, chosen.name))
            return created

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
    ) -> AsyncIterator[tuple[Use, Session]]:
        """Hold a session alone, awake; a new one where there is none and `create` says so. What has changed in it is
        durable at the end. model, labels: of a new one; the default model if None. durable: whether that also holds
        where neither the option nor the session wants a journal of turns.

        Raises:
            StoreError: it is not durable, though the session has it in memory.
        """
        if create:
            self.require_open()
            uri = parse_reference(session)
            held = self.residency.woken(
                uri, emit, lambda use: self.begin(use, uri, CreateRequest(session, model=model, labels=labels))
            )
        else:
            held = self.residency.woken(uri := self.resolve(session), emit)
        async with held as (use, live):
            try:
                with self.reasons.of_what_reads(uri):
                    yield use, live
            except LeftMidway:
                await self.acknowledge(uri)
                raise
            await self.acknowledge(uri, durable=durable)

    async def acknowledge(self, uri: SessionUri, *, durable: bool = False) -> None:
        """Make what has changed in an awake session durable; as of `woken`, for a request that holds it."""
        live = self.residency.awake.get(uri)
        if live is not None:
            try:
                await self.journal.acknowledge(live)
                if durable and live.dirty and not self.journal.keeps(live):
                    await self.keep_whole(live)
            finally:
                if not live.is_mere_look:  # else its newest version is what was said
                    self.heads.note(live)

    async def keep_whole(self, live: Session) -> None:
        """Write what has changed in an awake session as a version of its own. Raises as a sleep."""
        await to_the_end(self.residency.putting_away.keep(live, ignore, "journal"))

    def look(self, live: Session) -> Look | None:
        """The position of a session that is only looked at."""
        return listing.look_of(live, self.store.find_session(live.uri))

    def is_at_look(self, uri: SessionUri) -> bool:
        """Whether the next use of a session finds it at a look, and not at its end."""
        live = self.residency.awake.get(uri)
        return live is not None and live.is_mere_look

    def resolve(self, name: str) -> SessionUri:
        self.require_open()
        return self.store.resolve(name, also=self.residency.awake)

    async def version_of(self, session: str, version: int | None) -> tuple[SessionUri, int | None]:
        """The session, and its version: the one behind the `@` of its name, or `version`."""
        if VERSION_MARK not in session:
            return self.resolve(session), version
        row = await self.version_numbered(session)
        return self.resolve(str(row.uri)), row.version

    async def version_named(self, session: str) -> IndexRow:
        """The version behind the `@` of a name. Raises AmbiguousVersion."""
        self.require_open()
        return await self.hibernation.threads.on_io(lambda: self.store.resolve_version(session))

    async def version_numbered(self, session: str) -> IndexRow:
        """As `version_named`, for what goes on by its number. Raises AmbiguousVersion: that means another version."""
        return self.store.require_numbered(await self.version_named(session))

    async def delete_session(self, uri: SessionUri) -> DeleteReport:
        await self.writing_behind.let_go(uri)
        report = DeleteReport(str(uri), 0, 0)
        if self.store.can_be_deleted(uri):
            report = await self.hibernation.threads.on_writer(lambda: self.store.delete_session(uri))
        elif uri not in self.residency.awake:
            self.residency.standing.require_row(uri)  # raises
        # Only now: a session that cannot be removed from the disk must not be lost from memory.
        self.residency.awake.drop(uri)
        self.forget_words(uri)
        self.bus.publish(SessionDeleted(uri, report.versions_deleted, report.bytes_freed))
        return with_bounded_problems(report)

    async def delete_version(self, uri: SessionUri, bundle_id: bytes) -> DeleteReport:
        """Delete one version from the disk. Raises SessionNotFound. SessionAwake: the session is awake at it."""
        live, row = self.residency.awake.get(uri), self.residency.standing.require_row(uri, bundle_id)
        if live is not None and live.durable is not None and live.durable.bundle_id == row.bundle_id:
            raise SessionAwake(
                f"{uri} is awake, and version {row.version} is its last one; put it to sleep first, or delete it "
                "whole.",
                session=str(uri),
            )
        await self.writing_behind.let_go(uri)
        report = await self.hibernation.threads.on_writer(lambda: self.store.delete_version(uri, bundle_id))
        self.bus.publish(SessionDeleted(uri, report.versions_deleted, report.bytes_freed))
        return with_bounded_problems(report)

    async def learn_words(self, uri: SessionUri) -> None:
        """Let transcripts find a session that was made of another one, or came from elsewhere."""
        live = self.residency.awake.get(uri)
        if live is not None:
            self.heads.note(live)
        else:
            await self.heads.learn(uri)

    def forget_words(self, uri: SessionUri) -> None:
        """Forget all tokens and text of a deleted session."""
        self.reuse.forget(uri)
        self.heads.forget(uri)
        self.reasons.forget(uri)
        self.hits.pop(uri, None)

    def require_working(self) -> None:
        self.require_open()
        if self.keeping is not None:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
        if self.preparing is not None:
            raise ServiceClosed("The daemon was told to stop, and puts its sessions to sleep; try again in a moment.")

    def require_open(self) -> None:
        if self.closing is not None:
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
