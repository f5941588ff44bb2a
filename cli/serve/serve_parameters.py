"""The options of a daemon as parameters of a command, and as arguments of a daemon in the background. `daemon/options`
declares the options; this tells them to the parser.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from ...daemon.options.kinds import Choice, Flag, Kind, Number, Place, one_of
from ...daemon.options.serve_options import GIVEN_OPTIONS, Declared
from ..errors import InvalidUsage

Command = TypeVar("Command", bound=Callable[..., Any])


def takes(*names: str) -> Callable[[Command], Command]:
    """Give a command options of a daemon, as `**values`, before its own."""

    def change(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        kept = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in kept]
        parameters = [*(_parameter(GIVEN_OPTIONS[name]) for name in names), *kept]
        command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return change


def given_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, as the daemon reads them: those of models by name. Raises InvalidUsage: an option is given
    twice for a model, or options do not go together."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        option = GIVEN_OPTIONS[name]
        if value is None or value is False or value == []:
            continue
        if option.is_named:
            given[name] = _by_model(option, value)
        else:
            given[name] = option.kind.read_text(value) if isinstance(value, str) else value
    if "fuse" in given and "adapter" not in given:
        raise InvalidUsage("--fuse is for --adapter; without one there is nothing to fuse.", option="--fuse")
    return given


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """A command line that gives the same options in any folder."""
    arguments: list[str] = []
    for name, option in GIVEN_OPTIONS.items():
        flag, value = option.flag or "", given.get(name)
        if option.is_named:
            for model, told in (value or {}).items():
                arguments += [flag, model if told is True else f"{model}={told}" if model else str(told)]
        elif isinstance(value, Path):
            arguments += [flag, str(value.absolute())]
        elif value is not None:
            arguments += [flag] if value is True else [flag, option.kind.argument(value)]
    return arguments


def _by_model(option: Declared, values: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values:
        if name in found and value is not True:  # a flag may be repeated
            raise InvalidUsage(f"{option.flag} is given twice for {name or 'the only model'}.", option=option.flag)
        found[name] = value
    return found


def _parameter(option: Declared) -> inspect.Parameter:
    kind: Any
    more: dict[str, Any] = {"metavar": option.kind.metavar}
    if option.is_named:
        kind, more = list[str] | None, {"metavar": _metavar(option), "parser": _parser(partial(_read_named, option))}
    elif isinstance(option.kind, Flag):
        kind, more = bool, {}
    elif isinstance(option.kind, Choice):
        kind, more = Literal[tuple(map(str, option.kind.values))] | None, {}
    elif isinstance(option.kind, Number):
        kind = int | None
        more |= {"min": option.kind.least, "max": option.kind.most}
    elif isinstance(option.kind, Place):
        kind = Path | None
    else:
        kind, more = str | None, {**more, "parser": _parser(option.kind.read_text)}
    panel = None if option.option.group == "Options" else option.option.group
    shown: Any = typer.Option(option.flag, show_default=False, rich_help_panel=panel, help=option.meaning, **more)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, shown],
    )


def _parser(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from error

    return parse


def _read_named(option: Declared, text: str) -> tuple[str, Any]:
    """The name of a model, and its value."""
    if isinstance(option.kind, Flag):
        return text, True
    # A path may have an equals sign, a name may not; a number may stand alone, without a name.
    name, separator, value = text.rpartition("=") if option.option.alone else text.partition("=")
    if (separator or not option.option.alone) and not (name and value):
        raise ValueError(_told(option, text))
    try:
        return name, option.kind.read_text(value)
    except ValueError:
        raise ValueError(_told(option, text)) from None


def _told(option: Declared, text: str) -> str:
    kind = option.kind
    where = f", where N is {one_of([str(each) for each in kind.values])}" if isinstance(kind, Choice) else ""
    return f"it takes {_metavar(option)}{where}, not {text!r}"


def _metavar(option: Declared) -> str:
    kind: Kind = option.kind
    if isinstance(kind, Flag):
        return "NAME"
    return f"NAME={'N' if isinstance(kind, Choice) else kind.metavar}"
