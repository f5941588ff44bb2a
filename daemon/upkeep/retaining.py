"""Retention while serving: versions that no rule keeps go, as by `torpor prune`. So do stand-ins that a later version
has taken over, with or without a rule.

A session is looked at behind each of its new versions, and all sessions when the rule is a new one, as at the start.
Nothing else makes a version superfluous: days are counted back from the newest version, so time alone removes none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ...memvid.answers import MaintenanceReport
from ...memvid.errors import SessionNotFound, StoreError
from ...memvid.folder.marks import Marks
from ...memvid.folder.retention import Retention, plan_retention
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..engine.rounds import Rounds
from ..errors import ServiceClosed
from ..events.bus import Bus
from ..events.events import VersionsPruned
from ..sleep.maintenance import Maintenance
from ..tasks.pieces import NAMES_AT_ONCE

_LOG = logging.getLogger(__name__)

_REST: Final = 9
"""The rest behind a prune, by its own time: pruning takes at most a tenth of a processor from others."""


class Retaining(Rounds):
    """Prunes one session after the other. rule: gives the rule that holds now. `look_again` is for another rule.

    An error fails no request: it is logged, and the session is looked at again behind its next version.
    """

    def __init__(self, store: Store, maintenance: Maintenance, bus: Bus, rule: Callable[[], Retention]) -> None:
        self._store = store
        self._maintenance = maintenance
        self._bus = bus
        self._rule = rule
        self._due: dict[SessionUri, None] = {}
        self._applied = Retention()
        super().__init__()

    def note(self, uri: SessionUri) -> None:
        """Look at a session that has a new version."""
        self._due[uri] = None
        self.look_again()

    async def _round(self) -> None:
        before, self._applied = self._applied, self._rule()
        if self._applied != before:
            for uris in self._store.index.iter_uris(NAMES_AT_ONCE):
                self._due.update(dict.fromkeys(uris))
                await asyncio.sleep(0)
        while self._due and not self._closing.is_set():
            uri, begun = next(iter(self._due)), time.monotonic()
            del self._due[uri]
            await self._look_at(uri)
            await self._rest(_REST * (time.monotonic() - begun))

    async def _look_at(self, uri: SessionUri) -> None:
        try:
            reports = await self._maintenance.run(partial(self._prune, uri, self._rule()))
        except (SessionNotFound, ServiceClosed):
            return  # deleted meanwhile; or the daemon stops, and the next one looks again
        except StoreError as error:
            _LOG.warning("pruning %s: %s: %s", uri, error.code, error.message)
            return
        except Exception:  # noqa: BLE001 - a bug here must not end the retention of all sessions
            _LOG.exception("pruning %s", uri)
            return
        for problem in dict.fromkeys(problem for report in reports for problem in report.problems):
            _LOG.warning("pruning %s: %s: %s", uri, problem.code, problem.message)
        actions = [action for report in reports for action in report.actions]
        if gone := sum(action.kind != "keep" and action.version is not None for action in actions):
            self._bus.publish(VersionsPruned(uri, gone, sum(report.bytes_freed for report in reports)))

    def _prune(self, uri: SessionUri, rule: Retention) -> list[MaintenanceReport]:
        """Look at a session by its rows alone first: most of the time all of it stays, and a prune opens each
        version."""
        reports, rows = [], self._store.versions(uri)
        if any(row.unread_tokens for row in rows[:-1]):
            reports.append(self._store.drop_stand_ins(uri))
            rows = self._store.versions(uri)
        if plan_retention(rows, Marks(self._store.uuid), rule, time.time_ns()).drop:
            reports.append(self._store.prune(rule, uri))
        return reports
