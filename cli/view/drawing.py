"""What a terminal shows: tables and lines of markup, drawn by rich. Imported only where something is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .lines import Lines
    from .table import Column, PlainTable

ROOMY_COLUMNS = 72  # a narrower terminal is shown fewer figures of progress, no bar, and no table cut short


def draw(table: PlainTable, console: Console, options: ConsoleOptions) -> RenderResult:
    """Draw a table as wide as the terminal; with none, as its lines."""
    if not console.is_terminal:
        for line in table.lines():
            yield Segment(line + "\n")  # a Text would have its tabs made blanks
        return
    gone = _too_many(table, console, options.max_width)
    if gone is None:
        yield from _one_below_the_other(table)
        return
    yield _as_rich(table, [column for column in table.columns if column.header.strip() not in gone])
    if gone:
        yield Text(f"not shown, for want of room: {', '.join(gone)} (--json has all)", style="dim")


def _as_rich(table: PlainTable, columns: Sequence[Column]) -> Table:
    drawn = _bare_table(show_header=table.show_header)
    for each in columns:
        justify: Any = "right" if each.right else "left"
        drawn.add_column(each.header, justify=justify, no_wrap=each.whole, overflow="fold", style=each.style or None)
    for row in zip(*(column.cells for column in columns), strict=True):
        drawn.add_row(*row)
    return drawn


def _bare_table(*, show_header: bool) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=show_header)


def _too_many(table: PlainTable, console: Console, width: int) -> tuple[str, ...] | None:
    """The columns to leave out so that no word breaks; None if the others would still be too wide."""
    if not table.show_header or (width >= ROOMY_COLUMNS and not table.first_to_go):
        return ()
    widths = {column.header.strip(): _least_width(column, console) for column in table.columns}
    for count in range(len(table.first_to_go) + 1):
        gone = table.first_to_go[:count]
        if sum(each for name, each in widths.items() if name not in gone) <= width:
            return gone
    return None


def _least_width(column: Column, console: Console) -> int:
    """The width that a column needs so that no word or whole cell breaks, with the blanks behind it."""
    parts = [column.header, *map(str, column.cells)]
    measured = [console.render_str(part).__rich_measure__(console, console.options) for part in parts]
    return max(each.maximum if column.whole else each.minimum for each in measured) + 2


def _one_below_the_other(table: PlainTable) -> Iterator[RenderableType]:
    for number, row in enumerate(table.rows()):
        if number:
            yield ""
        facts = _bare_table(show_header=False)
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            if str(cell).strip():
                facts.add_row(f"  {column.header.strip()}", str(cell).strip())
        yield facts


LANE_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def draw_lines(lines: Lines, console: Console, options: ConsoleOptions) -> RenderResult:
    """Draw lines of parts, none of them broken."""
    if not console.is_terminal:
        for each in lines.lines():
            yield Segment(each + "\n")
        return
    rows = [(_drawn_lanes(lanes), list(map(console.render_str, parts))) for lanes, parts in lines.rows]
    columns = [parts for _, parts in rows if parts]
    widths = [max(each.cell_len for each in column) for column in zip_longest(*columns, fillvalue=Text())]
    whole = [_line(lanes, parts, widths if lines.aligned else []) for lanes, parts in rows]
    count = len(widths)
    while count > lines.needed and max((line.cell_len for line in whole), default=0) > options.max_width:
        count -= 1
        whole = [_line(lanes, parts[:count], widths if lines.aligned else []) for lanes, parts in rows]
    for drawn in whole:
        drawn.truncate(options.max_width, overflow="ellipsis")
        yield drawn
    if gone := lines.names[count : len(widths)]:
        yield Text(f"not shown, for want of room: {', '.join(gone)} (--json has all)", style="dim")


def _drawn_lanes(lanes: Sequence[tuple[str, int | None]]) -> Text:
    drawn = Text()
    for signs, lane in lanes:
        drawn.append(signs, None if lane is None else LANE_COLORS[lane % len(LANE_COLORS)])
    return drawn


def _line(lanes: Text, parts: Sequence[Text], widths: Sequence[int]) -> Text:
    """The parts behind the lanes, each as wide as it has to be; without widths, those that are there."""
    line = Text(end="\n").append_text(lanes)
    for at, part in enumerate(parts):
        width = widths[at] if widths else 0
        if part or width:
            line.append("  " if line else "").append_text(part)
            line.append(" " * max(0, width - part.cell_len))
    line.rstrip()
    return line


def console_on(file: Any, width: int | None) -> Console:
    """A console of rich. width: None is that of the terminal."""
    # Without emoji: the name of a session or a file may well hold a word between colons.
    return Console(file=file, width=width, highlight=False, emoji=False)


def print_lines(console: Console, markup: str) -> None:
    """Write a remark to a terminal, broken between words where it is narrow."""
    console.print(_between_words(console.render_str(markup), console.width), soft_wrap=True)


def _between_words(text: Text, width: int) -> Text:
    """Break a text into lines between words; a word that is wider than the terminal, a path say, stays whole."""
    breaks, column = [], 0
    for found in re.finditer(r"\n|\S+[^\S\n]*|[^\S\n]+", text.plain):
        word = found[0]
        if column and column + cell_len(word.rstrip()) > width:
            breaks.append(found.start())
            column = 0
        column = 0 if word == "\n" else column + cell_len(word)
    lines = text.divide(breaks)
    for line in lines[:-1]:
        line.rstrip()
    return Text("\n").join(lines)
