"""Maintenance of the store while sessions are served: one operation at a time, on a thread of its own.

Owns that thread and the form of an operation's report. The store locks only for its commits, so sleeps and wakes go on
meanwhile; for that, this is not the thread that writes snapshots.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...memvid import operations
from ...memvid.format.records import Finding, MaintenanceReport
from ...memvid.operations import Order
from ...memvid.store import Store
from ..api.store import MaintenanceAction, MaintenanceProblem, MaintenanceResult
from ..errors import ServiceClosed
from .disk_space import Stop, Way

# The most entries of a report. A store may have millions of files; an answer has to fit into a frame.
MAX_ACTIONS_TOLD = 10_000
MAX_PROBLEMS_TOLD = 1_000

Result = TypeVar("Result")


class Maintenance:
    """Runs maintenance of a store. `close` waits for the running operation, which must not meet a closed store."""

    def __init__(self, store: Store, way: Way) -> None:
        self._store = store
        self._way = way
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-maintain")
        self._stopping = threading.Event()

    async def carry_out(self, order: Order) -> MaintenanceResult:
        """Carry out an order after earlier ones. Raises as the store's operation."""
        return result_of(await self.run(lambda: self._carry_out(order)))

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


def joined(earlier: MaintenanceReport, later: MaintenanceReport) -> MaintenanceReport:
    """The report of an operation in two runs, with the problems that are left behind the later one."""
    return dataclasses.replace(
        later,
        actions=(*earlier.actions, *later.actions),
        bytes_freed=earlier.bytes_freed + later.bytes_freed,
        bytes_written=earlier.bytes_written + later.bytes_written,
    )


def _as_one(reports: Sequence[MaintenanceReport]) -> MaintenanceReport:
    """The report of an operation in several runs; a problem of several runs is listed once."""
    problems = dict.fromkeys(problem for report in reports for problem in report.problems)
    return dataclasses.replace(functools.reduce(joined, reports), problems=tuple(problems))


def problems_told(problems: Sequence[Finding]) -> tuple[MaintenanceProblem, ...]:
    """Problems as plain data, as many as an answer takes."""
    return tuple(MaintenanceProblem(one.path, one.code, one.message) for one in problems[:MAX_PROBLEMS_TOLD])


def result_of(report: MaintenanceReport) -> MaintenanceResult:
    """A report as plain data, as much as an answer takes."""
    return MaintenanceResult.of(report, most_actions=MAX_ACTIONS_TOLD, most_problems=MAX_PROBLEMS_TOLD)


def with_awake(result: MaintenanceResult, session: str, token_count: int) -> MaintenanceResult:
    """The report of a forget of an awake session: its memory goes too, as the first action."""
    tokens = f"{token_count:,} token{'' if token_count == 1 else 's'}"
    awake = MaintenanceAction("remove", "", session, None, 0, f"the awake session, {tokens}, leaves memory")
    return dataclasses.replace(result, actions=(awake, *result.actions))
