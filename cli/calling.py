"""The function of a command: how it is found, what it takes, and how it is called. Imports its module at its use."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .. import __version__
from .command_list import Command
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


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a command as it is called: what it advises names the store of --store. Its signature has all that
    the command takes."""

    @functools.wraps(command)
    def guarded(**arguments: Any) -> Any:
        arguments.pop(NAMESPACE_PARAMETER.name, None)  # its callback has used it
        with advising_for(arguments.get("store")):
            return command(**arguments)

    # The command's own annotations are text that only its module can resolve.
    signature = inspect.signature(command, eval_str=True)
    if takes_namespace(signature):
        signature = signature.replace(parameters=[*signature.parameters.values(), NAMESPACE_PARAMETER])
    guarded.__signature__ = signature  # type: ignore[attr-defined]
    return guarded
