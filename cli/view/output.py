"""The output of a command: data to stdout, progress and remarks to stderr, one JSON document with `--json`.

Rules:
- stdout holds what was asked for and nothing else; piped, it is plain text, and a table is one line a row, its cells
  set apart by a tab.
- stderr holds what happens meanwhile: drawn live on a terminal; with `--json` silent, but for notices that a program
  waits for.
- No sentence is broken inside a word; piped, none is broken at all.
- Every JSON document and error object carries `schema_version`; ids are never shortened there.

Knows nothing of sessions, stores or sockets.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TextIO

from ...errors import TorporError
from ...memvid.answers import Finding
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...records import Record
from ..exit_codes import exit_status_of
from .advice import naming_store, naming_store_in, way_out
from .lines import Lines
from .markup import escape, unmarked
from .streams import require_reader
from .table import PlainTable
from .table import facts_table as facts_table
from .table import rows_table as rows_table

SCHEMA_VERSION = 1  # of every JSON document of this command line; grows when a field changes or goes
PIPED_WIDTH = 120  # columns in a file or a pipe: there is no terminal to ask, and $COLUMNS is another's

# Controls but for line end and tab, delete and the C1 controls; marks of direction and invisible line ends; halves of
# surrogate pairs.
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")

_HARMLESS = re.compile(r"[A-Za-z0-9 ./:@~_,-]*", re.ASCII)
"""What most data are: nothing in it needs a look."""

_MADE_UP = re.compile(r"-(?:[0-9a-f]{8}){1,2}\Z")
"""The end of the name of a session that the daemon or the server of HTTP had to name."""

_SHOWN_NAMES = 8  # of sessions in one remark

OnProgress = Callable[[int, int], None]


class Output:
    """The output of one run of a command, as text or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def stdout(self) -> Any:
        """A console of rich on a terminal, else a `Pipe`."""
        return _console(sys.stdout)

    @cached_property
    def stderr(self) -> Any:
        """As `stdout`."""
        return _console(sys.stderr)

    def document(self, command: str, body: Mapping[str, Any]) -> None:
        """Write the one JSON document of a command, whole, on one line. body: records in it become maps."""
        document = {"schema_version": SCHEMA_VERSION, "command": command, **naming_store_in(body)}
        _write_json(sys.stdout, document)

    def told(self, command: str, record: Any, **more: Any) -> bool:
        """With `--json`, write a record as the document of a command. more: beside its fields. Gives whether that was
        asked for."""
        if self.as_json:
            self.document(command, {**more, **vars(record)})
        return self.as_json

    def remark(self, markup: str) -> None:
        """Write a remark to stderr; nothing with `--json`."""
        if not self.as_json:
            _print_lines(self.stderr, markup)

    def notice(self, facts: Mapping[str, Any]) -> None:
        """With `--json`, write an object on one line of stderr."""
        if self.as_json:
            _write_json(sys.stderr, facts)

    def show(self, *parts: str | PlainTable | Lines) -> None:
        """Draw data on stdout, one below the other: as wide as the terminal; with none, every row and text as one
        line."""
        for part in parts:
            self.stdout.print(part, soft_wrap=not self.stdout.is_terminal)

    def line(self, markup: str) -> None:
        """Write a sentence to stdout, as `remark` does to stderr."""
        _print_lines(self.stdout, markup)

    def whole_line(self, markup: str) -> None:
        """Write a line to stdout that no terminal may have broken: a part of a file, or of what is to be copied."""
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
        from .drawing import ROOMY_COLUMNS
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


def plain(data: object) -> str:
    """Make data safe in markup, on one line: it cannot steer the terminal or be read as markup (threat 46).

    All data in a line, a remark or a table passes here: names, paths, labels, messages. The commands that messages
    advise name the store, if --store did.
    """
    text = str(data)
    if _HARMLESS.fullmatch(text):
        return text
    return escape(neutralise(naming_store(text)).replace("\n", "␊").replace("\t", "␉"))


def typed(command: str) -> str:
    """Markup of a command that is advised, as `plain` has it in a message."""
    return re.sub(r"`(.*?)`", r"[cyan]\1[/]", plain(f"`{command}`"))


def neutralise(text: str) -> str:
    """Show control characters as symbols, so that stored or generated text cannot steer a terminal (threat 46).

    Line ends and tabs stay. Half characters, which no stream can write, and marks of writing direction become a
    replacement character.
    """
    return _UNSHOWN.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    point = ord(found[0])
    return chr(0x2400 + point) if point < 0x20 else "\N{REPLACEMENT CHARACTER}"


def _write_json(stream: TextIO, document: Mapping[str, Any]) -> None:
    """Write a document on one line, in ASCII where the stream cannot take other characters."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=_as_json)
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(document, ensure_ascii=True, allow_nan=False, default=_as_json)
    stream.write(text + "\n")
    stream.flush()


def _as_json(value: object) -> Any:
    return vars(value) if isinstance(value, Record) else str(value)


class Pipe:
    """A file or a pipe, to print on: text without styles, unbroken. Stands where a terminal has a console of rich."""

    is_terminal = False
    width = PIPED_WIDTH
    color_system = None

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:
        """Of the file."""
        return self._file.encoding or "ascii"

    def print(self, drawn: str | PlainTable | Lines, **_: Any) -> None:
        """Print markup, a table or lines of parts. Takes, and needs, none of the options of rich's `Console.print`."""
        lines = [unmarked(drawn).expandtabs()] if isinstance(drawn, str) else drawn.lines()
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def input(self, prompt: str) -> str:
        """The next line of standard input. Raises EOFError."""
        self._file.write(unmarked(prompt))
        self._file.flush()
        return input()


def _console(file: Any) -> Any:
    """Make a console as wide as the terminal, or a pipe where there is none."""
    told = {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys()  # rich reads them as a terminal, or as none
    if not (told or file.isatty()):
        return Pipe(file)
    from .drawing import console_on

    return console_on(file, None if file.isatty() else PIPED_WIDTH)


def _print_lines(console: Any, markup: str) -> None:
    """Write sentences, broken between words on a narrow terminal and unbroken in a pipe."""
    if not console.is_terminal:
        console.print(markup, soft_wrap=True)
        return
    from .drawing import print_lines

    print_lines(console, markup)


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
