"""Retention while serving: versions that no rule keeps go, as by `torpor prune`. So do stand-ins that a later version
has taken over, with or without a rule.

A session is looked at behind each of its new versions, and all sessions when the rule is a new one, as at the start; of
a rule that keeps all, those with stand-ins: a stop ends before what its last sleeps took over is gone.
Nothing else makes a version superfluous: days are counted back from the newest version, so time alone removes none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from ...memvid.answers import MaintenanceReport
from ...memvid.folder.marks import Marks
from ...memvid.folder.retention import Retention, plan_retention
from ...memvid.index.queries import uris_with_earlier_ledgers
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..events.bus import Bus
from ..events.events import VersionsPruned
from ..options.current import CurrentOptions
from ..tasks.pieces import NAMES_AT_ONCE
from .loop import NOW, SessionJob, Upkeep

_LOG = logging.getLogger(__name__)


class Retaining(SessionJob):
    """Prunes one session after the other. `look_again` is for another rule."""

    name: ClassVar = "retain"

    def __init__(self, upkeep: Upkeep, store: Store, bus: Bus, options: CurrentOptions) -> None:
        self._store = store
        self._bus = bus
        self._options = options
        self._applied: Retention | None = None
        super().__init__(upkeep)

    def _rule(self) -> Retention:
        """The rule that holds now."""
        return Retention(self._options.now.keep_last, self._options.now.keep_days)

    def due(self) -> Iterable[tuple[SessionUri | None, float]]:
        return super().due() if self._rule() == self._applied else [(None, NOW)]

    async def piece(self, uri: SessionUri | None) -> float | None:
        if uri is not None:
            return await super().piece(uri)
        if (rule := self._rule()) == Retention():
            async with self._thread.piece():
                found = await self._thread.run(partial(uris_with_earlier_ledgers, self._store.index))
                self._noted.update(dict.fromkeys(found))
        else:
            for uris in self._store.index.iter_uris(NAMES_AT_ONCE):
                self._noted.update(dict.fromkeys(uris))
                await asyncio.sleep(0)
        self._applied = rule
        return None

    async def look_at(self, uri: SessionUri) -> float:
        async with self._thread.piece():
            begun = time.monotonic()
            reports = await self._thread.run(partial(self._prune, uri, self._rule()))
        for problem in dict.fromkeys(problem for report in reports for problem in report.problems):
            _LOG.warning("pruning %s: %s: %s", uri, problem.code, problem.message)
        actions = [action for report in reports for action in report.actions]
        if gone := sum(action.kind != "keep" and action.version is not None for action in actions):
            self._bus.publish(VersionsPruned(uri, gone, sum(report.bytes_freed for report in reports)))
        return time.monotonic() - begun

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
