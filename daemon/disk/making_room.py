"""Room in the store: where its budget leaves none, what was used longest ago is stripped, and the work is done again.

The store decides what goes (`memvid/maintenance/strip_plan.py`). Here is when, and which sessions are in use.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Final, TypeVar

from ...errors import TorporError
from ...memvid.answers import MaintenanceReport
from ...memvid.disk.budget import STORE_BYTES, left_to_repacks
from ...memvid.errors import BudgetExceeded
from ...memvid.maintenance.strip_plan import RoomPolicy
from ...memvid.store import Store
from ...memvid.uri import SessionUri, parse_reference
from ..events.bus import Bus
from ..events.events import VersionsStripped
from ..options.current import CurrentOptions
from .upkeep_thread import UpkeepThread

_LOG = logging.getLogger(__name__)

FULL: Final = 0.9
"""From this part of its budget on a store is made smaller behind the sleeps, so that the next ones need not wait."""

ENOUGH: Final = 0.8
"""So much smaller that the next look at all of its versions is some sleeps away."""

_TRIES: Final = 3

Result = TypeVar("Result")


class Room:
    """Makes room in a store. awake: the sessions in memory, which are in use. requested: gives those that requests have
    or wait for: one of them may be about to wake, and makes room in memory first. elsewhere: gives the bundle ids of
    versions that the remote has, too."""

    def __init__(
        self,
        store: Store,
        thread: UpkeepThread,
        awake: Collection[SessionUri],
        requested: Callable[[], set[SessionUri]],
        bus: Bus,
        options: CurrentOptions,
        elsewhere: Callable[[], set[str]],
    ) -> None:
        self._store = store
        self._elsewhere = elsewhere
        self._thread = thread
        self._awake = awake
        self._requested = requested
        self._bus = bus
        self._options = options

    @property
    def is_short(self) -> bool:
        """Whether the store is nearly as large as it may be."""
        most = self._store.budget.max_store_bytes
        return most is not None and self._store.held_bytes > FULL * most

    def plan(self) -> MaintenanceReport:
        """What goes next, and why. For any thread."""
        return self._store.plan_room(self._policy, self._in_use(), self._elsewhere())

    def may_strip(self, *, unnamed: bool) -> bool:
        """Whether the newest keys and values of a session may go. unnamed: whether nobody has named it."""
        return unnamed or self._policy.strip_named

    def unused(self, uri: SessionUri | None = None) -> list[SessionUri]:
        """The sessions that nobody named and nobody has used for long; that one alone, if it is one. For any thread."""
        return self._store.unused(self._policy, list(self._awake), uri)

    async def after(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do work that writes. Where the store's budget refuses it, make room and do it again. The caller holds nothing
        that a piece of upkeep waits for. Raises as the work."""
        for _ in range(_TRIES):  # another one may take the room that was made
            try:
                return await work()
            except BudgetExceeded as error:
                if error.details["which"] != STORE_BYTES or not await self._is_made(error):
                    raise
        return await work()

    async def _is_made(self, refusal: BudgetExceeded) -> bool:
        """Whether there is room now for what was refused, beside what others are writing."""
        used, needed = refusal.details["used"], refusal.details["needed"]
        try:
            return await self.make(max(1, used + needed - self._store.held_bytes))
        except TorporError as error:  # the refusal of the work says what to do
            _LOG.warning("making room failed: %s: %s", error.code, error.message)
            return False

    async def make(self, needed: int = 0) -> bool:
        """Strip what was used longest ago, until there is room for so many bytes and for some sleeps more; nothing, if
        there can be none for these. Whether there is for them. Raises ServiceClosed: the daemon stops. And as
        `Store.make_room`."""
        whole = self._store.budget.max_store_bytes
        if whole is None:
            return True
        most = whole - left_to_repacks(whole)
        making = partial(
            self._store.make_room,
            int(min(ENOUGH * whole, most - needed)),
            self._policy,
            self._in_use,
            self._elsewhere,
            or_nothing=most - needed if needed else None,
        )
        is_left = True
        while is_left:  # what stops for a sleep without room on the disk goes on after it
            report, is_left = await self._thread.repack(
                lambda should_stop: making(should_stop=should_stop), is_order=True
            )
            self._tell(report)
        return self._store.held_bytes + needed <= most

    def _tell(self, report: MaintenanceReport) -> None:
        versions, bytes_freed = Counter[str](), Counter[str]()
        for action in report.actions:
            if action.kind == "strip" and action.session is not None:
                versions[action.session] += 1
                bytes_freed[action.session] += action.size_bytes
        for session, count in versions.items():
            self._bus.publish(VersionsStripped(parse_reference(session), count, bytes_freed[session]))
        for problem in report.problems:
            _LOG.warning("making room: %s: %s", problem.code, problem.message)

    def _in_use(self) -> set[SessionUri]:
        """The sessions in use. For any thread."""
        return self._requested().union(list(self._awake))

    @property
    def _policy(self) -> RoomPolicy:
        now = self._options.now
        return RoomPolicy(now.strip_named, now.keep_unnamed or None)
