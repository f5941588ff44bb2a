"""The command line as typer reads it: help, mistakes, and every line that is not plain (`plain_line.py`).

Imported only for these: typer takes longer to import than most commands take.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from ..spellings import present
from .calling import function_of, guarded, write_version
from .command_list import COMMANDS, ELSEWHERE, UNBUILT, command_named
from .errors import Interrupted, InvalidUsage
from .exit_codes import USAGE
from .help import write_help
from .reach.options import (
    NAMESPACE_VARIABLE,
    Declared,
    JsonOption,
    SocketOption,
    StoreOption,
    enter_namespace,
    option,
)

_SHARED = ("as_json", "socket", "store")  # the options of `_root` handed to a command; it refuses those it lacks

# Typer may bring its own copy of click; its public BadParameter leads to the base class of wrong usage in either case.
_UsageError: Any = typer.BadParameter.__bases__[0]


def call(arguments: Sequence[str], *, as_json: bool) -> Any:
    """Run one command line and give its exit status. Raises what its command raises, and Interrupted."""
    try:
        return _program()(args=list(arguments), prog_name="torpor", standalone_mode=False)
    except _UsageError as error:
        return _report_usage(error, arguments, as_json=as_json)
    except typer.Abort:
        raise Interrupted("Interrupted.") from None


class _Commands(TyperGroup):
    """All commands, each made when it is used. Shared options before a command are handed to it as if they stood behind
    it. Ctrl-C in a command, or while its module is imported, is an error that is reported like others; typer would end
    silently."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _made_fit(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return [command.name for command in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if command_named(cmd_name) is not None else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help()

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, [present(args[0]), *args[1:]])
        except _UsageError as error:
            if args[0] in UNBUILT:
                error.message = f"{error.message.rstrip('.')}. {UNBUILT[args[0]]}"
            elif meant := _meant_by(args[0]):
                error.message = f"{error.message.rstrip('.')}. Did you mean {' or '.join(map(repr, meant))}?"
            raise
        return name, command, [*self._given_before(ctx), *rest]

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
    meant = ELSEWHERE.get(word)
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
    """The program, made once."""
    app = _app(name="torpor", cls=_Commands, suggest_commands=False)
    app.callback(invoke_without_command=True)(_for_typer(_root))
    return typer.main.get_command(app)


@functools.cache
def load_command(name: str) -> Any:
    """Give a command with its options and its whole help. Imports its module."""
    command = command_named(name)
    if command is None:
        raise KeyError(name)
    function = function_of(command)
    app = _app(add_completion=False)
    text = f"{command.summary}\n\n{inspect.cleandoc(function.__doc__ or '')}"
    app.command(name, cls=_Command, help=_flowing(text))(_for_typer(guarded(command)))
    return typer.main.get_command(app)


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(
        rich_markup_mode="rich", pretty_exceptions_enable=False, pretty_exceptions_show_locals=False, **settings
    )


def _for_typer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its options and arguments as typer has them."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [each.replace(annotation=_annotation_for_typer(each)) for each in signature.parameters.values()]

    @functools.wraps(function)
    def called(*given: Any, **arguments: Any) -> Any:
        return function(*given, **arguments)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _annotation_for_typer(parameter: inspect.Parameter) -> Any:
    if get_origin(parameter.annotation) is not Annotated:
        return parameter.annotation
    kind, *marks = get_args(parameter.annotation)
    made = [each.for_typer() if isinstance(each, Declared) else each for each in marks]
    return Annotated[(kind, *made)]


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
    if version:
        write_version(as_json=as_json)
    elif context.invoked_subcommand is None:
        write_help()


def _flowing(text: str) -> str:
    """Join the lines of each paragraph, so that help fills any width; keep the text behind a bold heading as it is."""
    paragraphs, verbatim = [], False
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        paragraphs.append(paragraph if verbatim else " ".join(paragraph.splitlines()))
        verbatim = paragraph.startswith("[bold]")
    return "\n\n".join(paragraphs)


_GONE = {
    "--check-models": "`torpor serve --check-models` reads the files of the models that it serves again.",
    "--version": "Name the version behind an @, as in NAME@2.",
    "--repeats": "`bench/ttft.py` takes the times as often as you like.",
}
"""Options that a command once had, and their replacements."""
_TAKING_A_TEXT = {"append", "chat", "generate"}


def _report_usage(error: Any, arguments: Sequence[str], *, as_json: bool) -> int:
    from .view.output import write_failure

    if near := getattr(error, "possibilities", None):
        error.possibilities = difflib.get_close_matches(error.option_name, near, cutoff=0.7)
    problem = error.format_message().replace("Input should be", "it must be").partition(", unable to parse")[0]
    problem = problem.replace("Value error, ", "")  # pydantic's prefix of the message of a check
    problem = " ".join(problem.replace(",\n", ", ").split())  # the parser lists choices in lines
    sentence = problem if problem.endswith("?") else f"{problem.rstrip('.')}."
    unknown = getattr(error, "option_name", "")
    instead = _GONE.get(unknown, "")
    if unknown in ("-f", "--force") and any(each.name == "yes" for each in error.ctx.command.params):
        instead = "--yes, or -y, asks no question."
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
