"""`torpor --help`: what there is, on one screen.

Owns its text; `command_list.py` has the commands and their sentences.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .command_list import COMMANDS, DAILY, command_named
from .exit_codes import describe_exit_codes
from .view.markup import escape
from .view.output import Output

EXIT_STATUS = "exit-status"  # the topic of `torpor help` that is no command
_COLUMNS = 80
_NAMES_AT = 22


def write_help() -> None:
    """Write it to stdout."""
    output = Output(as_json=False)
    for line in help_lines():
        output.line(line)


def write_exit_statuses() -> None:
    """Write the table of exit statuses to stdout."""
    Output(as_json=False).line(escape(describe_exit_codes()))


def help_lines() -> Iterator[str]:
    """Its lines, as markup: at most 40, none wider than 80 columns."""
    yield "Usage: torpor [OPTIONS] COMMAND [ARGUMENTS]..."
    yield ""
    yield "Local language-model agents with a memory that survives. [cyan]torpor demo[/] shows it."
    yield ""
    yield "[bold]Every day[/]"
    for name in DAILY:
        command = command_named(name)
        if command is not None:
            yield f"  [cyan]{name:<8}[/]{command.brief}"
    yield ""
    yield "[bold]And[/]"
    panels: dict[str, list[str]] = {}
    for command in COMMANDS:
        if command.name not in DAILY:
            panels.setdefault(command.panel, []).append(command.name)
    for panel, names in panels.items():
        first, *more = textwrap.wrap("  ".join(names), _COLUMNS - _NAMES_AT, break_on_hyphens=False)
        yield f"  [dim]{panel:<{_NAMES_AT - 2}}[/][cyan]{first}[/]"
        for line in more:
            yield f"{'':{_NAMES_AT}}[cyan]{line}[/]"
    yield ""
    yield "[bold]Options, before a command or behind it[/]"
    yield "  --json            Write one JSON document to stdout."
    yield "  --socket PATH     The daemon's Unix socket, if not $TORPOR_SOCKET."
    yield "  --store PATH      Read this store's files, if not those of $TORPOR_STORE."
    yield "  --namespace NAME  Where bare names are, if not in $TORPOR_NAMESPACE."
    yield "  --version, --help"
    yield ""
    yield "[cyan]torpor COMMAND --help[/] explains a command by example,"
    yield f"[cyan]torpor help {EXIT_STATUS}[/] what a script may rely on."
