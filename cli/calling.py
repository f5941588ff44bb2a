"""The function of a command: how it is found, what it takes, and how it is called. Imports its module at its use."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .. import __version__
from ..errors import TorporError
from ..memvid.errors import InvalidUri
from ..memvid.uri import parse_reference, session_in
from .command_list import LOOKING, Command
from .exit_codes import INTEGRITY, exit_status_of
from .reach.options import NAMESPACE_PARAMETER, takes_namespace
from .view.advice import advising_for


def write_version(*, as_json: bool) -> None:
    """Write the version of this program."""
    if not as_json:
        print(f"torpor {__version__}")
        return
    from .view.output import Output

    Output(as_json=True).document("version", {"version": __version__})


def function_of(command: Command) -> Callable[..., Any]:
    """Give the function of a command. Imports its module."""
    module, _, name = command.function.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return function


def guarded(command: Command) -> Callable[..., Any]:
    """The function of a command as it is called: what it advises names the store of --store, and where it changes
    nothing, the beginning of a session's name is enough. Its signature has all that the command takes."""
    function = function_of(command)

    @functools.wraps(function)
    def guarded(**arguments: Any) -> Any:
        arguments.pop(NAMESPACE_PARAMETER.name, None)  # its callback has used it
        with advising_for(arguments.get("store")):
            while True:
                try:
                    return function(**arguments)
                except TorporError as error:
                    completed = _completed(arguments, error) if command.name in LOOKING else None
                    if completed is None:
                        _add_suggestion(error, arguments)
                        raise
                    arguments = completed

    # The function's own annotations are text that only its module can resolve.
    signature = inspect.signature(function, eval_str=True)
    if takes_namespace(signature):
        signature = signature.replace(parameters=[*signature.parameters.values(), NAMESPACE_PARAMETER])
    guarded.__signature__ = signature  # type: ignore[attr-defined]
    return guarded


def _add_suggestion(error: TorporError, arguments: Mapping[str, Any]) -> None:
    """Where a session is damaged that the command names, say how it goes on all the same."""
    named = arguments.get("session") or arguments.get("version")
    if exit_status_of(error.code) != INTEGRITY.number or not isinstance(named, str):
        return
    from .reach.store_view import choose_served_store
    from .view.damage import add_suggestion

    with suppress(TorporError):  # the fault is reported already; a missing suggestion needs no second error
        path, served = choose_served_store(arguments.get("store"), arguments.get("socket"))
        add_suggestion(error, path, named, is_served=served is not None)


def _completed(arguments: Mapping[str, Any], error: TorporError) -> dict[str, Any] | None:
    """The arguments with the whole name of the one session that begins as a name that none has; None if that is not
    what is wrong."""
    begun = error.details.get("begun", ())
    if error.code != "session_not_found" or len(begun) != 1:
        return None
    completed = {name: _with_name(given, error.details["session"], begun[0]) for name, given in arguments.items()}
    if completed == dict(arguments):
        return None
    from .view.output import Output, plain

    Output(as_json=bool(arguments.get("as_json"))).remark(f"[dim]this is[/] {plain(begun[0])}")
    return completed


def _with_name(given: Any, wanted: str, whole: str) -> Any:
    """An argument of a command, or each of several, that names the wanted session, with its whole name."""
    if isinstance(given, list):
        return [_with_name(each, wanted, whole) for each in given]
    if not isinstance(given, str):
        return given
    name = session_in(given)
    try:
        return whole + given[len(name) :] if str(parse_reference(name)) == wanted else given
    except InvalidUri:
        return given
