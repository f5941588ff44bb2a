"""The output of a command: data to stdout, progress and remarks to stderr, one JSON document with `--json`.

Rules:
- stdout holds what was asked for and nothing else; piped, it is plain text, and a table is one line a row, its cells
  set apart by a tab.
- stderr holds what happens meanwhile: drawn live on a terminal; with `--json` silent, but for notices that a program
  waits for. No line of it is broken inside a word; piped, none is broken at all.
- Every JSON document and error object carries `schema_version`; ids are never shortened there.

Knows nothing of sessions, stores or sockets.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ...errors import TorporError
from ...memvid.answers import Finding
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ..exit_codes import exit_status_of
from .advice import naming_store, naming_store_in, way_out
from .streams import require_reader

ROOMY_COLUMNS = 72  # a narrower terminal is shown fewer figures of progress, no bar, and no table cut short
SCHEMA_VERSION = 1  # of every JSON document of this command line; grows when a field changes or goes
PIPED_WIDTH = 120  # columns in a file or a pipe: there is no terminal to ask, and $COLUMNS is another's

# Delete and the C1 controls; marks of direction and invisible line ends; halves of surrogate pairs.
_UNSHOWN = ((0x7F, 0x9F), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))

_MADE_UP = re.compile(r"-(?:[0-9a-f]{8}){1,2}\Z")
"""The end of the name of a session that the daemon or the server of HTTP had to name."""

_SHOWN_NAMES = 8  # of sessions in one remark

OnProgress = Callable[[int, int], None]


class Output:
    """The output of one run of a command, as text or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.stdout = _console(sys.stdout)
        self.stderr = _console(sys.stderr)

    def document(self, command: str, body: Mapping[str, Any]) -> None:
        """Write the one JSON document of a command, whole, on one line."""
        document = {"schema_version": SCHEMA_VERSION, "command": command, **naming_store_in(body)}
        _write_json(sys.stdout, document)

    def told(self, command: str, record: Any) -> bool:
        """With `--json`, write a record as the document of a command. Gives whether that was asked for."""
        if self.as_json:
            self.document(command, asdict(record))
        return self.as_json

    def remark(self, markup: str) -> None:
        """Write a remark to stderr; nothing with `--json`."""
        if not self.as_json:
            _print_lines(self.stderr, markup)

    def notice(self, facts: Mapping[str, Any]) -> None:
        """With `--json`, write an object on one line of stderr."""
        if self.as_json:
            _write_json(sys.stderr, facts)

    def show(self, drawn: RenderableType) -> None:
        """Draw data on stdout: as wide as the terminal; with none, every row and text as one line."""
        self.stdout.print(drawn, soft_wrap=not self.stdout.is_terminal)

    def line(self, markup: str) -> None:
        """Write one line of data to stdout, unbroken on any terminal."""
        self.stdout.print(markup, highlight=False, soft_wrap=True)

    def stream(self, text: str) -> None:
        """Write a piece of generated text, unchanged but for terminal control characters. Raises ReaderGone: its reader
        is gone."""
        sys.stdout.write(neutralise(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
        require_reader()

    @contextmanager
    def progress(self, what: str, *, unit: str = "") -> Iterator[OnProgress]:
        """Show the progress of long work on a terminal's stderr, and leave no trace of it.

        Work that makes no report shows its time. A narrow terminal gets a shorter bar, a narrower one fewer figures.
        """
        if self.as_json or not self.stderr.is_terminal:
            yield _ignore_progress
            return
        from .progress import progress_on  # for a terminal alone

        with progress_on(self.stderr, what, unit, roomy=self.stderr.width >= ROOMY_COLUMNS) as report:
            yield report


def report_error(error: TorporError, *, as_json: bool) -> int:
    """Write an expected failure as one line (or one JSON object) on stderr, and give its exit status."""
    status = exit_status_of(error.code)
    write_failure(error.code, error.message + way_out(error), status, error.details, as_json=as_json)
    return status


def write_failure(code: str, message: str, status: int, details: Mapping[str, Any], *, as_json: bool) -> None:
    """Write the error of a run, as one line or one JSON object."""
    if not as_json:
        _print_lines(_console(sys.stderr), f"[bold red]error[/] [dim]{plain(code)}[/]  {plain(message)}")
        return
    error = {"code": code, "message": message, "details": dict(details)}
    _write_json(sys.stderr, {"schema_version": SCHEMA_VERSION, "error": error, "exit_status": status})


class PlainTable(Table):
    """A table without lines. Piped, each row is one line with tabs between cells. On a terminal too narrow for its
    words, the columns of `first_to_go` are left out, and a line below says so; where that is not enough, the cells of a
    row stand one below the other."""

    first_to_go: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        if console.is_terminal:
            gone = self._too_many(console, options.max_width)
            if gone is None:
                yield from self._one_below_the_other(rows)
            elif not gone:
                yield from super().__rich_console__(console, options)
            else:
                yield from self._without(gone).__rich_console__(console, options)
                yield Text(f"not shown, for want of room: {', '.join(gone)} (--json has all)", style="dim")
            return
        if self.show_header:
            rows.insert(0, tuple(column.header for column in self.columns))
        for row in rows:
            cells = [console.render_str(str(cell)).plain.strip() for cell in row]
            if any(cells):
                yield Segment("\t".join(cells) + "\n")  # a Text would have its tabs made blanks

    def _too_many(self, console: Console, width: int) -> tuple[str, ...] | None:
        """The columns to leave out so that no word breaks; None if the others would still be too wide."""
        if not self.show_header or (width >= ROOMY_COLUMNS and not self.first_to_go):
            return ()
        widths = {str(column.header).strip(): self._least_width(column, console) for column in self.columns}
        for count in range(len(self.first_to_go) + 1):
            gone = self.first_to_go[:count]
            if sum(each for name, each in widths.items() if name not in gone) <= width:
                return gone
        return None

    def _without(self, gone: tuple[str, ...]) -> Table:
        kept = [column for column in self.columns if str(column.header).strip() not in gone]
        table = _bare_table()
        for column in kept:
            table.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
        for row in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*row)
        return table

    @staticmethod
    def _least_width(column: Column, console: Console) -> int:
        """The width that a column needs so that no word or whole cell breaks, with the blanks behind it."""
        parts = [str(column.header), *map(str, column.cells)]
        measured = [console.render_str(part).__rich_measure__(console, console.options) for part in parts]
        return max(each.maximum if column.no_wrap else each.minimum for each in measured) + 2

    def _one_below_the_other(self, rows: list[tuple[RenderableType, ...]]) -> Iterator[RenderableType]:
        for row in rows:
            if row is not rows[0]:
                yield ""
            facts = facts_table()
            for column, cell in zip(self.columns, row, strict=True):
                if str(cell).strip():
                    facts.add_row(f"  {str(column.header).strip()}", str(cell).strip())
            yield facts


def facts_table() -> Table:
    """Make the two-column table of one thing's facts: names dim, values as they are."""
    table = PlainTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def rows_table(
    *columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = (), first_to_go: tuple[str, ...] = ()
) -> Table:
    """Make a plain table with a row for each thing; columns in `whole` are never broken. first_to_go: those that a
    narrow terminal does without, the least important first."""
    table = _bare_table()
    table.first_to_go = first_to_go
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in whole, overflow="fold"
        )
    return table


def _bare_table() -> PlainTable:
    return PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def plain(data: object) -> str:
    """Make data safe in markup, on one line: it cannot steer the terminal or be read as markup (threat 46).

    All data in a line, a remark or a table passes here: names, paths, labels, messages. The commands that messages
    advise name the store, if --store did.
    """
    return escape(neutralise(naming_store(str(data))).replace("\n", "␊").replace("\t", "␉"))


def typed(command: str) -> str:
    """Markup of a command that is advised, as `plain` has it in a message."""
    return re.sub(r"`(.*?)`", r"[cyan]\1[/]", plain(f"`{command}`"))


def neutralise(text: str) -> str:
    """Show control characters as symbols, so that stored or generated text cannot steer a terminal (threat 46).

    Line ends and tabs stay. Half characters, which no stream can write, and marks of writing direction become a
    replacement character.
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    point = ord(character)
    if point < 0x20 and character not in "\n\t":
        return chr(0x2400 + point)
    return "\N{REPLACEMENT CHARACTER}" if any(first <= point <= last for first, last in _UNSHOWN) else character


def _write_json(stream: TextIO, document: Mapping[str, Any]) -> None:
    """Write a document on one line, in ASCII where the stream cannot take other characters."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=str)
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(document, ensure_ascii=True, allow_nan=False, default=str)
    stream.write(text + "\n")
    stream.flush()


def _console(file: Any) -> Console:
    """Make a console as wide as the terminal, or as PIPED_WIDTH where there is none."""
    width = None if file.isatty() else PIPED_WIDTH
    # Without emoji: the name of a session or a file may well hold a word between colons.
    return Console(file=file, width=width, highlight=False, emoji=False)


def _print_lines(console: Console, markup: str) -> None:
    """Write a remark, broken between words on a narrow terminal and unbroken in a pipe."""
    text = console.render_str(markup)
    console.print(_between_words(text, console.width) if console.is_terminal else text, soft_wrap=True)


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


def _ignore_progress(done: int, total: int) -> None:
    """Show nothing."""


def describe_turns(sessions: Sequence[SessionUri]) -> str:
    """Markup of a remark: these have turns that no version has, so that a look at the files lacks them. Names that a
    user has given come first."""
    told = sorted(sessions, key=lambda uri: _MADE_UP.search(uri.name) is not None)
    names = ", ".join(f"{uri.namespace}/{uri.name}" for uri in told[:_SHOWN_NAMES])
    more = f" and {format_plural(len(told) - _SHOWN_NAMES, 'other')}" if len(told) > _SHOWN_NAMES else ""
    return (
        f"[yellow]in the journal alone[/]  the last turns of {plain(names)}{more}. A daemon makes versions of them when"
        f" it starts: {typed('torpor ensure')}. One that runs makes them of a session by its name:"
        f" {typed(f'torpor save {told[0].namespace}/{told[0].name}')}"
    )


def render_problem(problem: Finding) -> str:
    """Markup of a problem: its code and path, then the sentence."""
    return f"[red]{plain(problem.code)}[/]  {plain(problem.path)}\n  {plain(problem.message)}"
