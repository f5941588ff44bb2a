"""`torpor quantise`: keep sleeping sessions in fewer bits. Only the daemon does this, for it needs the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...daemon.api.limits import MAX_DAYS
from ...daemon.api.store import MaintenanceProblem
from ...socket_api.errors import RemoteError
from ..errors import InvalidUsage
from ..reach.daemon_link import connect
from ..reach.options import DryRunOption, JsonOption, OnlySessionArgument, SocketOption, option
from ..view.damage import add_suggestion
from ..view.output import Output
from .maintenance_report import write_report
from .upkeep import PATIENCE_S


def _require_days(days: float | None) -> float | None:
    if days is not None and not 0 <= days <= MAX_DAYS:
        raise InvalidUsage(f"--after takes a number of days from 0 to {MAX_DAYS}, not {days:g}.", option="--after")
    return days


BitsOption = Annotated[Literal["8", "4"], typer.Option("--bits", help="In how many bits each number is kept.")]
AfterOption = Annotated[
    float | None,
    option(
        "--after DAYS",
        "Only sessions that have slept for so many days; without SESSION, all of them.",
        callback=_require_days,
    ),
]


def quantise(
    session: OnlySessionArgument = None,
    bits: BitsOption = "8",
    after: AfterOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """It writes a new version; the exact one stays, and can be woken, until [cyan]torpor prune[/] removes it: only then
    is there less on the disk. Text, last logits and random numbers stay exact. Sessions that are awake, and last
    versions that are pinned or have a tag, are left. [cyan]torpor wake[/] and [cyan]show[/] say of a session that it is
    lossy.

    [bold]Examples[/]

    [cyan]torpor quantise notes --dry-run[/]
    [cyan]torpor quantise --after 30 --bits 8[/]
    [cyan]torpor prune notes --keep-last 1[/]
    """
    if session is None and after is None:
        raise InvalidUsage("Name a SESSION, or give --after DAYS for all that have slept so long.")
    output = Output(as_json=as_json)
    with connect(socket, timeout_s=PATIENCE_S) as daemon:
        with output.progress("quantise"):
            report = daemon.maintain(
                "quantise", session=session, bits=8 if bits == "8" else 4, after_days=after, dry_run=dry_run
            )
        place = Path(daemon.status().store) if report.problems else None
    if place is not None:
        problems = [_with_suggestion(problem, place) for problem in report.problems]
        report = replace(report, problems=tuple(problems))
    return write_report(output, "quantise", report)


def _with_suggestion(problem: MaintenanceProblem, store: Path) -> MaintenanceProblem:
    """Add to the problem of a damaged session its latest intact version."""
    error = RemoteError(problem.code, problem.message)
    add_suggestion(error, store, problem.path)
    return replace(problem, message=error.message)
