"""`torpor rm`: delete sessions, awake or asleep, with all their versions."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..socket_api.results import DeleteResult
from .batches import run_batch
from .daemon_link import connect
from .errors import InvalidUsage
from .exit_codes import ERROR
from .formatting import format_bytes, format_plural
from .options import JsonOption, SessionsArgument, SocketOption
from .output import Output, plain

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)]


def rm(
    sessions: SessionsArgument, yes: YesOption = False, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """Delete sessions for good: from memory and from disk, with every version.

    Asks first on a terminal; in a script, --yes is required. Bytes that other sessions share stay.

    [bold]Examples[/]

    [cyan]torpor rm notes[/]
    [cyan]torpor rm notes review --yes --json[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        if not (yes or _has_consent(sessions, as_json=as_json)):
            output.remark("nothing deleted")
            return ERROR.number
        return run_batch(output, "rm", sessions, client.delete, _line)


def _has_consent(sessions: list[str], *, as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        raise InvalidUsage("Nobody is there to ask whether to delete; add --yes if you mean it.")
    return typer.confirm(f"Delete {', '.join(sessions)} for good?", err=True)


def _line(report: DeleteResult) -> str:
    return (
        f"{plain(report.session)}  deleted: {format_plural(report.versions_deleted, 'version')},"
        f" {format_plural(report.bundles_deleted, 'bundle')},"
        f" {format_bytes(report.bytes_freed)} freed"
    )
