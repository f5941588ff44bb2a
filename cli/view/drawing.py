"""What a terminal shows: tables and lines of markup, drawn by rich. Imported only where something is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from .markup import unmarked

if TYPE_CHECKING:
    from .lines import Lines
    from .table import Column, PlainTable

_Drawn = tuple[int, Sequence[Segment], int]
"""A line of a cell, with the blanks before and behind it."""

_GAP = 2  # blanks between two columns
ROOMY_COLUMNS = 72  # a narrower terminal is shown fewer figures of progress, no bar, and no table cut short


def draw(table: PlainTable, console: Console, options: ConsoleOptions) -> RenderResult:
    """Draw a table as wide as the terminal; with none, as its lines."""
    if not console.is_terminal:
        for line in table.lines():
            yield Segment(line + "\n")  # a Text would have its tabs made blanks
        return
    gone = _too_many(table, options.max_width)
    if gone is None:
        yield from _one_below_the_other(table, console, options.max_width)
        return
    shown = [column for column in table.columns if column.header.strip() not in gone]
    yield from _Rows(shown, console, options.max_width, headed=table.show_header).drawn()
    if gone:
        yield Text(f"not shown, for want of room: {', '.join(gone)} (--json has all)", style="dim")


def _too_many(table: PlainTable, width: int) -> tuple[str, ...] | None:
    """The columns to leave out so that no word breaks; None if the others would still be too wide."""
    if not table.show_header or (width >= ROOMY_COLUMNS and not table.first_to_go):
        return ()
    widths = {column.header.strip(): _least_width(column) for column in table.columns}
    for count in range(len(table.first_to_go) + 1):
        gone = table.first_to_go[:count]
        if sum(each for name, each in widths.items() if name not in gone) - _GAP <= width:
            return gone
    return None


def _least_width(column: Column) -> int:
    """The width that a column needs so that no word or whole cell breaks, with the blanks behind it."""
    if column.whole:
        return _natural_width(column, headed=True) + _GAP
    words = (word for part in (column.header, *column.cells) for word in unmarked(part).split())
    return max(map(_width_of, words), default=0) + _GAP


def _natural_width(column: Column, *, headed: bool) -> int:
    lines = (line for part in (column.header * headed, *column.cells) for line in unmarked(part).split("\n"))
    return max(map(_width_of, lines), default=0)


def _width_of(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _one_below_the_other(table: PlainTable, console: Console, width: int) -> RenderResult:
    for number, facts in enumerate(table.facts_of_rows()):
        if number:
            yield ""
        yield from _Rows(facts.columns, console, width, headed=False).drawn()


class _Rows:
    """Draws the rows of columns: a cell that is wider than its column is broken between words, then within. Written
    out for tables of thousands of rows: a table of rich took a millisecond for each."""

    def __init__(self, columns: Sequence[Column], console: Console, width: int, *, headed: bool) -> None:
        self._columns = columns
        self._console = console
        self._headed = headed
        self._widths = _shared(columns, width, headed=headed)
        self._styles = [console.get_style(column.style or "none") for column in columns]
        self._read: dict[str, list[Segment]] = {}  # markup: the same stands in many rows

    def drawn(self) -> Iterator[Segment]:
        if self._headed:
            dim = [self._console.get_style("dim")] * len(self._columns)
            yield from self._row([column.header for column in self._columns], dim)
        for row in zip(*(column.cells for column in self._columns), strict=True):
            yield from self._row(row, self._styles)

    def _row(self, cells: Sequence[str], styles: Sequence[Style]) -> Iterator[Segment]:
        drawn = list(map(self._cell, range(len(cells)), cells, styles))
        for at in range(max(map(len, drawn))):
            text = ""  # without a style, told in one piece: blanks, and cells that have none
            for lines, width in zip(drawn, self._widths, strict=True):
                before, parts, behind = lines[at] if at < len(lines) else (width, (), 0)
                text += " " * before
                for part in parts:
                    if not part.style:
                        text += part.text
                        continue
                    yield Segment(text)
                    yield part
                    text = ""
                text += " " * (behind + _GAP)
            yield Segment(f"{text.rstrip()}\n")

    def _cell(self, at: int, cell: str, style: Style) -> list[_Drawn]:
        """Its lines."""
        column, width = self._columns[at], self._widths[at]
        text = unmarked(cell)
        if "\n" in text or "\t" in text or _width_of(text) > width:
            read = self._console.render_str(cell)
            lines = read.wrap(self._console, width, overflow="fold", no_wrap=column.whole)
            for line in lines:
                line.rstrip()
            rendered = [list(line.render(self._console)) for line in lines]
        elif text is cell:
            rendered = [[Segment(cell)] if cell else []]
        else:
            if cell not in self._read:
                self._read[cell] = list(self._console.render_str(cell).render(self._console))
            rendered = [self._read[cell]]
        drawn: list[_Drawn] = []
        for parts in rendered:
            blanks = width - sum(_width_of(part.text) for part in parts)
            styled = list(Segment.apply_style(parts, style)) if style else parts
            drawn.append((blanks, styled, 0) if column.right else (0, styled, blanks))
        return drawn


def _shared(columns: Sequence[Column], width: int, *, headed: bool) -> list[int]:
    """The widths of columns side by side. Where there is too little room the widest give way, whole ones last."""
    room = width - _GAP * (len(columns) - 1)
    widths = [max(1, min(_natural_width(column, headed=headed), room)) for column in columns]
    for giving in ([at for at, column in enumerate(columns) if not column.whole], range(len(columns))):
        while sum(widths) > room and giving:
            widest = max(giving, key=widths.__getitem__)
            if widths[widest] == 1:
                break
            widths[widest] -= 1
    return widths


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
    """Write sentences to a terminal, broken between words where it is narrow."""
    console.print(_between_words(console.render_str(markup), console.width), soft_wrap=True)


def _between_words(text: Text, width: int) -> Text:
    """Break each line between words, and set what follows as far to the right as the line itself; a word that is wider
    than the terminal, a path say, stays whole."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        indent = " " * (len(line.plain) - len(line.plain.lstrip(" ")))
        breaks, column = [], 0
        for found in re.finditer(r" *\S+\s*|\s+", line.plain):
            word = found[0]
            if column > len(indent) and column + cell_len(word.rstrip()) > width:
                breaks.append(found.start())
                column = len(indent)
            column += cell_len(word)
        first, *others = line.divide(breaks) if breaks else [line]
        lines += [first, *(Text(indent).append_text(other) for other in others)]
    for line in lines[:-1]:
        line.rstrip()
    return Text("\n").join(lines)
