"""The options of a daemon as parameters of a command, and as arguments of a daemon in the background. `daemon/options`
declares the options; this tells them to the parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from ...daemon.options.kinds import Choice, Flag, Kind, Number, Place, one_of
from ...daemon.options.serve_options import GIVEN_OPTIONS, Declared
from ..errors import InvalidUsage
from ..reach.options import option


def options_of(*names: str) -> dict[str, Any]:
    """Options of a daemon, for a command that takes them."""
    return {name: annotation_of(GIVEN_OPTIONS[name]) for name in names}


def given_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, as the daemon reads them: those of models by name. Raises InvalidUsage: an option is given
    twice for a model, or options do not go together."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        declared = GIVEN_OPTIONS[name]
        if value is None or value is False or value == []:
            continue
        if declared.is_named:
            given[name] = _by_model(declared, value)
        else:
            given[name] = declared.kind.read_text(value) if isinstance(value, str) else value
    if "fuse" in given and "adapter" not in given:
        raise InvalidUsage("--fuse is for --adapter; without one there is nothing to fuse.", option="--fuse")
    return given


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """A command line that gives the same options in any folder."""
    arguments: list[str] = []
    for name, declared in GIVEN_OPTIONS.items():
        flag, value = declared.flag or "", given.get(name)
        if declared.is_named:
            for model, told in (value or {}).items():
                arguments += [flag, model if told is True else f"{model}={told}" if model else str(told)]
        elif isinstance(value, Path):
            arguments += [flag, str(value.absolute())]
        elif value is not None:
            arguments += [flag] if value is True else [flag, declared.kind.argument(value)]
    return arguments


def _by_model(option: Declared, values: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values:
        if name in found and value is not True:  # a flag may be repeated
            raise InvalidUsage(f"{option.flag} is given twice for {name or 'the only model'}.", option=option.flag)
        found[name] = value
    return found


def annotation_of(of: Declared) -> Any:
    """An option as a parameter of a command; None where it is not given."""
    kind: Any = str | None
    metavar, more = of.kind.metavar, dict[str, Any]()
    if of.is_named:
        kind, metavar, more = list[str] | None, _metavar(of), {"parser": partial(_read_named, of)}
    elif isinstance(of.kind, Flag):
        kind, metavar = bool, ""
    elif isinstance(of.kind, Choice):
        kind, metavar = Literal[tuple(map(str, of.kind.values))] | None, ""
    elif isinstance(of.kind, Number):
        kind, more = int | None, {"min": of.kind.least, "max": of.kind.most}
    elif isinstance(of.kind, Place):
        kind = Path | None
    else:
        more = {"parser": of.kind.read_text}
    panel = None if of.option.group == "Options" else of.option.group
    return Annotated[kind, option(f"{of.flag} {metavar}", of.meaning, rich_help_panel=panel, **more)]


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
