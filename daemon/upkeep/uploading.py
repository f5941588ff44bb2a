"""Versions go into the remote behind sleeps and writes behind, and sessions that sleep become free for others.

A session is looked at behind each of its new versions, and all of them at the start, many heads at a time: what an
earlier run did not send is sent then. One for which another machine asks is put to sleep first, once no request has it.

Once the day's budget of the remote is used up, they wait for the next day: all but those that another machine asks for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

from ...errors import TorporError
from ...memvid.errors import RemoteUnreachable
from ...memvid.remote.sessions import Pushed
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..api.process import RemoteUse
from ..disk.remote import Remote
from ..errors import StopDeadline
from ..events.bus import Bus
from ..events.events import VersionPushed
from ..residency.residency import Residency
from ..tasks.door import LastSleep
from ..tasks.pieces import NAMES_AT_ONCE
from .loop import NOW, SessionJob, Upkeep

_LOG = logging.getLogger(__name__)

_LOOK_S: Final = 600.0
_DAY_S: Final = 24 * 3600


class Uploading(SessionJob):
    """Sends one session after the other."""

    name: ClassVar = "remote"

    def __init__(self, upkeep: Upkeep, store: Store, remote: Remote, residency: Residency, bus: Bus) -> None:
        self._store = store
        self._remote = remote
        self._residency = residency
        self._bus = bus
        self._pages: Iterator[list[SessionUri]] | None = self._all_pages()
        self._page: list[SessionUri] | None = None  # whose heads are to be read next; None: of another one
        self._told_on = -1.0
        super().__init__(upkeep)
        remote.on_version = self.note
        remote.on_request = self.note_at_once
        residency.turns.on_free = self._note_asleep

    def _note_asleep(self, uri: SessionUri) -> None:
        if uri in self._remote.leases and uri not in self._residency.awake:
            self.note(uri)

    def due(self) -> Iterable[tuple[SessionUri | None, float]]:
        yield from self._due()
        if self._pages is not None:
            yield None, NOW

    def _due(self) -> Iterable[tuple[SessionUri, float]]:
        if not self._remote.budget.is_used_up:
            return ((uri, NOW) for uri in self._noted)
        # Asked again now and then: who sets the clock, or suspends the machine, moves the next day.
        later = time.monotonic() + min(_LOOK_S, _DAY_S - time.time() % _DAY_S)
        return ((uri, later if self._can_wait(uri) else NOW) for uri in self._noted)

    def note(self, uri: SessionUri) -> None:
        super().note(uri)
        today = time.time() // _DAY_S
        if self._told_on != today and self._remote.budget.is_used_up and self._can_wait(uri):
            self._told_on = today
            _LOG.warning("the remote's budget of this day is used up: versions wait for the next day (UTC)")

    def use_today(self) -> RemoteUse:
        """What was used of the remote, and what waits."""
        waiting = sum(map(self._can_wait, self._noted)) if self._remote.budget.is_used_up else 0
        fault = self._remote.fault
        problem, sealed = None if fault is None else fault.message, self._remote.sessions.is_sealed
        return self._remote.budget.use_today(self._remote.url, waiting, problem, sealed=sealed)

    def _can_wait(self, uri: SessionUri) -> bool:
        """Whether nobody waits for what is to be done for a session, and bytes may be to be sent for it."""
        lease = self._remote.leases.get(uri)
        return lease is None or (lease.request is None and not lease.is_lost and self._lacks(uri))

    def _all_pages(self) -> Iterator[list[SessionUri]]:
        """The sessions that there are at the start."""
        if (why := self._remote.budget.why_anew) is not None:
            _LOG.warning("%s", why)
        yield from filter(None, self._store.index.iter_uris(NAMES_AT_ONCE))

    async def piece(self, uri: SessionUri | None) -> float | None:
        if uri is not None:
            return await super().piece(uri)
        if self._pages is not None and (page := self._page or next(self._pages, None)) is not None:
            self._page = page
            behind = await self._remote.run(lambda: self._remote.sessions.behind_of(page))
            self._noted.update(dict.fromkeys(behind))
            self._page = None
        else:
            self._pages = None
        return None

    def is_in_use(self, uri: SessionUri) -> bool:
        """Whether a session is awake, or a request has it."""
        return uri in self._residency.awake or bool(self._residency.turns.users(uri))

    async def look_at(self, uri: SessionUri) -> float | None:
        lease = self._remote.leases.get(uri)
        if lease is not None and lease.is_lost:
            if not self.is_in_use(uri):
                del self._remote.leases[uri]
        elif lease is not None and lease.request is None and self.is_in_use(uri):
            await self._push_or_wait(uri)
        elif lease is not None or await self._remote.is_behind(uri):
            async with self._residency.turn(uri):
                await self.hand_over(uri)
        return None

    async def hand_over(self, uri: SessionUri) -> None:
        """Put a session to sleep if somebody asks for it, send it, and let others have it if it sleeps. The caller has
        its turn. Raises as `Residency.hold`, `Remote.push`, and the errors of a sleep."""
        await self._residency.hold(uri)
        live = self._residency.awake.get(uri)
        if live is None:
            await self._residency.journal.replay(uri)  # else it would be there without its last turns
        if live is not None and (lease := self._remote.leases.get(uri)) is not None and lease.request is not None:
            await self._residency.putting_away.put_away(live, ignore, "handover")
        if await self._push_or_wait(uri) and uri not in self._residency.awake:
            await self._remote.release(uri)

    async def _push_or_wait(self, uri: SessionUri) -> bool:
        """Send a session that is held, if another machine asks for it, or as far as the day's budget goes; whether the
        remote has it now. If not, it waits."""
        lease = self._remote.leases.get(uri)
        await self.push(uri, within_budget=lease is not None and lease.request is None)
        if not self._lacks(uri):
            return True
        self.note(uri)
        return False

    async def finish(self, order: LastSleep) -> list[SessionUri]:
        """At a stop, behind the last sleeps: send what the remote lacks, and let others have the sessions, as far as
        there is time, and the day's budget goes. Gives the sessions whose newest version the remote is not known to
        have: the next daemon sends it."""
        left = dict.fromkeys([*self._remote.leases, *self._noted])
        for uri in list(left):
            try:
                order.require_time()
                if self._remote.budget.is_used_up and self._can_wait(uri):
                    continue
                if uri in self._remote.leases or await self._remote.is_behind(uri):
                    await self._remote.hold(uri)
                    if not await self._push_or_wait(uri):
                        continue
                    await self._remote.release(uri)
                del left[uri]
            except (RemoteUnreachable, StopDeadline):
                break  # as with the others
            except TorporError:
                continue
        return [uri for uri in left if self._lacks(uri) or self._is_unknown(uri)]

    def _is_unknown(self, uri: SessionUri) -> bool:
        """Whether a session with a version is not held, so that nothing tells what the remote has of it."""
        return uri not in self._remote.leases and self._store.find_session(uri) is not None

    def _lacks(self, uri: SessionUri) -> bool:
        """Whether the remote lacks the newest version of a session that is held. It has perhaps a later one, which was
        removed here and could not be removed there."""
        newest, head = self._store.find_session(uri), self._remote.head_of(uri)
        return newest is not None and head is not None and newest.bundle_id not in head.versions

    async def push(self, uri: SessionUri, *, within_budget: bool = False, again: bool = False) -> Pushed | None:
        """Send the newest version of a session that is held; None: the remote has it, or there is none. within_budget,
        again, and what it raises: as of `Remote.push`."""
        begun = time.monotonic()
        if not (again or self._lacks(uri)):
            return None
        lease = self._remote.leases.get(uri)
        asked = None if lease is None else lease.request
        pushed = await self._remote.push(uri, within_budget=within_budget, again=again)
        if asked is None and lease is not None and lease.request is not None:
            self.note_at_once(uri)  # seen by this, which puts off the next renewal
        if pushed is None:
            return None
        self._bus.publish(
            VersionPushed(
                uri,
                version=pushed.version,
                bytes_sent=pushed.sent.bytes_sent,
                blocks_sent=pushed.sent.blocks_sent,
                seconds=time.monotonic() - begun,
            )
        )
        return pushed
