"""Says what the demo does while it does it: one line a step, with how long it took.

On a terminal a running step has a bar or a spinner; in a log each step is one plain line when it is over; with --json
nothing is said. Every step's time is kept for the report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..view.formatting import format_seconds
from ..view.output import OnProgress, Output, plain

TIME_COLUMNS = 9  # columns of a step's time at the right: "2 min 05 s" never occurs in one step
MAX_LINE_COLUMNS = 110  # a line longer than this is hard to read, however wide the terminal is


@dataclass(slots=True)
class Step:
    """One thing the demo does; `outcome` is what its line says in the end."""

    what: str
    outcome: str = ""
    seconds: float = 0.0
    on_progress: OnProgress = lambda done, total: None


@dataclass(slots=True)
class Narrator:
    """Tells steps on stderr and remembers them."""

    output: Output
    steps: list[Step] = field(default_factory=list)

    def chapter(self, title: str) -> None:
        """Begin a new part of the story."""
        self.output.remark(f"\n[bold]{plain(title)}[/]")

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Run a step; its line appears when it is over. The caller may set `outcome` and report progress."""
        step = Step(what)
        started = time.perf_counter()
        if self.output.as_json or not self.output.stderr.is_terminal:
            yield step
        else:
            with self._bar(what) as bar:
                task = bar.add_task(plain(what), total=None)
                step.on_progress = lambda done, total: bar.update(task, completed=done, total=total or None)
                yield step
        step.seconds = step.seconds or time.perf_counter() - started
        self.steps.append(step)
        self._tell(step)

    def _bar(self, what: str) -> Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        return Progress(*columns, console=self.output.stderr, transient=True)

    def _tell(self, step: Step) -> None:
        if self.output.as_json:
            return
        outcome, seconds = step.outcome or plain(step.what), f"[cyan]{format_seconds(step.seconds)}[/]"
        if not self.output.stderr.is_terminal:
            self.output.remark(f"[green]✓[/] {outcome}  {seconds}")
            return
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(ratio=1, overflow="fold")
        line.add_column(width=TIME_COLUMNS, justify="right", no_wrap=True)
        line.width = min(self.output.stderr.width, MAX_LINE_COLUMNS)
        line.add_row("[green]✓[/]", outcome, seconds)
        self.output.stderr.print(line)
