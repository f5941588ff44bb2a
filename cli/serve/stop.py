"""`torpor stop`: end the daemon. It puts every session to sleep first, and refuses where it cannot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from ...daemon.api.process import ShutdownResult
from ...memvid.disk.location import default_store_path
from ...memvid.units import format_plural
from ...socket_api.client.client import Client
from ...socket_api.errors import DaemonUnreachable, RequestTimeout, StopIncomplete
from ...socket_api.wire.address import default_socket_path
from ..exit_codes import OK, PARTIAL
from ..reach.background import still_running, wait_until_gone
from ..reach.daemon_link import connect, nobody_is_there
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, SocketOption, option
from ..reach.store_view import describe_holder, find_holder
from ..view.output import Output, plain, report_error
from .service import listen_no_more, main_pid

TimeoutOption = Annotated[
    float, option("--timeout SECONDS", "How long to wait until all sessions sleep. Default: 300.", min=0.1)
]

ForceOption = Annotated[bool, option("--force", "Stop also where a session cannot be kept whole.")]

_UNSENT = "not known to be in the remote; until a next start sends it, another machine may go on from an older version"


def stop(
    force: ForceOption = False, timeout: TimeoutOption = 300.0, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """Returns when its process is gone. Sessions wake by themselves when they are used after the next [cyan]torpor
    serve[/]. Says which sessions had changed and were put to sleep, which had read nothing and are gone, and of which
    the daemon's remote may lack the newest version. Where a session cannot be put to sleep (on a full disk, for
    example), the daemon goes on with all of them and says why; exit status 3. With [cyan]--force[/] it stops all the
    same. It keeps such a session's ledger, and the next use computes the rest again. If not even the ledger can be
    written, the session is named, and the status is 3, too: the next start brings back what was answered, or only the
    last sleep with [cyan]--durability sleep[/].

    [bold]Examples[/]

    [cyan]torpor stop[/]
    [cyan]torpor stop --timeout 20 --json[/]
    [cyan]torpor stop --force[/]
    """
    output = Output(as_json=as_json)
    served = main_pid()
    pid, report = shut_down(socket, timeout, force=force)
    ignore_interrupts()
    if served is not None and served == pid:
        listen_no_more()
    if as_json:
        body = {"pid": pid, "slept": report.slept, "failed": report.failed, "empty": report.empty}
        body |= {"ledgers": report.ledgers, "unsent": report.unsent}
        output.document("stop", body)
    else:
        _tell(output, pid, report)
    return PARTIAL.number if report.failed else OK.number


def shut_down(socket: Path | None, timeout_s: float, *, force: bool) -> tuple[int | None, ShutdownResult]:
    """Ask the daemon to stop, and wait for its process to end. No signal is sent."""
    deadline = time.monotonic() + timeout_s
    with _connect(socket, timeout_s) as client:
        pid = client.peer_pid
        try:
            report = client.shutdown(force=force)
        except RequestTimeout:
            raise still_running(pid, timeout_s) from None
    if pid is not None:
        wait_until_gone(pid, deadline, timeout_s)
    return pid, report


def _connect(socket: Path | None, timeout_s: float) -> Client:
    """Open a client. If no daemon is on the default socket but a process has the default store, name that process."""
    try:
        return connect(socket, timeout_s=timeout_s)
    except DaemonUnreachable as error:
        if not nobody_is_there(error):
            raise
        place = default_store_path()
        holder = find_holder(place) if socket is None else None
        if holder is None:
            asked = socket or default_socket_path()
            raise DaemonUnreachable(
                f"No daemon answers on {asked}, so there is nothing to stop.", **error.details
            ) from error
        raise DaemonUnreachable(
            f"No daemon answers on {default_socket_path()}, but {describe_holder(holder, place)}.",
            **error.details,
            holder_pid=holder,
        ) from error


def _tell(output: Output, pid: int | None, report: ShutdownResult) -> None:
    slept = f"{format_plural(len(report.slept), 'session')} put to sleep"
    others = "" if report.ledgers or report.failed else "; no session had changed since its last version"
    output.line(f"daemon {pid or ''} has stopped{f'; {slept}' if report.slept else others}")
    for session in report.slept:
        output.line(f"  {plain(session)}  asleep")
    for session, reason in report.ledgers.items():
        output.line(
            f"  {plain(session)}  its ledger is kept; its tokens are read again when it is used ({plain(reason)})"
        )
    for session in report.unsent:
        output.line(f"  {plain(session)}  {_UNSENT}")
    for session in report.empty:
        output.line(f"  {plain(session)}  had read nothing and is gone")
    if report.failed:
        report_error(StopIncomplete.of(report.failed), as_json=False)
