"""`torpor rm`: delete sessions, awake or asleep, with all their versions; or single versions."""

from __future__ import annotations

from pathlib import Path

from ...daemon.api.store import DeleteResult
from ...memvid.units import format_bytes, format_plural
from ...memvid.uri import VERSION_MARK, parse_reference
from ...socket_api.client.client import Client
from ...socket_api.errors import DaemonUnreachable
from ..exit_codes import ERROR
from ..reach.batches import run_batch
from ..reach.consent import YesOption, has_consent
from ..reach.daemon_link import connect, nobody_is_there
from ..reach.options import JsonOption, SocketOption, VersionsArgument
from ..view.output import Output, plain


def rm(
    sessions: VersionsArgument, yes: YesOption = False, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """Asks first on a terminal; in a script, --yes is required. Bytes that others share stay. A version whose manifest
    is missing or damaged can be deleted, too.

    [bold]Examples[/]

    [cyan]torpor rm notes[/]
    [cyan]torpor rm notes@3[/]
    [cyan]torpor rm notes review --yes --json[/]
    """
    output = Output(as_json=as_json)
    with _connect(socket) as client:
        if not (yes or has_consent(f"Delete {', '.join(sessions)} for good?", "delete", as_json=as_json)):
            output.remark("nothing deleted")
            return ERROR.number

        def delete(session: str) -> DeleteResult:
            report = client.delete(session)
            for problem in report.problems:
                output.remark(f"[yellow]{problem.code}[/] {plain(problem.message)}")
            return report

        status = run_batch(output, "rm", sessions, delete, _line)
        for session in sessions if not as_json else ():
            if VERSION_MARK not in session and (branches := _branches_of(client, session)):
                output.remark(
                    f"{format_plural(len(branches), 'session')} named after {plain(session)} stay, as a tree that was "
                    f"kept leaves its branches: {plain(branches[0])} to {plain(branches[-1])}. Delete them by their "
                    "names. A tree that is kept with a label goes whole by `torpor clear --label`."
                )
        return status


def _branches_of(client: Client, session: str) -> list[str]:
    """The sessions `NAME.1`, `NAME.2` and so on."""
    of = parse_reference(session)
    found = [parse_reference(each.session) for each in client.list_sessions()]
    named = [each for each in found if each.namespace == of.namespace and each.name.startswith(f"{of.name}.")]
    numbered = {int(end): str(each) for each in named if (end := each.name.removeprefix(f"{of.name}.")).isdecimal()}
    return [numbered[at] for at in sorted(numbered)]


def _connect(socket: Path | None) -> Client:
    try:
        return connect(socket)
    except DaemonUnreachable as error:
        if nobody_is_there(error):
            error.message += " Without one, `torpor forget` deletes a whole session, and erases its bytes too."
        raise


def _line(report: DeleteResult) -> str:
    return (
        f"{plain(report.session)}  deleted: {format_plural(report.versions_deleted, 'version')},"
        f" {format_bytes(report.bytes_freed)} freed"
    )
