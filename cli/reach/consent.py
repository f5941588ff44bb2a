"""The question before a deletion: one rule for every command that destroys."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from ..errors import Interrupted, InvalidUsage
from .options import option

if TYPE_CHECKING:
    from ...socket_api.client.client import Client

YesOption = Annotated[bool, option("--yes -y", "Do not ask.")]


def what_goes_with_it(daemon: Client | None) -> str:
    """A sentence behind a blank, for the question before sessions or versions go: that the daemon's remote loses them,
    too."""
    remote = None if daemon is None else daemon.status().remote
    return "" if remote is None else f" Copies in {remote.url} go, too; `torpor strip` frees this disk alone."


def has_consent(question: str, verb: str, *, as_json: bool) -> bool:
    """Ask on a terminal whether to go on. Raises InvalidUsage: there is no terminal to ask on, and --yes was not
    given."""
    if as_json or not sys.stdin.isatty():
        raise InvalidUsage(f"There is no terminal to ask on whether to {verb}. Add --yes if you mean it.")
    import typer  # for a question alone

    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo(err=True)  # the next output begins a new line, not behind the question
        raise Interrupted("Interrupted.") from None
