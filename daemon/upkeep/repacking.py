"""Repacks behind sleeps, one session at a time, so that a wake opens few packs.

The store does the work: a repack blocks no sleep or wake, and may stop between any two steps. It then goes on when
nothing is more urgent, or behind the session's next sleep.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import ClassVar

from ...memvid.format.records import Receipt
from ...memvid.maintenance.repack_plan import RepackPolicy
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from .loop import SessionJob, Upkeep

_LOG = logging.getLogger(__name__)


class Repacking(SessionJob):
    """Keeps the number of packs that a wake opens low."""

    name: ClassVar = "repack"

    def __init__(self, upkeep: Upkeep, store: Store, policy: RepackPolicy) -> None:
        self._store = store
        self._policy = policy
        super().__init__(upkeep)

    def consider(self, receipt: Receipt) -> None:
        """Repack the session of a new version if that is spread over many packs."""
        if receipt.blocks_new and self._store.count_packs(receipt.entries) > self._policy.max_packs:
            self.note(receipt.uri)

    async def look_at(self, uri: SessionUri) -> None:
        repacking = partial(self._store.repack, uri, policy=self._policy)
        report, is_left = await self._thread.repack(lambda should_stop: repacking(should_stop=should_stop))
        for problem in report.problems:
            _LOG.warning("repacking %s: %s: %s", uri, problem.code, problem.message)
        if is_left:
            self.note(uri)
