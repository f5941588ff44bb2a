"""Maintenance of the store while sessions are served: one operation at a time, on the thread of upkeep.

Owns the bounds of a report. The store locks only for its commits, so sleeps and wakes go on meanwhile; for that, this
is not the thread that writes snapshots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


async def carry_out(store: Store, thread: UpkeepThread, order: Order) -> MaintenanceReport:
    """Carry out an order on the thread of upkeep, after earlier ones. Raises as the store's operation, and
    ServiceClosed: the daemon stops, and has not begun it."""
    doing = functools.partial(operations.carry_out, store, order)
    if order.operation != "repack" or order.dry_run:
        return await thread.order(doing)
    reports, is_left = list[MaintenanceReport](), True
    while is_left:  # one that stops for a sleep without room goes on after it
        try:
            report, is_left = await thread.repack(doing, is_order=True)
        except ServiceClosed:
            if not reports:
                raise
            break
        reports.append(report)
    return _as_one(reports)


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
