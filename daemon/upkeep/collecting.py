"""The remote is freed of what no session needs: an hour after something was removed there, and else once a day.

What a collection finds that is a session's and that its head does not name is removed while nobody here uses it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Final

from ...errors import TorporError
from ...memvid.answers import Action, Finding, MaintenanceReport
from ...memvid.limits import REMOTE_GRACE_S
from ...memvid.maintenance.forgetting import NOT_FORGOTTEN
from ...memvid.remote.collecting import Collected
from ...memvid.remote.heads import key_of
from ...memvid.remote.places import own_keys
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ..disk.remote import Dropped, Remote
from ..residency.residency import Residency
from ..tasks.door import Door, Phase
from .loop import Job, Upkeep

_LOG = logging.getLogger(__name__)

_DAY_S: Final = 24 * 3600.0
_SOON_S: Final = 60.0
_GRACE_S: Final = REMOTE_GRACE_S + _SOON_S
"""More than what is compared by the clock of the object store."""
_MOST_NAMES: Final = 20
"""Of sessions in a message."""
_LOOK_S: Final = 600.0
"""So long it is put off while the day's budget of the remote is used up."""


class Collecting(Job[None]):
    """Collects, one time after the other."""

    name: ClassVar = "remote space"

    def __init__(self, upkeep: Upkeep, remote: Remote, residency: Residency, door: Door) -> None:
        self._remote = remote
        self._residency = residency
        self._door = door
        self._alone = asyncio.Lock()
        self._not_before = time.monotonic()
        self._next = self._not_before + _GRACE_S
        super().__init__(upkeep)
        remote.on_drop = self._note

    def _note(self) -> None:
        """Something was removed. One that comes each hour at most finds what many removals leave."""
        self._next = min(self._next, max(self._not_before, time.monotonic() + _SOON_S))
        self.look_again()

    def due(self) -> Iterable[tuple[None, float]]:
        return [(None, time.monotonic() + _LOOK_S if self._remote.budget.is_used_up else self._next)]

    async def piece(self, item: None) -> None:
        report, _ = await self.collect()
        for problem in report.problems:
            _LOG.warning("what is not needed in the remote was not all freed: %s", problem.message)

    async def collect(
        self, also: Mapping[str, Collection[bytes]] = MappingProxyType({}), *, dry_run: bool = False
    ) -> tuple[MaintenanceReport, Collected]:
        """See `RemoteSessions.collect`, and raises as that. The report has all that was done."""
        async with self._alone:
            collected = await self._remote.collect(also, self._must_stop, dry_run=dry_run)
            report = collected.report
            if not dry_run:
                now = time.monotonic()
                self._not_before, self._next = now + _GRACE_S, now + (_GRACE_S if collected.is_left else _DAY_S)
                self.look_again()
                for uri, keys in collected.orphans.items():
                    report = await self._swept(report, uri, keys)
            return report, collected

    async def foresee(self, uri: SessionUri) -> Dropped:
        """What a `Remote.drop` that forgets would do, as far as can be told. Nothing is changed."""
        remote, packs = self._remote, dict[str, set[bytes]]()
        try:
            head = await remote.head(uri)
            if head is None:
                return Dropped()
            packs = await remote.run(lambda: remote.sessions.packs_of(head))
            await remote.run(lambda: remote.sessions.require_droppable(head))
        except TorporError as error:
            return Dropped((), packs, problems=(Finding.of(f"{remote.url}/{key_of(uri)}", error),))
        versions = itertools.chain.from_iterable(map(own_keys, head.versions))
        return Dropped([*head.tail, *versions], packs, is_there=True)

    async def forgotten(self, uri: SessionUri, report: MaintenanceReport, dropped: Dropped) -> MaintenanceReport:
        """The report of a forget or of its plan, with what became of the session in the remote, or would. Its packs
        leave now. Nobody has its turn."""
        path = f"{self._remote.url}/{key_of(uri)}"
        actions = [self._removed(uri, key, "It is of the session, in the remote.") for key in dropped.keys]
        problems = list(dropped.problems)
        if report.dry_run:
            reason = "A version of the session needs it. It leaves if no other session does."
            actions += [
                Action("leave", f"{self._remote.url}/{key}", str(uri), None, 0, reason) for key in sorted(dropped.packs)
            ]
        elif dropped.is_there:
            try:
                collected, found = await self.collect(dropped.packs)
            except TorporError as error:
                problems.append(Finding.of(self._remote.url, error))
            else:
                packs = {f"{self._remote.url}/{key}" for key in dropped.packs}
                mine = [each for each in collected.actions if each.path in packs or each.session == str(uri)]
                actions += [replace(each, session=str(uri)) for each in mine]
                problems += collected.problems
                if found.stuck:
                    problems.append(self._stuck(uri, found))
                if others := packs - {each.path for each in mine}:
                    reason = f"{format_plural(len(others), 'pack')}: needed by other sessions, or leaving already."
                    actions.append(Action("keep", f"{self._remote.url}/packs", str(uri), None, 0, reason))
        if dropped.is_there:
            reason = (
                "The head of the session stays, without any version. Its key has the name; without it other machines "
                "would take the remote for one that was put back."
            )
            actions.append(Action("keep", path, str(uri), None, 0, reason))
        if dropped.is_there and self._remote.sessions.keeps_old:
            message = (
                f"{self._remote.url} keeps what is removed or replaced, as versions of its bucket, so it has bytes of "
                f"{uri} still, which Torpor cannot reach. Let a rule of the bucket (lifecycle) delete versions that "
                "are not current, and see that those of this session have gone."
            )
            problems.append(Finding(self._remote.url, NOT_FORGOTTEN, message))
        return replace(
            report,
            actions=(*report.actions, *actions),
            problems=tuple(dict.fromkeys([*report.problems, *problems])),
        )

    def _stuck(self, uri: SessionUri, collected: Collected) -> Finding:
        sharers, most = list(map(str, collected.sharers)), _MOST_NAMES
        names = ", ".join(sharers[:most]) + (f" and {len(sharers) - most} more" if len(sharers) > most else "")
        return Finding(
            f"{self._remote.url}/packs",
            NOT_FORGOTTEN,
            f"{self._remote.url} has bytes still that {uri} alone had ({format_plural(collected.stuck, 'block')}): "
            f"they lie in packs with others, which are needed by {names}. Once no session needs these packs, they go. "
            "Forget those sessions, too, if the bytes must go now.",
        )

    async def _swept(self, report: MaintenanceReport, uri: SessionUri, keys: Sequence[str]) -> MaintenanceReport:
        """A report with what was removed of a session, unless it is in use."""
        if self._is_in_use(uri) or self._residency.turns.users(uri):
            return report
        try:
            async with self._residency.turn(uri, briefly=True):
                gone = [] if self._is_in_use(uri) else await self._remote.sweep(uri, keys)
        except TorporError as error:
            return replace(report, problems=(*report.problems, Finding.of(f"{self._remote.url}/{key_of(uri)}", error)))
        actions = [self._removed(uri, key, "The session's head does not name it.") for key in gone]
        return replace(report, actions=(*report.actions, *actions))

    def _is_in_use(self, uri: SessionUri) -> bool:
        return uri in self._residency.awake or uri in self._remote.leases

    def _removed(self, uri: SessionUri, key: str, reason: str) -> Action:
        return Action("remove", f"{self._remote.url}/{key}", str(uri), None, 0, reason)

    def _must_stop(self) -> bool:
        """For any thread."""
        return self._door.phase >= Phase.STOPPING
