"""Tables on a terminal: laid out as rich's own are, and without its work for each cell."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from torpor.cli.view.drawing import draw
from torpor.cli.view.table import Column, PlainTable

ROWS = (
    ("notes", "[green]awake[/]", "1,234", "日本語 [dim]and words[/]"),
    ("a-much-longer-name", "[blue]stored[/][blue]*[/]", "5", ""),
    ("", r"\[no tag]", "–", "two\nlines"),
)


class _Drawn:
    def __init__(self, table: PlainTable) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: Any) -> Any:
        return draw(self._table, console, options)


def on_terminal(drawn: Any, width: int = 80, console: Console | None = None) -> str:
    console = console or terminal(width)
    console.print(drawn)
    told: Any = console.file
    return str(told.getvalue())


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="standard", highlight=False, emoji=False
    )


def plain_lines(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]


def made(rows: Sequence[Sequence[str]], *, show_header: bool = True) -> PlainTable:
    columns = [Column("NAME", whole=True), Column("STATE", style="dim"), Column("TOKENS", right=True), Column("TOLD")]
    table = PlainTable(columns, show_header=show_header)
    for row in rows:
        table.add_row(*row)
    return table


@pytest.mark.parametrize("show_header", [True, False])
def test_what_has_room_is_laid_out_as_a_table_of_rich(show_header: bool) -> None:
    theirs = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)
    for name, justify in (("NAME", "left"), ("STATE", "left"), ("TOKENS", "right"), ("TOLD", "left")):
        theirs.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in ROWS:
        theirs.add_row(*row)
    ours = plain_lines(on_terminal(_Drawn(made(ROWS, show_header=show_header))))
    assert ours == plain_lines(on_terminal(theirs))


def test_the_widest_give_way_and_whole_ones_last() -> None:
    rows = [("notes", "some words to break", "1,234", "x" * 30)]
    assert plain_lines(on_terminal(_Drawn(made(rows, show_header=False)), width=40)) == [
        "notes  some words    1,234  " + "x" * 12,
        "       to break             " + "x" * 12,
        "                            " + "x" * 6,
    ]
    assert plain_lines(on_terminal(_Drawn(made(rows, show_header=False)), width=12))[0] == "not  s  1  x"


def test_a_style_is_that_of_its_cell_and_not_of_the_blanks_before_it() -> None:
    told = on_terminal(_Drawn(made([("notes", "[green]awake[/]", "1", "x")], show_header=False)))
    assert told == "notes  \x1b[2;32mawake\x1b[0m  1  x\n"


def test_markup_that_stands_in_many_rows_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    console, read = terminal(80), []
    whole = console.render_str
    monkeypatch.setattr(console, "render_str", lambda text, **more: read.append(text) or whole(text, **more))
    told = on_terminal(_Drawn(made([ROWS[0]] * 500)), console=console)
    assert len(plain_lines(told)) == 501
    assert sorted(read) == sorted(["[green]awake[/]", "日本語 [dim]and words[/]"])
