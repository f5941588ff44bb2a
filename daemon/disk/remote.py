"""The remote of a daemon: the sessions that it has there, and what comes and goes.

Owns the leases, and the threads on which the remote is asked. What the remote says, and what is sent, is the store's
(`memvid/remote`).

Rules:
- A session is used while its lease counts, and answered for only then. It is taken before it wakes, with the newest
  version that the remote has; and given back once it sleeps and the remote has that.
- Nothing on this disk waits for the remote: a sleep is durable here first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ...errors import TorporError
from ...memvid.answers import Finding, VersionInfo
from ...memvid.errors import LeaseHeld, RemoteUnreachable
from ...memvid.format.journal import JournalRecord
from ...memvid.remote.collecting import Collected
from ...memvid.remote.heads import Head, key_of
from ...memvid.remote.leases import Lease
from ...memvid.remote.pulling import Pulled
from ...memvid.remote.sessions import Pushed, RemoteSessions
from ...memvid.uri import SessionUri
from ..api.events import OnEvent, ProgressEvent, ignore
from ..events.bus import Bus
from ..events.events import VersionPulled
from ..options.current import CurrentOptions
from ..tasks.cancellation import in_any_case, to_the_end
from ..tasks.door import Door
from .making_room import Room
from .remote_budget import RemoteBudget
from .remote_threads import RemoteThreads, Result

_LEAST_WAIT_S: Final = 30.0
_MOST_WAIT_S: Final = 300.0
"""For a session that was asked for: its holder answers at his next renewal, puts it to sleep, and sends it. If he has
died, it is free once his lease is over."""

_LOOK_S: Final = 0.5
"""Between two looks at a head whose holder was asked for the session."""


async def _learn_nothing(uri: SessionUri) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Taken:
    """A session that was not had and is now. has_gone_on: whether another machine has gone on with it since it was had
    last. came_from: the machine that had it before; None: this one, or none. bytes_fetched: that were written for its
    newest version. seconds: that it took."""

    has_gone_on: bool
    came_from: str | None
    bytes_fetched: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """What became of a session in the remote, or would. keys: of what was removed. packs: those that its versions
    needed, and their blocks in each. is_there: whether it has a head there. problems: why the remote has something of
    it still."""

    keys: Sequence[str] = ()
    packs: Mapping[str, Collection[bytes]] = field(default_factory=dict)
    is_there: bool = False
    problems: tuple[Finding, ...] = ()


class Remote:
    """The remote of one daemon. The event loop's. sessions: asked by `run` alone. leases: of the sessions that it has;
    one that is lost stays until its session is used again, or leaves memory. on_version, on_lease, on_turn, on_gone,
    on_drop, on_return: are told of each new version here, of each session that was taken, of each turn that is durable
    here, of each session that is here no more, that something was removed there, and of an outage that is over;
    on_request of each for which another machine was seen to ask as turns were sent; on_pulled of each session that came
    here, before it is used."""

    def __init__(
        self, sessions: RemoteSessions, lease_s: int, bus: Bus, options: CurrentOptions, room: Room, door: Door
    ) -> None:
        self.sessions = sessions
        sessions.before_block = self._require_time
        self._room = room
        self._door = door
        self._bus = bus
        self.budget = RemoteBudget(sessions.used, options)
        self._lease_s = lease_s
        self._threads = RemoteThreads(sessions.silence, lambda: self.on_return())
        self._moving = asyncio.Lock()
        self._sending: SessionUri | None = None  # of which a version is sent
        self._alone: set[SessionUri] = set()  # began here while the remote did not answer, and were not taken since
        self.leases: dict[SessionUri, Lease] = {}
        self._coming: dict[SessionUri, Lease] = {}  # of sessions whose newest version is on its way here
        self.on_version: Callable[[SessionUri], None] = ignore
        self.on_lease: Callable[[SessionUri], None] = ignore
        self.on_turn: Callable[[JournalRecord], None] = ignore
        self.on_gone: Callable[[SessionUri], None] = ignore
        self.on_drop: Callable[[], None] = lambda: None
        self.on_request: Callable[[SessionUri], None] = ignore
        self.on_return: Callable[[], None] = lambda: None
        self.on_pulled: Callable[[SessionUri], Awaitable[None]] = _learn_nothing

    @property
    def url(self) -> str:
        return self.sessions.url

    @property
    def fault(self) -> TorporError | None:
        """Of the last request, if that failed; None: it was answered."""
        return self._threads.fault

    async def run(self, work: Callable[[], Result]) -> Result:
        """Ask the remote, to the end."""
        return await self._threads.run(work)

    def _require_time(self) -> None:
        """Raises StopDeadline: the daemon stops, and its time is over. On any thread."""
        if (stop := self._door.stopping) is not None:
            stop.require_time()

    async def head(self, uri: SessionUri) -> Head | None:
        """What the remote says of a session. Raises as `Heads.read`."""
        return await self.run(lambda: self.sessions.heads.head(uri))

    async def is_behind(self, uri: SessionUri) -> bool:
        """Whether the remote lacks what the session has here. False also where both have gone on by themselves. Raises
        as `Heads.read`."""
        head = await self.head(uri)
        return await self.run(lambda: self.sessions.is_ahead(uri, head))

    def machine_of(self, uri: SessionUri) -> str | None:
        """The machine that has a session, or had it last, if that is another one, as the last look at its head told.
        Asks nobody."""
        holder = self.sessions.holders.get(uri)
        return None if holder is None or holder == self.sessions.me else holder.machine

    def head_of(self, uri: SessionUri) -> Head | None:
        """The head of a session that is held, as it was last read; None: it is not held."""
        lease = self.leases.get(uri)
        return None if lease is None else lease.head

    def has(self, uri: SessionUri) -> bool:
        """Whether a session is ours at this moment, as far as is known here."""
        return (lease := self.leases.get(uri)) is not None and lease.left_s > 0

    async def hold(self, uri: SessionUri, *, asking: OnEvent | None = None, is_new: bool = False) -> Taken | None:
        """Have a session, with the newest version of it here; None: it is had already, or begins without the remote.
        The caller has its turn. is_new: nothing of it is here, so it may begin without an answer of the remote, unless
        it was seen there, and go on in this process until there is one. asking: who has it awake is asked for it, and
        waited for; is told of the wait.

        Raises:
            LeaseHeld: another machine has it. Diverged: it has gone on here, and otherwise there.
            RemoteUnreachable: nothing tells whether another machine has it.
            As `RemoteSessions.take` and `pull`; then it is not held.
        """
        if self.has(uri):
            return None
        begun = time.monotonic()
        was_there = self.machine_of(uri) is not None or uri in self.sessions.versions_seen
        goes_without = (is_new and not was_there) or uri in self._alone
        try:
            if goes_without:
                self._threads.require_answering()
            lease = await (self._take(uri) if asking is None else self._take_asking(uri, asking))
        except RemoteUnreachable as error:
            if not goes_without:
                raise RemoteUnreachable(
                    f"{error.message} Another machine may have {uri} by now, so it is not used here meanwhile. `torpor "
                    f"wake {uri} --fork NAME` goes on here under another name.",
                    **error.details,
                ) from error
            self._alone.add(uri)
            return None
        except LeaseHeld:
            self._alone.discard(uri)  # from this answer on it is the other one's, however silent the remote is later
            raise
        self._alone.discard(uri)
        self._coming[uri], before = lease, self.leases.get(uri)
        self.on_lease(uri)
        try:
            pulled = await self.pull(lease.head, turns=True)
        except BaseException:
            await self._give_back(lease)
            raise
        finally:
            del self._coming[uri]
        self.leases[uri] = lease
        self.on_lease(uri)
        has_gone_on = pulled is not None
        if not has_gone_on and before is not None and lease.epoch != before.epoch + 1:
            after, then = lease.head, before.head  # it is here already: by a pull, or a hold that was given up
            has_gone_on = (after.newest, after.tail) != (then.newest, then.tail)
        other = None if lease.before in (None, self.sessions.me) else lease.before
        return Taken(
            has_gone_on,
            None if other is None else other.machine,
            0 if pulled is None else pulled.bytes_written,
            time.monotonic() - begun,
        )

    async def pull(self, head: Head, *, turns: bool = False) -> Pulled | None:
        """Let the newest version of a session of the remote be one of the store; None: it is already. turns, and what
        it raises: as of `RemoteSessions.pull`."""
        begun = time.monotonic()
        async with self._moving:
            pulled = await self._room.after(lambda: self.run(lambda: self.sessions.pull(head, turns=turns)))
        if pulled is not None:
            self._tell_pulled(head.uri, pulled.version, pulled.bytes_written, begun)
            await self.on_pulled(head.uri)
        return pulled

    def has_version(self, row: VersionInfo) -> bool:
        """Whether the remote has a version, as far as is known here. Asks nobody."""
        return row.bundle_id in self.sessions.versions_seen.get(row.uri, ())

    async def fetch_back(self, row: VersionInfo) -> int:
        """Let a version that is here have its keys and values again, whoever has its session; the bytes that were
        written, 0: it has them. Raises as `RemoteSessions.fetch_back`, and as `Room.after`."""
        begun = time.monotonic()
        async with self._moving:
            fetch_back = partial(self.sessions.fetch_back, row.uri, row.bundle_id)
            bytes_written = await self._room.after(lambda: self.run(fetch_back))
        if bytes_written:
            self._tell_pulled(row.uri, row.version, bytes_written, begun)
        return bytes_written

    def _tell_pulled(self, uri: SessionUri, version: int, bytes_written: int, begun: float) -> None:
        seconds = time.monotonic() - begun
        self._bus.publish(VersionPulled(uri, version=version, bytes_written=bytes_written, seconds=seconds))

    async def _take(self, uri: SessionUri) -> Lease:
        taking = asyncio.ensure_future(self.run(lambda: self.sessions.take(uri, self._lease_s)))
        try:
            return await to_the_end(taking)
        except asyncio.CancelledError:
            if taking.exception() is None:  # nobody would renew it
                await self._give_back(taking.result())
            raise

    async def _give_back(self, lease: Lease) -> None:
        """Of a session that has not come here: it sleeps here only if it did before. Raises as `Lease.release`."""
        is_ours = lease.before == self.sessions.me and lease.head.newest is not None
        await self.run(lambda: lease.release(asleep=is_ours))

    async def _take_asking(self, uri: SessionUri, emit: OnEvent) -> Lease:
        """As `_take`, once who has the session has given it back. Raises LeaseHeld: he has not, in that time."""
        begun, most_s, has_asked = time.monotonic(), 0.0, False
        try:
            while True:
                try:
                    return await self._take(uri)
                except LeaseHeld as held:
                    waited_s, machine = time.monotonic() - begun, held.details["machine"]
                    most_s = most_s or min(_MOST_WAIT_S, _LEAST_WAIT_S + float(held.details["wait_s"]))
                    if (has_asked and not held.details["is_asked"]) or waited_s > most_s:
                        raise
                if not has_asked:
                    has_asked = True  # before it is certain: then it is withdrawn, too
                    await self.run(lambda: self.sessions.ask(uri))
                emit(ProgressEvent("handover", round(waited_s), math.ceil(most_s), machine))
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            if has_asked:  # nobody waits for the session any more, so it may stay where it is
                with suppress(TorporError):
                    await in_any_case(self.run(lambda: self.sessions.withdraw(uri)))
            raise

    def require(self, uri: SessionUri) -> None:
        """Before a turn is told: the session is ours at this moment. Raises LeaseLost."""
        if (lease := self.leases.get(uri)) is not None:
            lease.require()

    def renewable(self) -> dict[SessionUri, Lease]:
        """The leases that are to be renewed, those of sessions that are on their way here among them."""
        return {uri: lease for uri, lease in (*self.leases.items(), *self._coming.items()) if not lease.is_lost}

    async def renew(self, uri: SessionUri) -> bool:
        """Renew a lease; whether somebody asks for the session. Raises as `Lease.renew`."""
        lease = self.renewable().get(uri)
        if lease is None:
            return False
        await self._threads.run_at_once(lease.renew)
        return lease.request is not None

    async def send_turns(self, record: JournalRecord) -> bool:
        """Let turns of a session that is held survive this machine; False: the remote does not have the version yet
        behind which they stand, or the session is not held. Raises as `RemoteSessions.send_turns`."""
        lease = self.leases.get(record.uri)
        if lease is None:
            return False
        try:
            return await self.run(lambda: self.sessions.send_turns(lease, record))
        finally:
            if lease.request is not None:  # seen by this, which puts off the next renewal
                self.on_request(record.uri)

    async def push(self, uri: SessionUri, *, within_budget: bool = False, again: bool = False) -> Pushed | None:
        """Send the newest version of a session that is held. within_budget: as long as that is not used up; None: it
        is, and the rest is not sent; or another request has sent it meanwhile, and let the session go. again, and what
        it raises: as of `RemoteSessions.push`. StopDeadline: the daemon stops, and its time is over.
        RemoteUnreachable: the session has begun here without an answer of the remote, and there is none still."""
        lease = self.leases.get(uri)
        if lease is None:
            raise RemoteUnreachable(
                f"{uri} has begun here while {self.url} did not answer, and is not there. Nothing is lost here, and it "
                "is sent once there is an answer; try again later.",
                url=self.url,
            )
        async with self._moving:
            if self.leases.get(uri) is not lease:
                return None
            self._sending = uri
            try:
                return await self.run(
                    lambda: self.sessions.push(
                        lease, lambda: not (within_budget and self.budget.is_used_up), again=again
                    )
                )
            finally:
                self._sending = None

    async def release(self, uri: SessionUri) -> None:
        """Let others have a session that sleeps. Raises as `Lease.release`; it is not ours any more then, either."""
        if (lease := self.leases.pop(uri, None)) is not None:
            await self.run(lambda: lease.release(asleep=lease.head.newest is not None))

    async def drop(self, uri: SessionUri, *, forgetting: bool = False) -> Dropped:
        """Before a session is deleted here, whose turn the caller has: let the remote have nothing of it. If the delete
        is cut off behind that, the session is here still, and nowhere else. forgetting: tell which packs were the
        session's, and what cannot be asked also where it is not remembered that the remote has had the session."""
        packs, is_there = dict[str, set[bytes]](), False
        try:
            self._threads.require_answering()
            head = await self.head(uri)
            if head is None:
                return Dropped()
            is_there = True
            if forgetting:
                packs = await self.run(lambda: self.sessions.packs_of(head))
            await self.run(lambda: self.sessions.require_droppable(head))
            lease = self.leases.pop(uri) if self.has(uri) else await self._take_to_drop(uri)
            keys = await self.run(lambda: self.sessions.drop(lease))
        except TorporError as error:
            if not (is_there or forgetting or self.sessions.is_known(uri)):
                return Dropped()
            return Dropped((), packs, is_there, self._kept(uri, error))
        finally:
            self.leases.pop(uri, None)
        self.on_drop()
        if forgetting:
            if self._sending == uri:  # behind the drop it ends with the pack that it is at
                async with self._moving:
                    pass
            packs = {key: set[bytes]() for key in self.sessions.sent_packs.pop(uri, ())} | packs
        return Dropped(keys, packs, is_there)

    async def _take_to_drop(self, uri: SessionUri) -> Lease:
        """As `_take`. Raises as `RemoteSessions.require_droppable`: another machine has gone on with it until then."""
        lease = await self._take(uri)
        try:
            await self.run(lambda: self.sessions.require_droppable(lease.head, lease))
        except BaseException:
            await self._give_back(lease)
            raise
        return lease

    async def drop_version(self, uri: SessionUri, bundle_id: str) -> tuple[Finding, ...]:
        """Before a version is deleted: the remote keeps it no more. Gives why it still does."""
        head = None
        try:
            head = await self.head(uri)
            if head is None or bundle_id not in head.versions:
                return ()
            is_held = self.has(uri)
            lease = self.leases[uri] if is_held else await self._take(uri)
            try:
                await self.run(lambda: self.sessions.drop_version(lease, bundle_id))
            finally:
                if not is_held:
                    await self._give_back(lease)
        except TorporError as error:
            return self._kept(uri, error) if head is not None or self.sessions.is_known(uri) else ()
        self.on_drop()
        return ()

    def forget(self, uri: SessionUri) -> None:
        """A session is here no more: what is remembered of it is no other one's of its name."""
        self._alone.discard(uri)
        self.on_gone(uri)

    async def collect(
        self, also: Mapping[str, Collection[bytes]], should_stop: Callable[[], bool], *, dry_run: bool
    ) -> Collected:
        """As `RemoteSessions.collect`."""
        return await self.run(lambda: self.sessions.collect(also, dry_run=dry_run, should_stop=should_stop))

    async def sweep(self, uri: SessionUri, keys: Sequence[str]) -> list[str]:
        """As `RemoteSessions.sweep`. The caller has the session's turn, and it is not held."""
        return await self.run(lambda: self.sessions.sweep(uri, keys))

    def _kept(self, uri: SessionUri, error: TorporError) -> tuple[Finding, ...]:
        return (Finding(f"{self.url}/{key_of(uri)}", error.code, f"The remote still has {uri}. {error.message}"),)

    async def close(self) -> None:
        """Wait for what is under way. Leases stay as they are: this store takes its own back."""
        await self._threads.close()
        await asyncio.to_thread(self.sessions.close)
