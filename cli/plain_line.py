"""Reads a command line that has nothing but known options and arguments: most have, and typer takes longer to import
than they take.

Whatever else a line has (help, a mistake, a number, a value that begins with a dash) is left to typer, which alone
refuses. So what is read here is what typer would read (tests/cli/test_plain_line.py).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from .reach.options import Declared

_OF_ONE: Final[Mapping[Any, Any]] = {str: str, Path: Path, str | None: str, Path | None: Path}
"""The kinds of value that are made of one word, and how."""
_OF_MANY: Final = (list[str], list[str] | None)


@dataclass(frozen=True, slots=True)
class PlainLine:
    """What callbacks are told of the line."""

    info_name: str | None
    meta: dict[str, Any] = field(default_factory=dict)


class _LeftToTyper(Exception):
    """This line is not plain."""


@dataclass(slots=True)
class _Parameter:
    """A parameter of a command, and the words that were given for it."""

    name: str
    kind: Any
    declared: Declared
    default: Any
    words: list[str] = field(default_factory=list)

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words that a choice has; none of what is no choice."""
        kinds = (self.kind, *get_args(self.kind))
        return next((get_args(each) for each in kinds if get_origin(each) is Literal), ())

    def value(self, line: PlainLine) -> Any:
        given = self._given()
        if self.declared.callback is None:
            return given
        takes_line = len(inspect.signature(self.declared.callback).parameters) > 1
        call = partial(self.declared.callback, line) if takes_line else self.declared.callback
        return call(given)

    def _given(self) -> Any:
        if not self.words:
            if self.default is inspect.Parameter.empty:
                raise _LeftToTyper
            return self.default
        if self.kind in _OF_MANY:
            return self.words
        if len(self.words) > 1:
            raise _LeftToTyper
        if self.choices:
            return self.words[0]
        return True if self.is_flag else _OF_ONE[self.kind](self.words[0])


def read_line(line: PlainLine, signature: inspect.Signature, words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a command's function; None if typer has to read the words. Raises what callbacks raise: a name
    is none, say."""
    try:
        parameters = [_parameter(each) for each in signature.parameters.values()]
        _deal(parameters, words)
        ordered = sorted(parameters, key=lambda each: not each.declared.more.get("is_eager", False))
        values = {each.name: each.value(line) for each in ordered}
    except _LeftToTyper:
        return None
    return values


def _parameter(parameter: inspect.Parameter) -> _Parameter:
    kind, declared = get_args(parameter.annotation)
    variable = declared.more.get("envvar")
    if variable is not None and variable in os.environ:
        raise _LeftToTyper
    return _Parameter(parameter.name, kind, declared, parameter.default)


def _deal(parameters: Sequence[_Parameter], words: Sequence[str]) -> None:
    """Give each parameter its words."""
    options = {flag: each for each in parameters for flag in _flags_of(each)}
    places = iter([each for each in parameters if not each.declared.flags])
    place: _Parameter | None = None
    waiting = iter(words)
    for word in waiting:
        if word.startswith("-") and word != "-":
            flag, is_, value = word.partition("=")
            option = options.get(flag)
            if option is None or (option.is_flag and is_):
                raise _LeftToTyper
            option.words.append("" if option.is_flag else value if is_ else _next(waiting))
            _require_readable(option)
            continue
        if place is None or place.kind not in _OF_MANY:
            place = next(places, None)
        if place is None:
            raise _LeftToTyper
        place.words.append(word)
        _require_readable(place)


def _flags_of(parameter: _Parameter) -> Sequence[str]:
    return [] if any("/" in flag for flag in parameter.declared.flags) else parameter.declared.flags


def _next(waiting: Any) -> str:
    word = next(waiting, "-")
    if word.startswith("-"):
        raise _LeftToTyper
    return str(word)


def _require_readable(parameter: _Parameter) -> None:
    """Numbers are typer's, and so is what has rules of its own."""
    known = parameter.is_flag or parameter.kind in _OF_ONE or parameter.kind in _OF_MANY
    known = known or parameter.words[-1] in parameter.choices
    if not known or parameter.declared.more.keys() - {"callback", "is_eager", "rich_help_panel"}:
        raise _LeftToTyper
