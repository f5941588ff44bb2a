"""Tables without lines: rows of things, and the facts of one thing.

Piped, each row is one line with tabs between its cells, made here without rich. On a terminal `drawing.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from .markup import unmarked


@dataclass(slots=True)
class Column:
    """A column, and the markup of its cells. right: set to the right. whole: a cell is never broken."""

    header: str
    right: bool = False
    whole: bool = False
    style: str = ""
    cells: list[str] = field(default_factory=list)


class PlainTable:
    """A table without lines. On a terminal too narrow for its words, the columns of `first_to_go` are left out, and a
    line below says so; where that is not enough, the cells of a row stand one below the other."""

    def __init__(self, columns: list[Column], *, show_header: bool = True, first_to_go: tuple[str, ...] = ()) -> None:
        self.columns = columns
        self.show_header = show_header
        self.first_to_go = first_to_go

    def add_row(self, *cells: str) -> None:
        """Add a row. Cells that are left out are empty."""
        for column, cell in zip_longest(self.columns, cells, fillvalue=""):
            column.cells.append(cell)  # type: ignore[union-attr]  # no row has more cells than there are columns

    def rows(self) -> list[tuple[str, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def facts_of_rows(self) -> Iterator[PlainTable]:
        """Each row as facts: for a terminal that has no room for the columns side by side."""
        for row in self.rows():
            facts = facts_table()
            for column, cell in zip(self.columns, row, strict=True):
                if cell.strip():
                    facts.add_row(f"  {column.header.strip()}", cell.strip())
            yield facts

    def lines(self) -> Iterator[str]:
        """Its rows as a pipe gets them, the header first; a row without a word is left out."""
        rows = self.rows()
        if self.show_header:
            rows.insert(0, tuple(column.header for column in self.columns))
        for row in rows:
            cells = [unmarked(cell).strip() for cell in row]
            if any(cells):
                yield "\t".join(cells)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from .drawing import draw  # for a terminal alone

        return draw(self, console, options)


def facts_table() -> PlainTable:
    """Make the two-column table of one thing's facts: names dim, values as they are."""
    return PlainTable([Column("", whole=True, style="dim"), Column("")], show_header=False)


def rows_table(
    *columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = (), first_to_go: tuple[str, ...] = ()
) -> PlainTable:
    """Make a plain table with a row for each thing; columns in `whole` are never broken. first_to_go: those that a
    narrow terminal does without, the least important first."""
    made = [Column(name, right=name in right, whole=name in whole) for name in columns]
    return PlainTable(made, first_to_go=first_to_go)
