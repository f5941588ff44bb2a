"""`torpor --help`: what there is, on one screen.

Owns its text; `command_list.py` has the commands and their sentences.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Final

from .command_list import COMMANDS, DAILY, EXIT_STATUS, command_named
from .exit_codes import describe_exit_codes
from .view.markup import escape
from .view.output import Output

_MOST_COLUMNS: Final = 80
_LEAST_COLUMNS: Final = 40
_OPTIONS: Final = (
    ("--json", "Write one JSON document to stdout."),
    ("--socket PATH", "The daemon's Unix socket, if not $TORPOR_SOCKET."),
    ("--store PATH", "Read this store's files, if not those of $TORPOR_STORE."),
    ("--namespace NAME", "Where bare names are, if not in $TORPOR_NAMESPACE."),
)


def write_help() -> None:
    """Write it to stdout."""
    output = Output(as_json=False)
    for line in help_lines(output.stdout.width):
        output.line(line)


def write_exit_statuses() -> None:
    """Write the table of exit statuses to stdout."""
    Output(as_json=False).line(escape(describe_exit_codes()))


def help_lines(columns: int = _MOST_COLUMNS) -> Iterator[str]:
    """Its lines, as markup, none wider than the terminal or 80 columns. There it has at most 40."""
    columns = max(_LEAST_COLUMNS, min(columns, _MOST_COLUMNS))
    yield "Usage: torpor [OPTIONS] COMMAND [ARGUMENTS]..."
    yield ""
    yield from _wrapped("Local language-model agents with a memory that survives. `torpor demo` shows it.", columns)
    yield ""
    yield "[bold]Every day[/]"
    for name in DAILY:
        command = command_named(name)
        if command is not None:
            yield from _row(name, command.brief, columns, at=10, styles=("cyan", ""))
    yield ""
    yield "[bold]And[/]"
    panels: dict[str, list[str]] = {}
    for command in COMMANDS:
        if command.name not in DAILY:
            panels.setdefault(command.panel, []).append(command.name)
    for panel, names in panels.items():
        yield from _row(panel, "  ".join(names), columns, at=22, styles=("dim", "cyan"))
    yield ""
    yield "[bold]Options, before a command or behind it[/]"
    for option, text in _OPTIONS:
        yield from _row(option, text, columns, at=20)
    yield "  --version, --help"
    yield ""
    yield from _wrapped("`torpor COMMAND --help` explains a command by example,", columns)
    yield from _wrapped(f"`torpor help {EXIT_STATUS}` what a script may rely on.", columns)


def _row(name: str, text: str, columns: int, *, at: int, styles: tuple[str, str] = ("", "")) -> Iterator[str]:
    """A name, and from a column on its text, broken between words."""
    head = f"  {_styled(name, styles[0])}{'':{at - 2 - len(name)}}"
    for line in textwrap.wrap(text, columns - at, break_on_hyphens=False):
        yield f"{head}{_styled(line, styles[1])}"
        head = " " * at


def _styled(text: str, style: str) -> str:
    return f"[{style}]{text}[/]" if style else text


def _wrapped(text: str, columns: int) -> list[str]:
    """Lines of a text. A command in it is not broken."""
    whole = re.sub("`.*?`", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    lines = textwrap.wrap(whole, columns, break_on_hyphens=False)
    return [re.sub("`(.*?)`", r"[cyan]\1[/]", line).replace("\N{NO-BREAK SPACE}", " ") for line in lines]
