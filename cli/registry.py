"""All commands as one program: their common help, and the exit status of a failure.

Owns the text of `torpor --help`, and the mapping of an exception to an exit status. `command_list.py` lists the
commands. A command's module is imported at its use, so that a call waits for that module alone.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import TorporError
from ..spellings import present
from .command_list import COMMANDS, Command
from .errors import Interrupted, InvalidUsage, OutputFailed, SystemRefused, UnreadableInput
from .exit_codes import OK, USAGE, describe_exit_codes
from .reach.options import (
    NAMESPACE_PARAMETER,
    NAMESPACE_VARIABLE,
    JsonOption,
    SocketOption,
    StoreOption,
    enter_namespace,
    option,
    takes_namespace,
)
from .view.advice import advising_for
from .view.streams import ReaderGone

INTRODUCTION = """Language-model agents with a memory that survives.

A session holds what an agent has read and written, as live model state. [cyan]sleep[/] puts that state on disk,
[cyan]wake[/] puts it back, and the agent goes on at the next token with nothing read again: after an idle hour, a
crash, a reboot.

[bold]First steps[/]

[cyan]torpor demo[/]                  see it happen: sleep, kill -9, wake, compare
[cyan]torpor ensure[/]                start a daemon, if none runs
[cyan]torpor chat helper[/]           talk with a session
[cyan]torpor sleep helper[/]          put it on disk
[cyan]torpor ls[/]                    see what there is

[cyan]torpor COMMAND --help[/] explains each command by example. Data goes to stdout, progress to stderr; --json gives
one JSON document. --json, --socket, --store and --namespace may stand before the command or after it.
[dim]TORPOR_SOCKET and TORPOR_STORE say where daemon and store are, TORPOR_NAMESPACE where bare names are looked for;
NO_COLOR is respected.[/]
"""

_ELSEWHERE = {
    **dict.fromkeys(("list", "ps", "sessions"), "ls"),
    **dict.fromkeys(("inspect", "info", "log", "history"), "show"),
    **dict.fromkeys(("delete", "remove", "destroy"), "rm"),
    **dict.fromkeys(("top", "watch", "monitor"), "events"),
    **dict.fromkeys(("status", "check", "version"), "doctor"),
    **dict.fromkeys(("start", "up", "run"), "ensure"),
    **dict.fromkeys(("kill", "down", "shutdown"), "stop"),
    **dict.fromkeys(("read", "add", "ingest"), "append"),
    **dict.fromkeys(("ask", "talk"), "chat"),
    **dict.fromkeys(("save-as", "cp", "copy", "clone", "branch"), "fork"),
}
"""What other tools call a command, and its name here."""

_SHARED = ("as_json", "socket", "store")  # the options of `_root` handed to a command; it refuses those it lacks

# Typer may bring its own copy of click; its public BadParameter leads to the base class of wrong usage in either case.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """All commands. Shared options before a command are handed to it as if they stood behind it. Ctrl-C in a command,
    or while its module is imported, is an error that is reported like others; typer would end silently."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _made_fit(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        try:
            name, _, rest = super().resolve_command(ctx, [present(args[0]), *args[1:]])
        except _UsageError as error:
            if meant := _meant_by(args[0]):
                error.message = f"{error.message.rstrip('.')}. Did you mean {' or '.join(map(repr, meant))}?"
            raise
        return name, name and load_command(name), [*self._given_before(ctx), *rest]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted.") from None

    def _given_before(self, context: Any) -> list[str]:
        given: list[str] = []
        for each in self.get_params(context):
            value = context.params.get(each.name)
            if each.name in _SHARED and value:
                given += [each.opts[0]] if value is True else [each.opts[0], str(value)]
        return given


def _meant_by(word: str) -> Sequence[str]:
    """The commands that somebody may have meant by a word that is none. Who mistypes rarely misses the first letter."""
    meant = _ELSEWHERE.get(word)
    names = [command.name for command in COMMANDS if command.name[0] == word[:1]]
    return [meant] if meant else difflib.get_close_matches(word, names, cutoff=0.7)


class _Command(TyperCommand):
    """One command. Its help shows no value behind a flag, and its arguments as the reference does."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _made_fit(super().get_params(ctx))


def _made_fit(parameters: list[Any]) -> list[Any]:
    """Show no value behind a flag and no braces around an argument. An option that was not given stays None unchecked:
    typer's check would import pydantic."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            optional = not (parameter.required or name.startswith("["))
            parameter.get_usage_pieces = functools.partial(_usage_pieces, f"[{name}]" if optional else name)
        if not (parameter.required or parameter.multiple or parameter.nargs != 1):
            parameter.process_value = functools.partial(_process_value, parameter)
    return parameters


def _usage_pieces(name: str, _context: Any) -> list[str]:
    return [name]


def _process_value(parameter: Any, context: Any, value: Any) -> Any:
    if value is not None:
        return type(parameter).process_value(parameter, context, value)
    return parameter.callback(context, parameter, None) if parameter.callback else None


@functools.cache
def _program() -> Any:
    """The program, made once: that takes longer than most commands. Each command is only its line of help until it is
    used."""
    epilog = f"[bold]Exit status[/]\n\n{describe_exit_codes()}"
    app = _app(name="torpor", cls=_Commands, suggest_commands=False)
    app.callback(invoke_without_command=True, help=_flowing(INTRODUCTION), epilog=epilog)(_root)
    for command in COMMANDS:
        app.command(command.name, help=command.summary, rich_help_panel=command.panel)(_listed)
    return typer.main.get_command(app)


@functools.cache
def load_command(name: str) -> Any:
    """Give a command with its options and its whole help. Imports its module."""
    command = next(command for command in COMMANDS if command.name == name)
    function = function_of(command)
    app = _app(add_completion=False)
    text = f"{command.summary}\n\n{inspect.cleandoc(function.__doc__ or '')}"
    app.command(name, cls=_Command, help=_flowing(text))(_guarded(function))
    return typer.main.get_command(app)


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(
        rich_markup_mode="rich", pretty_exceptions_enable=False, pretty_exceptions_show_locals=False, **settings
    )


def _listed() -> None:
    """The entry of a command in the list of all."""


def function_of(command: Command) -> Callable[..., Any]:
    """Give the function of a command. Imports its module."""
    module, _, name = command.function.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return function


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status."""
    arguments = _by_present_names(arguments)
    as_json = "--json" in arguments
    try:
        status = _program()(args=list(arguments), prog_name="torpor", standalone_mode=False)
    except TorporError as error:
        return _report(error, as_json=as_json)
    except _UsageError as error:
        return _report_usage(error, arguments, as_json=as_json)
    except UnicodeError:
        if not any(_has_half_characters(argument) for argument in arguments):
            raise
        return _report(UnreadableInput("An argument is not valid text in this locale."), as_json=as_json)
    except ReaderGone:
        return OK.number
    except OSError as error:
        return _report(_refusal_of(error), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _report(Interrupted("Interrupted."), as_json=as_json)
    return status if isinstance(status, int) else OK.number


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


def _root(
    context: typer.Context,
    version: Annotated[bool, option("--version", "Show the version and exit.")] = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    namespace: Annotated[
        str | None,
        option(
            "--namespace NAME",
            "Work in this namespace: bare names are names of it, and lists show its sessions.",
            is_eager=True,
            envvar=NAMESPACE_VARIABLE,
            callback=enter_namespace,
        ),
    ] = None,
) -> None:
    if version and as_json:
        from .view.output import Output

        Output(as_json=True).document("version", {"version": __version__})
    elif version:
        print(f"torpor {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Have what a command advises name the store of --store."""

    @functools.wraps(command)
    def guarded(**arguments: Any) -> Any:
        arguments.pop(NAMESPACE_PARAMETER.name, None)  # its callback has used it
        with advising_for(arguments.get("store")):
            return command(**arguments)

    # Typer reads the options from these; the command's own annotations are text that only its module can resolve.
    signature = inspect.signature(command, eval_str=True)
    if takes_namespace(signature):
        signature = signature.replace(parameters=[*signature.parameters.values(), NAMESPACE_PARAMETER])
    guarded.__signature__ = signature  # type: ignore[attr-defined]
    guarded.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return guarded


def _flowing(text: str) -> str:
    """Join the lines of each paragraph, so that help fills any width; keep the text behind a bold heading as it is."""
    paragraphs, verbatim = [], False
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        paragraphs.append(paragraph if verbatim else " ".join(paragraph.splitlines()))
        verbatim = paragraph.startswith("[bold]")
    return "\n\n".join(paragraphs)


_GONE = {
    "--check-models": "`torpor serve --check-models` reads the files of the models that it serves again.",
    "--repeats": "`bench/ttft.py` takes the times as often as you like.",
}
"""Options that a command once had, and their replacements."""
_TAKING_A_TEXT = {"append", "chat", "generate"}


def _report_usage(error: Any, arguments: Sequence[str], *, as_json: bool) -> int:
    from .view.output import write_failure

    problem = error.format_message().replace("Input should be", "it must be").partition(", unable to parse")[0]
    problem = problem.replace("Value error, ", "")  # pydantic's prefix of the message of a check
    problem = " ".join(problem.replace(",\n", ", ").split())  # the parser lists choices in lines
    sentence = problem if problem.endswith("?") else f"{problem.rstrip('.')}."
    instead = _GONE.get(getattr(error, "option_name", ""), "")
    if "unexpected extra argument" in problem and {*arguments} & _TAKING_A_TEXT:
        instead = "Put a text of several words in quotes."
    message = " ".join(filter(None, (sentence, instead, f"See {_command_of(error, arguments)} --help.")))
    named = next(iter(getattr(getattr(error, "param", None), "opts", [])), "")
    details = {"option": named} if named.startswith("-") else {}
    write_failure(InvalidUsage.code, message, USAGE.number, details, as_json=as_json)
    return USAGE.number


def _command_of(error: Any, arguments: Sequence[str]) -> str:
    """The command that was called wrongly. The parser's own errors do not name it."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return str(context.command_path)
    names = {command.name for command in COMMANDS}
    return next((f"torpor {argument}" for argument in arguments if argument in names), "torpor")
