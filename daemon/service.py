"""The daemon's service: open it, send it requests, close it.

The verbs are in `verbs/`, its parts in `parts/`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import TorporError
from ..memvid.disk.budget import Budget
from ..memvid.disk.location import default_store_path
from ..memvid.disk.paths import undoing
from ..memvid.disk.room import room_at, short_sentence
from ..memvid.store import Store
from ..memvid.units import format_bytes, format_plural
from ..memvid.uri import SessionUri, parse_reference, session_in
from ..snapshot.digests import DigestCache, default_cache_path
from .api.process import HttpInfo, ShutdownResult
from .api.records import Request
from .api.verb import Awaiting, R, Verb
from .api.verbs import Verbs
from .branches.views import LogitsView
from .config.configuring import ConfigFile
from .config.settings import Settings
from .engine.decoding import Decoder
from .engine.engine import Engine
from .events.bus import Bus, Resumable, Subscription, Wanted
from .events.figures import Figures
from .memory.loading import Loader, load_first
from .memory.model_registry import ModelChoice, Shelf
from .models.models import DEMO_MODEL_FOLDER, DEMO_MODEL_NAME
from .options.serve_options import ServeOptions
from .parts.parts import Parts
from .residency.stopping import Keeping
from .tasks.cancellation import in_any_case, to_the_end
from .tasks.door import LastSleep, Phase
from .upkeep.scrubbing import ScrubPolicy
from .verbs import HANDLERS

if TYPE_CHECKING:
    from ..memvid.remote.sessions import RemoteSessions

Found = TypeVar("Found")


class Service(Verbs, Awaiting):
    """The sessions of one store on the models of one process. Made by `open`, ended by `close`."""

    def __init__(self, parts: Parts, changed_unseen: Sequence[str]) -> None:
        """changed_unseen: the model files that had changed unseen."""
        self._parts = parts
        self._changed_unseen = tuple(changed_unseen)
        self._preparing: asyncio.Task[ShutdownResult] | None = None
        self._keeping: asyncio.Task[Keeping] | None = None
        self._closing: asyncio.Task[ShutdownResult] | None = None

    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Carry out a request. Raises TorporError as the verb's handler."""
        handler = HANDLERS[type(request)]
        with contextlib.ExitStack() as around:
            if handler.told:
                session = getattr(request, "session", None)
                around.enter_context(self._parts.bus.request(verb.name, lambda: self.about(session)))
            if handler.queued:
                around.enter_context(self._parts.queue.admitted(getattr(request, "priority", "normal")))
            return cast("R", await handler.carry_out(self._parts, request))

    @classmethod
    async def open(
        cls,
        options: ServeOptions | None = None,
        *,
        models: Mapping[str, str | ModelChoice] | None = None,
        digest_cache: Path | None = None,
        scrub: ScrubPolicy | None = None,
        bus: Bus | None = None,
    ) -> Service:
        """Take the store (by default the user's), start the engine, and load the first models. models: by name, how
        each is served, or only its folder or hub name; the first is the default. Without models, the bundled demo model
        is served as "demo". The files of models that load later are checked.

        options: None means the defaults. With `check_models`, `warnings` names the model files that had changed unseen.
        scrub: replaces that of the options. bus: gets the events, also of the opening; a cancellation while a model is
        downloaded ends that.

        A sleep that exceeds a budget is refused, and its session stays awake. Only `keep_free` refuses a sleep of
        `close`.

        Raises:
            StoreLocked: another daemon has the store.
            ModelUnavailable, ModelFilesMissing: a model cannot be loaded, or its files are no model; the store is
                released again. The errors of `load_model` for an adapter, likewise.
            MemoryBudgetExceeded: the models alone take more than the budget.
            InvalidRemote, RemoteUnfit, RemoteRefused, RemoteKeyWrong, CorruptObject: the remote cannot be used. One
                that does not answer is no error: it is tried before it is used.
        """
        options = options or ServeOptions()
        sources = models or {DEMO_MODEL_NAME: str(DEMO_MODEL_FOLDER)}
        shelf = Shelf({name: ModelChoice(each) if isinstance(each, str) else each for name, each in sources.items()})
        digests = DigestCache(digest_cache or default_cache_path(), full=options.check_models)
        bus = bus or Bus()
        loader = Loader(digests, bus)
        store = await in_any_case(asyncio.to_thread(lambda: _open_store(options)))
        remote: RemoteSessions | None = None
        engine = Engine(Decoder(options.batch, bus.from_any_thread()))
        try:
            if options.remote is not None:
                remote = await in_any_case(asyncio.to_thread(lambda: _open_remote(store, options)))
            await load_first(shelf, loader, options.memory_budget)
            if scrub is None and options.scrub_rate:
                scrub = ScrubPolicy(options.scrub_rate)
            parts = Parts(store, engine, shelf, loader, bus, options, scrub, remote)
            await in_any_case(parts.start())
        except BaseException:
            loader.close()
            await asyncio.to_thread(engine.stop)
            store.close()
            raise
        return cls(parts, digests.changed_unseen)

    async def with_logits(self, branch: int, look: Callable[[LogitsView], Found]) -> Found:
        """What a function finds in the logits of a branch, which it reads where they lie; meanwhile the branch does not
        go on. For who has the service in his own process: `produce` gives logits to all.

        Raises:
            BranchNotFound, EmptyContext, GenerationFailed: as `produce`.
            TypeError: the function is, or gives, a coroutine or a generator, so it would look later.
            StaleLogits: the function uses a view that it kept from before.
        """
        self._parts.door.require_open()
        async with self._parts.sessions.forest.working([branch]) as (found,):
            return found.with_logits(look)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Faults found at the opening, a sentence each; show them to a person before the faulty data is needed."""
        disk = self._parts.store.disk
        opening = disk.opening
        found = [finding.message for finding in (*opening.unreadable, *opening.journal)]
        if opening.index_rebuilt is not None and opening.rows_added:
            versions = format_plural(opening.rows_added, "manifest")
            found.append(f"The index was made anew from {versions}: {opening.index_rebuilt}.")
        room = room_at(disk.path)
        if room is not None and room.is_short(self._parts.options.keep_free):
            found.append(short_sentence(disk.path, room))
        remote = self._parts.store.remote
        if remote is None and (why := disk.why_alone()) is not None:
            found.append(why)
        if remote is not None and remote.fault is not None:
            found.append(f"{remote.fault.message} What the remote has is not used here before it answers.")
        found += [
            f"{each} has other bytes than when it was last read, but the same size and times. Its present bytes now "
            "identify the model; sessions that slept before are refused unless the file is put back."
            for each in self._changed_unseen
        ]
        return tuple(found)

    @property
    def figures(self) -> Figures:
        """The figures of its events and requests since it began."""
        return self._parts.bus.figures

    @property
    def budget(self) -> str:
        """What the store may hold, as a sentence."""
        most = self._parts.store.disk.budget.max_store_bytes
        return f"the store may hold {'as much as the disk' if most is None else format_bytes(most)} (--store-budget)"

    async def prepare_close(self) -> ShutdownResult:
        """Put every changed session to sleep, by the rules of `close`; all of them stay in memory.

        If all sessions sleep, the service takes no more work, so the `close` that follows loses nothing. If not, the
        report names the others with the reasons, and the service goes on. Meanwhile it refuses requests for sessions
        and waits for running ones: callers cancel those first. Runs to its end, as `close`. After a refused stop the
        next one has its whole time again.
        """
        if self._closing is not None:
            return await self.close()
        if self._keeping is not None:
            return (await to_the_end(self._keeping)).report()
        if self._preparing is None:
            order = self._begin_to_stop(Phase.SLEEPING)
            self._preparing = asyncio.ensure_future(self._prepare_close(order))
        return await to_the_end(self._preparing)

    async def _prepare_close(self, order: LastSleep) -> ShutdownResult:
        keeping = Keeping()
        await self._parts.sessions.last_sleeps.keep_all(order, keeping, give_up=False)
        if keeping.failed and self._parts.door.phase is Phase.SLEEPING:  # else another caller ends the daemon meanwhile
            self._preparing = None
            self._parts.door.go_on()
        return keeping.report()

    def _begin_to_stop(self, phase: Phase) -> LastSleep:
        """As `Door.begin_to_stop`, within the time that an option gives."""
        return self._parts.door.begin_to_stop(phase, self._parts.options.stop_within)

    async def begin_close(self) -> None:
        """The first half of `close`, for callers that wait for requests before the second half. The time of the stop
        begins, no new work is taken, and every changed session is put to sleep while running work ends."""
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._begin_close(self._begin_to_stop(Phase.STOPPING)))
        await to_the_end(self._keeping)

    async def _begin_close(self, order: LastSleep) -> Keeping:
        keeping = Keeping.after(await self._preparing) if self._preparing is not None else Keeping()
        await self._parts.sessions.last_sleeps.keep_all(order, keeping, give_up=True)
        return keeping

    async def close(self) -> ShutdownResult:
        """Take no more work, put every changed session to sleep, and let the store go.

        Callers cancel running requests first. The report names each session that cannot be kept, and why. Runs to its
        end even if the caller is cancelled; a second call waits for the same end and gets the same report. The budgets
        of the store's size and of the day do not refuse a last sleep; `keep_free` may.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._begin_to_stop(Phase.CLOSED)))
        return await to_the_end(self._closing)

    async def _close(self, order: LastSleep) -> ShutdownResult:
        await self.begin_close()
        assert self._keeping is not None
        keeping = await self._keeping
        if self._parts.config is not None:
            await self._parts.config.close()
        # running work may have ended with a new session in memory
        await self._parts.sessions.last_sleeps.keep_all(order, keeping, give_up=True)
        unsent = await self._parts.close(order)
        return replace(keeping.report(), unsent=tuple(map(str, unsent)))

    def follow(self, file: ConfigFile, settings: Settings) -> None:
        """Follow a configuration file: `reload_config` applies its changes. settings: its content at the start."""
        self._parts.follow(file, settings)

    def tell_http(self, http: HttpInfo) -> None:
        """Have `status` tell where HTTP is served."""
        self._parts.http = http

    async def reload_config(self) -> None:
        """Read the configuration file again, if there is one. A faulty file changes nothing; `status` gives the
        fault."""
        self._parts.door.require_open()
        await self._parts.reload_config()

    def about(self, name: object) -> SessionUri | None:
        """The session that a client names, existing or not; None if the text is no valid name."""
        with contextlib.suppress(TorporError):
            return parse_reference(session_in(name)) if isinstance(name, str) else None
        return None

    def is_awake(self, name: str) -> bool:
        """Whether a session is in memory."""
        return self.about(name) in self._parts.sessions.awake

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Subscription:
        """Events from now on, of these names (None: all), and of one session (which need not exist yet) or one
        namespace only. The stream ends when the daemon has put its last session to sleep. Raises UnknownEvent,
        InvalidUri, TooManySubscribers."""
        return self._parts.bus.subscribe(self._wanted(names, session, namespace))

    def resume(
        self, names: Sequence[str] | None, session: str | None, namespace: str | None, *, after: str | None
    ) -> Resumable:
        """As `subscribe`, for a reader who may come back: it goes on behind a `place` of an earlier subscription. None:
        it begins now. Raises as `subscribe`."""
        return self._parts.bus.resume(self._wanted(names, session, namespace), after)

    def _wanted(self, names: Sequence[str] | None, session: str | None, namespace: str | None) -> Wanted:
        self._parts.door.require_open()
        uri = None if session is None else parse_reference(session)
        return Wanted(None if names is None else frozenset(names), uri, namespace)


def _open_remote(store: Store, options: ServeOptions) -> RemoteSessions:
    """The remote, with the key by which it is sealed, if it is to be. Raises as `Service.open`."""
    from ..memvid.remote.remote_key import remote_key

    assert options.remote is not None
    return store.open_remote(options.remote, remote_key(options.remote_key, options.remote_key_command))


def _open_store(options: ServeOptions) -> Store:
    """The store within its budgets. Raises as `Store.open`."""
    budget = Budget(None, options.daily_write_budget, options.keep_free)
    store = Store.open(options.store or default_store_path(), writable=True, budget=budget)
    if options.store_budget != 0:
        with undoing(store.close):
            store.hold_to_budget(options.store_budget)
    return store
