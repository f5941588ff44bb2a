"""Maintenance of the store while sessions are served: one operation at a time, on the thread of upkeep.

Owns the bounds of a report. The store locks only for its commits, so sleeps and wakes go on meanwhile; for that, this
is not the thread that writes snapshots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ...memvid import operations
from ...memvid.answers import DeleteReport, MaintenanceReport
from ...memvid.operations import Order
from ...memvid.store import Store
from ..errors import ServiceClosed
from .upkeep_thread import UpkeepThread

# The most entries of a report. A store may have millions of files; an answer has to fit into a frame.
MAX_ACTIONS_TOLD = 10_000
MAX_PROBLEMS_TOLD = 1_000

Result = TypeVar("Result")
Report = TypeVar("Report", MaintenanceReport, DeleteReport)


class Maintenance:
    """Runs maintenance of a store."""

    def __init__(self, store: Store, thread: UpkeepThread) -> None:
        self._store = store
        self._thread = thread

    async def carry_out(self, order: Order) -> MaintenanceReport:
        """Carry out an order after earlier ones. Raises as the store's operation, and ServiceClosed."""
        if order.operation != "repack" or order.dry_run:
            return await self.run(lambda: operations.carry_out(self._store, order))
        reports, is_left = list[MaintenanceReport](), True
        while is_left:  # one that stops for a sleep without room goes on after it
            repacking = functools.partial(operations.carry_out, self._store, order)
            try:
                report, is_left = await self._thread.repack(repacking, is_order=True)
            except ServiceClosed:
                if not reports:
                    raise
                break
            reports.append(report)
        return _as_one(reports)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do long work on the store, after earlier work. Raises ServiceClosed: the daemon stops, and has not begun
        it."""
        return await self._thread.order(work)


def _as_one(reports: Sequence[MaintenanceReport]) -> MaintenanceReport:
    """The report of an operation in several runs; a problem of several runs is listed once."""
    problems = dict.fromkeys(problem for report in reports for problem in report.problems)
    return replace(functools.reduce(MaintenanceReport.then, reports), problems=tuple(problems))


def bounded(report: MaintenanceReport) -> MaintenanceReport:
    """A report with as many entries as an answer takes."""
    actions = report.actions[:MAX_ACTIONS_TOLD]
    return replace(with_bounded_problems(report), actions=actions, actions_left_out=len(report.actions) - len(actions))


def with_bounded_problems(report: Report) -> Report:
    """A report with as many problems as an answer takes."""
    problems = report.problems[:MAX_PROBLEMS_TOLD]
    return replace(report, problems=problems, problems_left_out=len(report.problems) - len(problems))
