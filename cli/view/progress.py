"""The bar of long work on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from ...memvid.units import format_bytes, format_count

_SHORTEST_BAR, _LONGEST_BAR = 6, 28
_RATED_S = 0.5  # what came in less time says nothing of the rate
_FIGURES_COLUMNS = 62  # "100% 123,456 of 123,456 tokens, 1,234/s 0:00:00 0:00:00" with the blanks between


@contextmanager
def progress_on(console: Console, what: str, unit: str, *, roomy: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of long work, and leave no trace. Gives the function that takes reports: done, total. roomy:
    whether the terminal has room for all figures, and for a bar in the rest."""
    bar_width = min(_LONGEST_BAR, console.width - len(what) - _FIGURES_COLUMNS)
    columns = (
        TextColumn("[dim]{task.description}", table_column=Column(no_wrap=True)),
        *([BarColumn(bar_width=bar_width)] if roomy and bar_width >= _SHORTEST_BAR else []),
        *([TaskProgressColumn()] if roomy else []),
        Amount(Column(no_wrap=True)),
        TimeElapsedColumn(Column(no_wrap=True)),
        *([TimeRemainingColumn(table_column=Column(no_wrap=True))] if roomy else []),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, unit=unit)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield report


class Amount(ProgressColumn):
    """How much is done, of how much, and how much per second, once it has taken some time."""

    def render(self, task: Task) -> Text:
        if not task.completed and not task.total:
            return Text()  # no report yet
        unit = task.fields["unit"]
        write = format_bytes if unit == "bytes" else format_count
        count = write(round(task.completed)) + (f" of {write(round(task.total))}" if task.total else "")
        speed = task.speed or 0.0
        rate = f", {write(round(speed))}/s" if 0.0 < speed * _RATED_S <= task.completed else ""
        return Text(f"{count}{'' if unit == 'bytes' else f' {unit}'.rstrip()}{rate}", style="dim")
