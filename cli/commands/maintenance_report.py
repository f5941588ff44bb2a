"""The report of an operation on a store: the table of its actions, one line of sums, and the problems that stay.

Every command that maintains a store writes its report here. Knows nothing of stores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...memvid.answers import Action, Finding, MaintenanceReport
from ...memvid.units import format_bytes, format_count, format_plural
from ..exit_codes import INTEGRITY, OK, STATUS_OF_CODE
from ..reach.interrupts import ignore_interrupts
from ..view.formatting import format_id, format_name
from ..view.output import Output, plain, render_problem, rows_table

ROWS_SHOWN = 40  # actions on the screen; JSON has them all
# In a reason, shortened as in the table: whole ones fill line after line of a narrow column.
_FILE_OR_ID = re.compile(r"(?:/\S*/)?\b([0-9a-f]{64})\b")
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z`])")
KEEP = "keep"  # no action, but the reason why there is none

# The participles of actions. An action of a later version is written as it is.
_DONE = {
    "remove": "removed",
    "strip": "stripped",
    "rewrite": "rewritten",
    "recompress": "recompressed",
    "unmark": "unmarked",
    "import": "imported",
    "export": "exported",
    "quantize": "quantized",
    "copy": "copied",
    "move": "moved",
    "heal": "healed",
    "leave": "leaving",
    KEEP: "kept",
}


def write_report(output: Output, command: str, report: MaintenanceReport, *, nothing: str = "nothing to do") -> int:
    """Write a report and give its exit status. nothing: the line that says that no action was needed."""
    ignore_interrupts()
    if output.told(command, report, ok=not report.problems):
        return _exit_status(report)
    if report.actions:
        output.show(render_actions(report))
    hidden = max(0, len(report.actions) - ROWS_SHOWN)
    if hidden + report.actions_left_out:
        output.line(f"[dim]… and {format_count(hidden + report.actions_left_out)} more (--json has them)[/]")
    for problem in _without_repeats(report.problems[:ROWS_SHOWN]):
        output.line(render_problem(problem))
    unseen = max(0, len(report.problems) - ROWS_SHOWN) + report.problems_left_out
    if unseen:
        output.line(f"[dim]… and {format_plural(unseen, 'more problem')} (--json has them)[/]")
    output.line(_sums(report, nothing))
    return _exit_status(report)


def _without_repeats(problems: Sequence[Finding]) -> Iterator[Finding]:
    """The problems without sentences that an earlier one ends with: one missing pack is a problem of many versions."""
    told: set[str] = set()
    for problem in problems:
        first, *others = _SENTENCE_END.split(problem.message)
        message = " ".join([first, *(sentence for sentence in others if sentence not in told)])
        told.update(others)
        yield replace(problem, message=message)


def render_actions(report: MaintenanceReport) -> Any:
    """Draw the actions, a row each: a plan's as verbs, done ones as participles."""
    names = ("ACTION", "SIZE", "FILE", "SESSION", "WHY")
    table = rows_table(*names, right=("SIZE",), whole=("ACTION", "SIZE"))
    for action in report.actions[:ROWS_SHOWN]:
        verb = action.kind if report.dry_run else _DONE.get(action.kind, action.kind)
        table.add_row(
            f"[dim]{plain(verb)}[/]" if action.kind == KEEP else plain(verb),
            format_bytes(action.size_bytes) if action.size_bytes else "–",
            plain(_short_file(action.path) or "–"),
            plain(_owner(action)),
            plain(_FILE_OR_ID.sub(lambda found: format_id(found[1]), action.reason)),
        )
    return table


def _owner(action: Action) -> str:
    if action.session is None:
        return "–"
    name = format_name(action.session)
    return name if action.version is None else f"{name}@{action.version}"


def _short_file(path: str) -> str:
    """A manifest or a pack by the first digits of its id, any other file by its name."""
    name = Path(path).name
    stem, _, rest = name.partition(".")  # a file in the folder `damaged` has a number after its ending
    if len(stem) == 64:
        return f"{format_id(stem)}.{rest}"
    return name or path


def _sums(report: MaintenanceReport, nothing: str) -> str:
    counts = Counter(action.kind for action in report.actions if action.kind != KEEP)
    problems = len(report.problems) + report.problems_left_out
    wrong = f"; [red]{format_plural(problems, 'problem')}[/]" if problems else ""
    if not counts and not report.actions_left_out:
        kept = sum(action.kind == KEEP for action in report.actions)
        return f"{nothing}{f', {format_count(kept)} kept' if kept else ''}{wrong}"
    figures = _figures(report.bytes_freed, report.bytes_written)
    done = ", ".join(
        f"{format_count(count)} {plain(kind if report.dry_run else _DONE.get(kind, kind))}"
        for kind, count in counts.items()
    )
    more = f" and {format_count(report.actions_left_out)} more" if report.actions_left_out else ""
    if report.dry_run:
        return f"[yellow]nothing done yet[/]  planned: {figures}; {done}{more}{wrong}"
    return f"{'[yellow]partly done[/]' if problems else '[green]done[/]'}  {figures}; {done}{more}{wrong}"


def _figures(freed: int, written: int) -> str:
    """The bytes freed and written; where there are both, also the net change on disk."""
    figures = ", ".join(
        f"{format_bytes(size)} {what}" for size, what in ((freed, "freed"), (written, "written")) if size
    )
    if not (freed and written):
        return figures or "no bytes freed or written"
    net = freed - written
    return f"{figures}: {format_bytes(abs(net))} {'less' if net >= 0 else 'more'} on disk"


def _exit_status(report: MaintenanceReport) -> int:
    """6 if stored bytes stay damaged, else the status of the first problem; 0 for a plan."""
    if report.dry_run or not report.problems:
        return OK.number
    statuses = [STATUS_OF_CODE.get(problem.code, INTEGRITY) for problem in report.problems]
    return INTEGRITY.number if INTEGRITY in statuses else statuses[0].number
