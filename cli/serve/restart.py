"""`torpor restart`: stop the daemon, and start it again with the options that it had."""

from __future__ import annotations

from pathlib import Path

from ...memvid.disk.location import default_store_path
from ...socket_api.wire.address import default_socket_path
from ..exit_codes import OK, PARTIAL
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, SocketOption
from ..view.output import Output, plain
from . import last_options
from .ensure import find_or_start
from .service import main_pid, start_again
from .stop import ForceOption, TimeoutOption, shut_down


def restart(
    force: ForceOption = False, timeout: TimeoutOption = 300.0, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """Every session is put to sleep first, as by [cyan]torpor stop[/], and wakes when it is used. Where a session
    cannot be put to sleep, the daemon goes on as it was, unless [cyan]--force[/] is given. A daemon that a service
    runs is started again by its service; another one runs in the background from then on. A file of --config is read
    anew. If no daemon runs there is nothing to start again: that is [cyan]torpor ensure[/].

    [bold]Examples[/]

    [cyan]torpor restart[/]
    [cyan]torpor restart --timeout 20 --json | jq .pid[/]
    """
    output, place = Output(as_json=as_json), socket or default_socket_path()
    with connect(place) as client:
        before, had = client.peer_pid, last_options.recall(place)
    served = main_pid()
    stopped, report = shut_down(socket, timeout, force=force)
    if served is not None and served == before:
        start_again()
    given = {"store": default_store_path(), **_paths(had), "socket": place}
    daemon, _ = find_or_start(output, given)
    with daemon:
        status = daemon.status()
    if as_json:
        facts = {"socket": str(place), "pid": status.pid, "was": stopped, "store": status.store}
        output.document("restart", facts | {"slept": report.slept, "failed": report.failed})
    else:
        slept = f"; {len(report.slept)} put to sleep" if report.slept else ""
        output.line(f"torpor serves {plain(status.store)} on {plain(place)} again (pid {status.pid}){slept}")
    return PARTIAL.number if report.failed else OK.number


def _paths(had: dict[str, object]) -> dict[str, object]:
    """The options that the daemon had; its paths as such."""
    return {name: Path(str(value)) if name in ("store", "config") else value for name, value in had.items()}
