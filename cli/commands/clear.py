"""`torpor clear`: all sessions of a label deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...daemon.api.store import ClearResult
from ...memvid.units import format_bytes, format_plural
from ..exit_codes import ERROR, OK, PARTIAL
from ..reach.consent import YesOption, has_consent, what_goes_with_it
from ..reach.daemon_link import connect
from ..reach.interrupts import ignore_interrupts
from ..reach.options import DryRunOption, JsonOption, NamespaceChoice, SocketOption, option
from ..reach.store_view import sizes_of
from ..view.output import Output, plain

LabelOption = Annotated[str, option("--label TEXT", "Every session that has this label.")]


def clear(
    label: LabelOption,
    namespace: NamespaceChoice = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Asks first on a terminal; in a script, --yes is required. Bytes that other sessions share stay. What the
    daemon's remote has of them goes, too. The status is 3 if some could not be deleted.

    [bold]Examples[/]

    [cyan]torpor clear --label nightly --dry-run[/]
    [cyan]torpor clear --label nightly --yes[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        goes_too = "" if dry_run or yes or as_json else what_goes_with_it(client)
        question = f"Delete every session with the label {label} for good?{goes_too}"
        if not (dry_run or yes or has_consent(question, "delete", as_json=as_json)):
            output.remark("nothing deleted")
            return ERROR.number
        with output.progress("clear"):
            result = client.clear(label, namespace=namespace, dry_run=dry_run)
        ignore_interrupts()
        sizes = sizes_of(Path(client.status().store), result.sessions) if dry_run and not as_json else ""
    if not output.told("clear", result):
        _say(output, result, sizes)
    if not result.failed:
        return OK.number
    return PARTIAL.number if result.sessions else ERROR.number


def _say(output: Output, result: ClearResult, sizes: str) -> None:
    for session in result.sessions:
        output.line(f"{plain(session)}  {'would be deleted' if result.dry_run else 'deleted'}")
    for session, reason in result.failed.items():
        output.remark(f"[red]{plain(session)}[/] {plain(reason)}")
    for problem in result.problems:
        output.remark(f"[yellow]{plain(problem.code)}[/] {plain(problem.message)}")
    sessions = format_plural(len(result.sessions), "session")
    size = f".{sizes}" if sizes else f", {format_bytes(result.written_bytes)} written"
    output.remark(f"[dim]{sessions}{size if result.dry_run else f', {format_bytes(result.bytes_freed)} freed'}[/]")
