"""Maintenance of the store while sessions are served: one operation at a time, on a thread of its own.

Owns that thread and the bounds of a report. The store locks only for its commits, so sleeps and wakes go on meanwhile;
for that, this is not the thread that writes snapshots.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from ...memvid import operations
from ...memvid.answers import DeleteReport, MaintenanceReport
from ...memvid.operations import Order
from ...memvid.store import Store
from ..errors import ServiceClosed
from .disk_space import Stop, Way

# The most entries of a report. A store may have millions of files; an answer has to fit into a frame.
MAX_ACTIONS_TOLD = 10_000
MAX_PROBLEMS_TOLD = 1_000

Result = TypeVar("Result")
Report = TypeVar("Report", MaintenanceReport, DeleteReport)


class Maintenance:
    """Runs maintenance of a store. `close` waits for the running operation, which must not meet a closed store."""

    def __init__(self, store: Store, way: Way) -> None:
        self._store = store
        self._way = way
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-maintain")
        self._stopping = threading.Event()

    async def carry_out(self, order: Order) -> MaintenanceReport:
        """Carry out an order after earlier ones. Raises as the store's operation."""
        return await self.run(lambda: self._carry_out(order))

    def _carry_out(self, order: Order) -> MaintenanceReport:
        if order.operation != "repack" or order.dry_run:
            return operations.carry_out(self._store, order)
        reports = []
        while True:  # a repack that stopped for a sleep without room goes on after it
            stop = Stop(self._stopping.is_set, lambda: self._way.is_claimed)
            with self._way.repacking():
                reports.append(operations.carry_out(self._store, order, stop))
            if not stop.was_told or self._stopping.is_set():
                return _as_one(reports)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do long work on the store, after earlier work. Raises ServiceClosed: the daemon stops, and has not begun
        it."""

        def begin() -> Result:
            if self._stopping.is_set():
                raise ServiceClosed("The daemon is stopping; try again when it is back.")
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, begin)

    def stop(self) -> None:
        """Begin no more work; a repack stops at its next step, and other running work goes on to its end."""
        self._stopping.set()

    def close(self) -> None:
        """`stop`, wait for the running operation, and end the thread."""
        self.stop()
        self._thread.shutdown()


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
