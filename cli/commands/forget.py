"""`torpor forget`: remove a session with all its bytes, even from files that others need."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...daemon.api.store import MaintainRequest
from ..exit_codes import ERROR
from ..reach.consent import YesOption, has_consent, what_goes_with_it
from ..reach.daemon_link import find_daemon
from ..reach.options import DryRunOption, JsonOption, SessionArgument, SocketOption, WrittenStoreOption
from ..view.output import Output, plain
from .maintenance_report import write_report
from .upkeep import carry_out


def forget(
    session: SessionArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """[cyan]torpor rm[/] leaves a pack as it is as long as another session needs a part of it. This writes such a pack
    anew, without the text and state of the forgotten session. What another session has read too stays. What the
    daemon's remote has of it goes, too; what other machines have fetched stays there. A remote that had it and is not
    asked, as there is no daemon with it, is a problem that it tells. Asks first on a terminal; in a script, --yes is
    required.

    [bold]Examples[/]

    [cyan]torpor forget notes --dry-run[/]
    [cyan]torpor forget notes --yes --json[/]
    """
    output = Output(as_json=as_json)
    if not (dry_run or yes or has_consent(_question(session, socket, store), "forget", as_json=as_json)):
        output.remark("nothing forgotten")
        return ERROR.number
    report = carry_out(output, MaintainRequest("forget", session=session, dry_run=dry_run), socket, store)
    nothing = f"nothing of {plain(session)} is in the store"
    status = write_report(output, "forget", report, nothing=nothing)
    if report.actions and not any(action.session for action in report.actions):
        output.remark(f"there was no session {plain(session)}: what went are bytes that no session needs")
    if report.problems and not dry_run:
        output.remark(f"not proven: what the problems name may hold bytes of {session}; solve them and forget it again")
    return status


def _question(session: str, socket: Path | None, store: Path | None) -> str:
    daemon = find_daemon(socket, store)
    with contextlib.nullcontext() if daemon is None else daemon:
        return f"Forget {session} for good?{what_goes_with_it(daemon)}"
