"""All commands as one program: which one a command line means, and the exit status of its failure.

`command_list.py` lists the commands. A command's module is imported at its use, so that a call waits for that module
alone. Most lines are read without typer (`plain_line.py`); the others, and all mistakes, are its (`program.py`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from ..errors import TorporError
from ..spellings import present
from .calling import guarded, write_version
from .command_list import EXIT_STATUS, command_named
from .errors import Interrupted, OutputFailed, SystemRefused, UnreadableInput
from .exit_codes import OK
from .plain_line import PlainLine, read_line
from .reach.options import NAMESPACE_VARIABLE, enter_namespace
from .view.streams import ReaderGone


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status."""
    arguments = _by_present_names(arguments)
    as_json = "--json" in arguments
    try:
        status = _run(arguments, as_json=as_json)
    except TorporError as error:
        return _report(error, as_json=as_json)
    except UnicodeError:
        if not any(_has_half_characters(argument) for argument in arguments):
            raise
        return _report(UnreadableInput("An argument is not valid text in this locale."), as_json=as_json)
    except ReaderGone:
        return OK.number
    except OSError as error:
        return _report(_refusal_of(error), as_json=as_json)
    except KeyboardInterrupt:
        return _report(Interrupted("Interrupted."), as_json=as_json)
    return status if isinstance(status, int) else OK.number


def _run(arguments: Sequence[str], *, as_json: bool) -> Any:
    name, words = (arguments[0], arguments[1:]) if arguments else ("help", ())
    if name in ("help", "--help") and (not words or words == [EXIT_STATUS]):
        from .help import write_exit_statuses, write_help  # only where they are asked for

        return write_exit_statuses() if words else write_help()
    if name == "help":
        return _run([words[0], "--help"], as_json=as_json)
    if name in ("version", "--version") and set(words) <= {"--json"}:
        return write_version(as_json=as_json)
    command = command_named(present(name))
    if command is not None:
        line = PlainLine(command.name)
        enter_namespace(line, os.environ.get(NAMESPACE_VARIABLE) or None)
        function = guarded(command)
        given = read_line(line, inspect.signature(function), words)
        if given is not None:
            return function(**given)
    from .program import call

    return call(arguments, as_json=as_json)


def _by_present_names(arguments: Sequence[str]) -> list[str]:
    """A command line with its options as they are spelled now. What stands behind `--` is no option."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = (argument.partition("=") for argument in arguments[:end])
    return [
        *(
            f"--{present(name[2:])}{is_}{value}" if name.startswith("--") else f"{name}{is_}{value}"
            for name, is_, value in options
        ),
        *arguments[end:],
    ]


def _report(error: TorporError, *, as_json: bool) -> int:
    from .view.output import report_error  # only where something failed

    return report_error(error, as_json=as_json)


def _refusal_of(error: OSError) -> TorporError:
    reason = error.strerror or str(error)
    if error.filename is None:
        return OutputFailed(f"The system took no more output: {reason}.", errno=error.errno)
    return SystemRefused(f"{os.fspath(error.filename)!r}: {reason}.", errno=error.errno, path=str(error.filename))


def _has_half_characters(text: str) -> bool:
    """Whether a text has surrogate halves, as Python makes them of bytes that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)
